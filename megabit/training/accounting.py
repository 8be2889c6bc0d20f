"""What steps sent and what ranks keep, as counted, beside what the configuration says."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from megabit.mesh import ParallelMesh
from megabit.reduce import all_gather, all_reduce
from megabit.telemetry import Accounting, IntervalMetrics
from megabit.training.memory import KINDS, megatron_bytes, peak_bytes, resident_bytes
from megabit.training.shapes import RankShape
from megabit.training.step import StepReport, TrainingState
from megabit.training.traffic import StepKind, megatron_traffic, total_traffic
from megabit.units import MB, MIB


def take_account(
    state: TrainingState, metrics: IntervalMetrics, reports: Sequence[StepReport]
) -> Accounting | None:
    """Of the steps of an interval, whose ``metrics`` have what was sent, and of the memory of
    the rank that keeps most, or that differs most from what it should; collective over the world.

    None where there is no formula: with a teacher, whose forward passes send and keep more, without
    an output head, and where islands of several ranks meet, which publish once more then.
    """
    if state.teacher is not None or state.config.loss.objective != "language_model":
        return None
    if state.outer is not None and state.mesh.island.size > 1:
        return None
    world, ranks = state.mesh.world, state.mesh.island.size
    islands = world.size // ranks
    dp_intra = state.mesh.dp_intra
    expected_sent: defaultdict[str, float] = defaultdict(float)
    for kind, count in Counter(map(_kind_of, reports)).items():
        sent = total_traffic(state.config, ranks, state.plan, kind, dp_intra)
        for key, total in sent.items():
            expected_sent[" ".join(key)] += islands * count / len(reports) * total / MB
    if state.outer is not None:
        steps = range(metrics.step - len(reports) + 1, metrics.step + 1)
        last = state.steps.steps
        own = sum(state.outer.expected_bytes(step, step == last) for step in steps)
        own /= len(reports) * MB
        over_islands = torch.tensor(own, dtype=torch.float64, device=state.mesh.device)
        expected_sent["outer outer"] = float(all_reduce(over_islands, world))
    own_memory = _own_memory(state, reports[-1].next_share)
    by_rank = all_gather(own_memory.unsqueeze(0), world) / MIB
    off_by = (by_rank[:, 0] - by_rank[:, 1]).abs().sum(-1)
    rank = int((off_by if off_by.any() else by_rank[:, 0].sum(-1)).argmax())
    measured, expected = by_rank[rank].tolist()
    megatron_sent = megatron_traffic(state.config, ranks, state.plan)
    megatron_memory = megatron_bytes(RankShape(state.config, ranks, rank % ranks, state.plan))
    return Accounting(
        sent_by_purpose_mb=metrics.sent_by_purpose_mb,
        expected_sent_by_purpose_mb=dict(expected_sent),
        megatron_sent_mb={" ".join(key): total / MB for key, total in megatron_sent.items()},
        rank=rank,
        memory_mib=dict(zip(KINDS, measured, strict=True)),
        expected_memory_mib=dict(zip(KINDS, expected, strict=True)),
        megatron_memory_mib={kind: total / MIB for kind, total in megatron_memory.items()},
        peak_memory_mib=largest_peak_mib(state.mesh),
    )


def largest_peak_mib(mesh: ParallelMesh) -> float:
    """The most memory that any rank's process has had so far; collective over the world."""
    peak = torch.tensor(peak_bytes(mesh.device), dtype=torch.int64, device=mesh.device)
    return int(all_reduce(peak, mesh.world, "max")) / MIB


def _kind_of(report: StepReport) -> StepKind:
    return StepKind(
        batch_size=report.batch_size,
        is_finite=math.isfinite(report.grad_norm),
        is_updated=report.is_updated,
        quantization=report.quantization,
        next_share=report.next_share,
    )


def _own_memory(state: TrainingState, share: float) -> torch.Tensor:
    """Bytes that this rank keeps by kind, fp64 ``[2, kinds]``: measured and expected.

    Args:
        share: λ of the weights that are published.
    """
    island, optimizer, device = state.mesh.island, state.optimizer, state.mesh.device
    measured = optimizer.nbytes()
    shape = RankShape(state.config, island.size, island.rank, state.plan)
    expected = resident_bytes(shape, device, has_updated=optimizer.updates > 0, share=share)
    assert measured.keys() == expected.keys()
    rows = [[kinds[kind] for kind in KINDS] for kinds in (measured, expected)]
    return torch.tensor(rows, dtype=torch.float64, device=device)
