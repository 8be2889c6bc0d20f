"""The benchmark of a configuration: run everyone, and say how long it took them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from megabit.benchmark.contestants import MEGABIT, baseline_names
from megabit.benchmark.measure import (
    WARMUP,
    Progress,
    Record,
    measure_in_turns,
    measure_layout,
)
from megabit.config import Config
from megabit.errors import UserError
from megabit.launch import run_ranks
from megabit.model import num_parameters
from megabit_kernels.benchmark.machine import Machine

TIMEOUT_S = 24 * 3600
"""How long a contestant may wait for its turn, or a rank for another."""
BYTES_PER_PARAMETER = 16
"""Master weight, gradient and two moments, fp32."""


@dataclass(frozen=True)
class Result:
    """What was measured."""

    config: Config
    machine: Machine
    ranks: list[Record]
    """Of the configuration itself."""
    baselines: dict[str, Record]
    """By name."""

    @property
    def all_seconds(self) -> dict[str, list[float]]:
        """By contestant, megabit first: each step as long as on its slowest rank."""
        slowest = [max(step) for step in zip(*(r.seconds for r in self.ranks), strict=True)]
        return {MEGABIT: slowest, **{name: r.seconds for name, r in self.baselines.items()}}

    @property
    def tokens_per_s(self) -> dict[str, float]:
        """By contestant, of its median step."""
        tokens = self.config.train.global_batch_size * self.config.data.seq_length
        return {name: tokens / median(seconds) for name, seconds in self.all_seconds.items()}


def run(config: Config, world_size: int, steps: int, breakdown: bool, progress: Progress) -> Result:
    """Time ``steps`` steps of the configuration, on so many ranks of this host, and of baselines.

    Baselines are one process each. They take turns, step by step; where the configuration is one
    process too, it takes turns with them, else it runs before them. Every process has one thread.

    Raises:
        UserError: there is not enough memory for all that run at a time.
    """
    # The schedule of the learning rate is that of a run as long as the benchmark.
    num_steps = WARMUP + steps + breakdown
    config = replace(config, train=replace(config.train, steps=num_steps))
    machine = Machine.describe(torch.device("cpu"))
    names = baseline_names(config)
    _check_memory(config, world_size, len(names), machine.memory_bytes)

    def in_turns(names: Sequence[str]) -> dict[str, Record]:
        measure = partial(measure_in_turns, names, config, steps, breakdown, progress)
        return dict(zip(names, run_ranks(measure, len(names), TIMEOUT_S), strict=True))

    if world_size == 1:
        records = in_turns([MEGABIT, *names])
        return Result(config, machine, [records.pop(MEGABIT)], records)
    measure = partial(measure_layout, config, steps, breakdown, progress)
    ranks = run_ranks(measure, world_size, TIMEOUT_S)
    return Result(config, machine, ranks, in_turns(names))


def _check_memory(config: Config, world_size: int, baselines: int, free_bytes: int) -> None:
    """Refuse what cannot fit; that is better than to be killed after minutes."""
    replicas = world_size // (config.parallel.tp * config.parallel.pp)
    models = 1 + baselines if world_size == 1 else max(replicas, baselines)
    needed = models * BYTES_PER_PARAMETER * num_parameters(config.model)
    if needed > free_bytes:
        raise UserError(
            f"model: {models} of them at a time, with gradients and moments, need "
            f"{needed / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB are free; take a smaller one"
        )
