"""Islands of the small model of ``tests/data_parallel``, and the same in plain torch.

Real ranks, one for each DP rank of each island. The plain simulation runs islands in turn in one
process and shares no code with megabit: its outer optimizer is torch's SGD with Nesterov momentum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabit.config import Config, OuterConfig
from megabit.mesh import ParallelMesh, Topology
from megabit.outer import Outer, open_outer
from tests.data_parallel.small import (
    CLIP,
    NUM_ELEMENTS,
    PlainRun,
    SmallRun,
    config_of,
    hyperparameters,
    tokens,
)

Batch = Callable[[int, int, int], Tensor]
"""(step, island, islands) → what the island computes on, ``[2, m, T]``."""


def own_share(step: int, island: int, islands: int) -> Tensor:
    """The island's run of a step's microbatches."""
    return tokens(step).tensor_split(islands, dim=1)[island]


def all_the_same(step: int, island: int, islands: int) -> Tensor:
    """All islands see all of it."""
    return tokens(step)


def outer_config(islands: int, *settings: str, zero_stage: int = 1) -> Config:
    """DiLoCo with three rounds in 15 steps, unless told otherwise."""
    return config_of(
        zero_stage,
        *("outer.method=diloco", f"outer.islands={islands}", "outer.inner_steps=5"),
        *settings,
    )


def on_wire(wire: str) -> tuple[str, ...]:
    """Settings of a wire; blocks of int8 that several fit into a row."""
    return (f"outer.wire={wire}", *(("communication.block=16",) if wire == "int8" else ()))


def island_mesh(islands: int) -> ParallelMesh:
    """Islands of DP ranks only."""
    if not dist.is_initialized():
        return ParallelMesh()
    return ParallelMesh.create(1, 1, torch.device("cpu"), topology=Topology(islands=islands))


@dataclass
class IslandRun:
    """The calling rank's island."""

    small: SmallRun
    outer: Outer
    batch: Batch = own_share
    steps: int = 0
    """Done so far."""

    @staticmethod
    def create(config: Config, batch: Batch = own_share) -> "IslandRun":
        small = SmallRun.create(config, island_mesh(config.outer.islands))
        outer = open_outer(config, small.optimizer)
        assert outer is not None
        return IslandRun(small, outer, batch)

    @property
    def mesh(self) -> ParallelMesh:
        return self.small.mesh

    def step(self) -> bool:
        """A step, and a meeting if there is one; whether there was."""
        self.inner_step()
        return self.outer.after_step(self.steps)

    def inner_step(self) -> None:
        """A step of the island by itself."""
        axis, step = self.mesh.outer, self.steps
        self.small.backward(step, self.batch(step, axis.rank, axis.size))
        norm = self.small.optimizer.gradient_norm(NUM_ELEMENTS)
        self.small.optimizer.step(min(1.0, CLIP / norm), *hyperparameters(step))
        self.steps += 1

    def train(self, steps: int) -> "IslandRun":
        for _ in range(steps):
            self.step()
        return self

    def sent(self) -> float:
        """Bytes that this rank has sent to other islands."""
        return self.mesh.outer.sent["outer"]

    def weights(self) -> "Weights":
        return Weights.of(self.small)


class Weights(NamedTuple):
    """What a rank of the small model has; copies."""

    masters: list[Tensor]
    moments: list[Tensor]
    codes: dict[str, Tensor]

    @staticmethod
    def of(small: SmallRun) -> "Weights":
        codes = {name: value.clone() for name, value in small.codes().items()}
        pieces = [piece.tensors for piece in small.optimizer.pieces()]
        return Weights(
            [tensors["master"].clone() for tensors in pieces],
            [t[kind].clone() for t in pieces for kind in ("exp_avg", "exp_avg_sq")],
            codes,
        )


def assert_same_model(a: Weights, b: Weights) -> None:
    """Masters and codes, bit by bit; moments are each island's own."""
    assert len(a.masters) == len(b.masters)
    assert all(map(torch.equal, a.masters, b.masters))
    assert a.codes.keys() == b.codes.keys()
    assert all(torch.equal(codes, b.codes[name]) for name, codes in a.codes.items())


def assert_same(a: Weights, b: Weights) -> None:
    """Everything, bit by bit."""
    assert_same_model(a, b)
    assert all(map(torch.equal, a.moments, b.moments))


@dataclass
class PlainIslands:
    """DiLoCo as its authors write it down, in one process."""

    islands: list[PlainRun]
    anchor: dict[str, nn.Parameter]
    outer: torch.optim.SGD

    @staticmethod
    def create(config: OuterConfig, dtype: torch.dtype) -> "PlainIslands":
        islands = [PlainRun.create(dtype) for _ in range(config.islands)]
        anchor = {
            name: nn.Parameter(weight.detach().clone())
            for name, weight in islands[0].weights.items()
        }
        outer = torch.optim.SGD(
            anchor.values(), config.lr, config.momentum, nesterov=config.momentum > 0
        )
        return PlainIslands(islands, anchor, outer)

    def train(self, steps: int, inner_steps: int) -> "PlainIslands":
        for step in range(steps):
            for number, island in enumerate(self.islands):
                island.step(step, own_share(step, number, len(self.islands)))
            if (step + 1) % inner_steps == 0:
                self.meet()
        return self

    @torch.no_grad()
    def meet(self) -> None:
        for name, anchor in self.anchor.items():
            mean = torch.stack([island.weights[name] for island in self.islands]).mean(0)
            anchor.grad = anchor - mean
        self.outer.step()
        for island in self.islands:
            for name, weight in island.weights.items():
                weight.copy_(self.anchor[name])
