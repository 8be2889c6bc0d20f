"""Islands of TP and PP ranks: the decoder, with the step that the trainer takes."""

import functools

import pytest
import torch
from torch import Tensor

from megabit.config import Config
from megabit.data.batches import Batch
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.outer import open_outer
from megabit.training.step import TrainingState, train_step
from tests.training.tiny import Owned, global_batch, logical, make_mesh, owned, tiny

STEPS = 6
OUTER = (
    *("outer.method=diloco", "outer.islands=2", "outer.inner_steps=3", "outer.fragments=2"),
    *("train.global_batch_size=8", "train.micro_batch_size=2"),
)


def island_batch(config: Config, mesh: ParallelMesh, step: int) -> Batch:
    """This rank's part of the island's part of a step's samples, ``[m, B, S]``."""
    batch = global_batch(config, step)
    shape = (-1, config.train.micro_batch_size, config.data.seq_length)

    def own(x: Tensor) -> Tensor:
        island = x[0].chunk(mesh.outer.size)[mesh.outer.rank]
        return island.chunk(mesh.dp.size)[mesh.dp.rank].reshape(shape)

    return Batch(own(batch.inputs), own(batch.targets), own(batch.mask))


def train(config: Config) -> TrainingState:
    mesh = make_mesh(config)
    state = TrainingState.create(config, mesh)
    outer = open_outer(config, state.optimizer)
    assert outer is not None
    for step in range(STEPS):
        train_step(state, island_batch(config, mesh, step), step)
        outer.after_step(step + 1)
    outer.conclude(STEPS)
    return state


def masters(settings: tuple[str, ...], world_size: int) -> list[dict[str, Tensor]]:
    """Of each island, whole."""
    config = tiny(*OUTER, *settings)

    def run() -> Owned:
        return owned(train(config).optimizer)

    ranks = run_ranks(run, world_size)
    half = world_size // 2
    return [logical(island) for island in (ranks[:half], ranks[half:])]


@functools.cache
def narrow(wire: str) -> dict[str, Tensor]:
    """Of islands of one rank."""
    return masters(("precision.compute=float64", f"outer.wire={wire}"), 2)[0]


@pytest.mark.parametrize(
    "layout", [("parallel.tp=2",), ("parallel.pp=2",), ("optim.zero_stage=0",)], ids=str
)
def test_the_layout_of_islands_does_not_matter(layout: tuple[str, ...]) -> None:
    """In fp64, where backward's sums over TP and DP differ too little to reach a code. Fragments
    are the same tensors at each layout."""
    islands = masters(("precision.compute=float64", *layout), 4)
    for name, weight in narrow("float32").items():
        assert torch.equal(islands[0][name], islands[1][name])
        torch.testing.assert_close(islands[0][name], weight, rtol=0, atol=1e-12)


def test_ranks_that_hold_the_same_rows_go_on_agreeing() -> None:
    """A KV head that two TP ranks hold, and gains: what int8 loses of a row is the same on both,
    though they hold different other rows."""
    config = tiny(
        *(*OUTER, "parallel.tp=2", "model.num_key_value_heads=1", "outer.wire=int8"),
        *("communication.block=16", "model.intermediate_size=52"),
    )

    def run() -> list[tuple[str, tuple[slice, ...], Tensor]]:
        pieces = train(config).optimizer.pieces()
        return [(piece.name, piece.index, piece.tensors["master"].clone()) for piece in pieces]

    ranks = run_ranks(run, 4)
    shared = 0
    for first, second in ((0, 1), (2, 3)):
        for (name, index, a), (_, other, b) in zip(ranks[first], ranks[second], strict=True):
            if index == other:
                shared += 1
                assert torch.equal(a, b), name
    assert shared >= 2 * (2 * 2 + 2)  # k and v of two layers, and norms
    for a, b in zip(ranks[:2], ranks[2:], strict=True):
        assert all(torch.equal(x[2], y[2]) for x, y in zip(a, b, strict=True))
