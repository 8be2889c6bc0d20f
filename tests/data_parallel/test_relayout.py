"""Buckets of another size, in the middle of a run: not a bit of it changes."""

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from megabit.training.step import TrainingState, train_step
from tests.training.tiny import make_mesh, own_batch, tiny


def kept(state: TrainingState) -> dict[str, Tensor]:
    return {
        f"{kind} {piece.name} {piece.rows.start}": values.clone()
        for piece in state.optimizer.pieces()
        for kind, values in piece.tensors.items()
    }


def trained(settings: tuple[str, ...], sizes_mb: tuple[float, ...]) -> dict[str, Tensor]:
    """What the optimizer keeps after two steps with buckets of each of ``sizes_mb``."""
    config = tiny(*settings, f"parallel.bucket_mb={sizes_mb[0]}")
    state = TrainingState.create(config, make_mesh(config))
    for number, size in enumerate(sizes_mb):
        if number:
            before = len(state.optimizer.gradients.buckets)
            state.optimizer.relayout(size)
            assert len(state.optimizer.gradients.buckets) != before
        for step in range(2 * number, 2 * number + 2):
            train_step(state, own_batch(config, state.mesh, step), step)
    return kept(state)


@pytest.mark.parametrize(
    "settings",
    [
        ("optim.zero_stage=0",),
        ("optim.zero_stage=1", "parallel.tp=2"),
        ("optim.zero_stage=2", "precision.gradients=int8"),
        ("optim.name=muon", "parallel.pp=2", "model.tie_word_embeddings=false"),
        ("communication.dp_intra=2", "precision.gradients=topk", "communication.topk_ratio=0.3"),
    ],
    ids=" ".join,
)
def test_no_bit_changes(settings: tuple[str, ...]) -> None:
    def run() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return trained(settings, (0.01, 0.01 / 3, 1.0)), trained(settings, (1.0, 0.003, 0.01))

    for one, other in run_ranks(run, 4):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
