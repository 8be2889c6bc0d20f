"""How each rank of an engine is: what it has sent and waited, its memory, its time."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from megabit.inference.runner import StageRunner
from megabit.mesh import ParallelMesh
from megabit.reduce import all_gather

REPORT_BYTES = 2048
"""Room for a report, so that all are equally long."""


@dataclass(frozen=True)
class RankReport:
    """Of one rank, since the engine's start."""

    stage: int
    tp_rank: int
    seconds: float
    """Of computing."""
    memory: int
    """Bytes: resident, or allocated on its GPU."""
    memory_limit: int
    sent: dict[str, float] = field(default_factory=dict)
    """Bytes, by axis and codec."""
    waited: dict[str, float] = field(default_factory=dict)
    """Seconds, by axis."""
    calls: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Lossy sums that were sent exactly, by reason."""

    @staticmethod
    def of(mesh: ParallelMesh, runner: StageRunner) -> "RankReport":
        """This rank's, now."""
        memory, limit = memory_of(mesh.device)
        lossy = runner.stages.context.lossy_sums
        return RankReport(
            mesh.pp.rank,
            mesh.tp.rank,
            round(runner.seconds, 6),
            memory,
            limit,
            {f"{axis}/{codec}": sent for (axis, codec), sent in mesh.sent_as().items() if sent},
            {axis: round(s, 6) for axis, s in mesh.waited_s().items() if s},
            {axis: calls for axis, calls in mesh.calls().items() if calls},
            {} if lossy is None else {str(why): count for why, count in lossy.fallbacks.items()},
        )


def gather_reports(own: RankReport, mesh: ParallelMesh) -> list[RankReport]:
    """Those of all ranks, stage by stage, on every rank; collective over TP and PP."""
    text = json.dumps(asdict(own)).encode()
    if len(text) > REPORT_BYTES:
        raise ValueError(f"a report of {len(text)} bytes; there is room for {REPORT_BYTES}")
    row = torch.zeros(1, REPORT_BYTES, dtype=torch.uint8)
    row[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    rows = all_gather(all_gather(row.to(mesh.device), mesh.tp), mesh.pp).cpu()
    return [RankReport(**json.loads(bytes(r.tolist()).rstrip(b"\0"))) for r in rows]


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes that this process has of the device's or host's memory, and all that there are."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return torch.cuda.memory_allocated(device), total
    if sys.platform != "linux":
        return 0, 0
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    kib = Path("/proc/meminfo").read_text(encoding="ascii").split("MemTotal:")[1].split()[0]
    return pages * 4096, int(kib) * 1024


def summed(reports: Sequence[RankReport]) -> tuple[dict[str, float], dict[str, int]]:
    """Bytes by axis and codec, over all ranks; fallbacks by reason, of stages' first ranks: all TP
    ranks of a stage fall back together."""
    sent: dict[str, float] = {}
    fallbacks: Counter[str] = Counter()
    for report in reports:
        for key, count in report.sent.items():
            sent[key] = sent.get(key, 0.0) + count
        if report.tp_rank == 0:
            fallbacks.update(report.fallbacks)
    return sent, dict(fallbacks)
