"""A training step on one device, beside the same shape as a dense model in bf16 PyTorch.

Contestants run one after the other, so that each has the device's memory to itself. A step is timed
from one synchronization to the next, as a user waits for it.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megabit.benchmark.baselines import DenseLinear
from megabit.benchmark.contestants import Contestant, Megabit, Plain
from megabit.benchmark.document import Row, Sample
from megabit.benchmark.gpu_findings import Findings, Place
from megabit.benchmark.measure import WARMUP, random_batch
from megabit.config import Config
from megabit.mesh import ParallelMesh
from megabit.model.flops import flops_per_token
from megabit.training.memory import peak_bytes
from megabit_kernels.benchmark.clock import seconds_of_one
from megabit_kernels.benchmark.measure import first_line

OURS = ("megabit", "megabit, int8 backward")
DENSE, COMPILED = "dense bf16 PyTorch", "dense bf16 PyTorch, torch.compile"


@dataclass(frozen=True)
class _Steps:
    """What a contestant took."""

    sample: Sample
    also: dict[str, float]


def measure_training(
    findings: Findings, place: Place, config: Config, steps: int, compiles: bool
) -> None:
    """Tokens a second, share of the device's measured bf16 peak, and peak memory.

    Args:
        compiles: whether the compiled baseline takes part.
    """
    config = replace(config, train=replace(config.train, steps=WARMUP + steps, tokens=None))
    int8 = replace(config, precision=replace(config.precision, ternary_backward="int8"))
    mesh = ParallelMesh(device=place.device)
    makers: dict[str, Callable[[], Contestant]] = {
        DENSE: lambda: Plain(config, DenseLinear, torch.bfloat16, place.device),
        OURS[0]: lambda: Megabit(config, mesh),
        OURS[1]: lambda: Megabit(int8, mesh),
        COMPILED: lambda: Plain(config, DenseLinear, torch.bfloat16, place.device, True),
    }
    if not compiles:
        del makers[COMPILED]
        findings.left_out.append(f"{COMPILED}: not in a quick run")
    found: dict[str, _Steps] = {}
    try:
        for name, make in makers.items():
            place.told(f"{name}, {WARMUP + steps} steps")
            try:
                found[name] = _steps(name, make, config, steps, findings.peak_flops, place)
            except Exception as error:  # too little memory, say: others may fit
                findings.left_out.append(f"{name}: {first_line(error)}")
    finally:  # what was measured before the time ended
        findings.rows += _rows(found)


def _rows(found: dict[str, _Steps]) -> list[Row]:
    rows = []
    for name in OURS:
        for baseline in (DENSE, COMPILED):
            if name in found and baseline in found:
                ours, theirs = found[name], found[baseline]
                also = ours.also | {f"baseline_{key}": value for key, value in theirs.also.items()}
                rows.append(Row("a step", ours.sample, theirs.sample, "tokens", also))
    return rows


def _steps(
    name: str,
    make: Callable[[], Contestant],
    config: Config,
    steps: int,
    peak_flops: float | None,
    place: Place,
) -> _Steps:
    _forget(place.device)
    contestant = make()
    seconds = []
    for number in range(WARMUP + steps):
        batch = random_batch(config, contestant.mesh, number)
        seconds.append(
            seconds_of_one(lambda: contestant.step(batch, number), place.device)  # noqa: B023
        )
    tokens = float(config.train.global_batch_size * config.data.seq_length)
    sample = Sample.of(name, seconds[WARMUP:], tokens)
    also = {}
    if peak_flops is not None:
        flops = flops_per_token(config.model, config.data.seq_length).total * tokens
        also["MFU_share"] = flops / sample.timing.median_s / peak_flops
    if place.device.type == "cuda":  # a process' peak would be that of all contestants
        also["peak_memory_bytes"] = float(peak_bytes(place.device))
    return _Steps(sample, also)


def _forget(device: torch.device) -> None:
    """Give back what the contestant before had, and measure peaks anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
