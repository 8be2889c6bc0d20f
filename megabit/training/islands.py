"""The training loop where islands train by themselves: when they meet, and what they agree on.

Steps send nothing from island to island, and each island judges its own. Islands wait for each
other when they meet, and for what is everybody's: a log line, a checkpoint, a comparison of
replicas. All of them take the same steps, so whatever the world agrees on is agreed on at a
meeting: to stop, or that an island's guard has ended the run. Until then such an island goes on; a
step after which the guard wants to stop has changed no weight.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megabit.mesh import ParallelMesh
from megabit.reduce import all_reduce, any_rank
from megabit.telemetry import IntervalMetrics
from megabit.training.measures import Stopped
from megabit.training.step import TrainingState
from megabit.training.stop import StopSignal

MEANS = ("loss", "objective", "bits_per_byte", "grad_norm", "grad_norm_std", "loss_scale")
"""What a log line has as a mean over islands."""


@dataclass
class Islands:
    """What the loop does about them; with one island, nothing."""

    state: TrainingState
    stopped: Stopped | None = None
    """Why this island's guard has ended the run, until the others know."""
    is_agreed_on: bool = True
    """Whether the next look for a stop is taken by all islands together."""

    def stops(self, stop: StopSignal, step: int) -> bool:
        """Whether the run is to stop after ``step`` steps; collective.

        Raises:
            Stopped: an island's guard has ended it.
        """
        mesh = self.state.mesh
        if mesh.outer.size == 1:
            return stop.agreed()
        if not self.is_agreed_on:
            return False
        if any_rank(self.stopped is not None, mesh.world, mesh.device):
            # All of them save this step, whenever an island was to stop.
            reason = str(self.stopped or f"step {step}: another island has ended the run")
            raise Stopped(step, reason)
        return stop.agreed()

    @contextmanager
    def put_off_stop(self) -> Iterator[None]:
        """A ``Stopped`` of the block is kept until islands meet."""
        try:
            yield
        except Stopped as stopped:
            if self.state.mesh.outer.size == 1:
                raise
            self.stopped = self.stopped or stopped

    def after_step(self, step: int) -> None:
        """Meet, if a meeting is due after ``step`` steps; after the last one in any case."""
        outer = self.state.outer
        if outer is None:
            return
        self.is_agreed_on = outer.after_step(step)
        if step == self.state.steps.steps:
            outer.conclude(step)


def over_islands(metrics: IntervalMetrics, mesh: ParallelMesh) -> IntervalMetrics:
    """``metrics`` of one island → of all, the same everywhere: means, and what they have done
    together. Collective over islands."""
    islands = mesh.outer.size
    if islands == 1:
        return metrics
    own = [getattr(metrics, name) for name in MEANS]
    # An island that has skipped all of its steps has no loss.
    counts = [float(math.isfinite(value)) for value in own]
    values = [value if math.isfinite(value) else 0.0 for value in own]
    packed = torch.tensor([*values, *counts, metrics.skipped], dtype=torch.float64)
    *sums, skipped = all_reduce(packed.to(mesh.device), mesh.outer).tolist()
    pairs = zip(sums[: len(MEANS)], sums[len(MEANS) :], strict=True)
    means: list[Any] = [total / count if count else math.nan for total, count in pairs]
    return replace(
        metrics,
        **dict(zip(MEANS, means, strict=True)),
        skipped=int(skipped),
        grad_norm_spread=None,  # of DP ranks, which are others on each island
        tokens_per_s=metrics.tokens_per_s * islands,
        tflops=metrics.tflops * islands,
        mfu=None if metrics.mfu is None else metrics.mfu * islands,
    )
