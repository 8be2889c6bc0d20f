"""Who is timed: the configuration itself, and the same model in plain torch."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from megabit.benchmark.baselines import DenseLinear, FakeQuantizedLinear, PlainTrainer
from megabit.config import Config
from megabit.data.batches import Batch
from megabit.mesh import ParallelMesh
from megabit.training.step import TrainingState, train_step

MEGABIT = "megabit"
PLAIN: dict[str, tuple[type[DenseLinear], torch.dtype]] = {
    "dense fp32": (DenseLinear, torch.float32),
    "dense bf16": (DenseLinear, torch.bfloat16),
    "fake fp32": (FakeQuantizedLinear, torch.float32),
    "fake bf16": (FakeQuantizedLinear, torch.bfloat16),
}
"""The baselines: linear layers, and the dtype of activations and products."""


@dataclass(frozen=True)
class Outcome:
    """What a contestant says about one step."""

    loss: float
    """Mean over the target tokens, before the update."""
    pipeline_s: float = 0.0
    """Seconds in the pipeline's schedule, and how many of them it waited for a neighbour."""
    wait_s: float = 0.0


class Contestant(Protocol):
    """A model that is trained step by step."""

    mesh: ParallelMesh
    """One process, for all but megabit's own layouts."""
    module: nn.Module

    def step(self, batch: Batch, step: int) -> Outcome:
        """Optimizer step ``step`` (0-based) on this rank's part of the global batch."""


class Megabit:
    """The configuration, on this rank."""

    def __init__(self, config: Config, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        self._state = TrainingState.create(config, mesh)
        self.module: nn.Module = self._state.stages

    def step(self, batch: Batch, step: int) -> Outcome:
        report = train_step(self._state, batch, step)
        return Outcome(report.loss, report.pipeline.seconds, report.pipeline.wait_s)


class Plain:
    """A baseline."""

    def __init__(
        self,
        config: Config,
        linear: type[DenseLinear],
        dtype: torch.dtype,
        device: torch.device | None = None,
        compiles: bool = False,
    ) -> None:
        """``compiles``: each layer with ``torch.compile``; they are alike, so that is done once."""
        self.mesh = ParallelMesh(device=device or torch.device("cpu"))
        self._trainer = PlainTrainer(config, linear, dtype, self.mesh.device)
        if compiles:
            for layer in self._trainer.model.model.layers:
                layer.compile()
        self.module: nn.Module = self._trainer.model

    def step(self, batch: Batch, step: int) -> Outcome:
        return Outcome(self._trainer.train_step(batch.to(self.mesh.device), step))


def baseline_names(config: Config) -> list[str]:
    """The baselines of a configuration; none of a dense model quantizes."""
    return [
        name
        for name, (linear, _) in PLAIN.items()
        if config.model.linear == "ternary" or linear is DenseLinear
    ]


def make_contestant(name: str, config: Config) -> Contestant:
    """The contestant of that name, in this process alone."""
    if name == MEGABIT:
        return Megabit(config, ParallelMesh())
    return Plain(config, *PLAIN[name])
