"""The global norm and clipping: every logical element counts once, at any layout."""

import pytest
import torch
from torch import Tensor

from megabit.config import Config
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.training.gradients import clip, global_norm
from megabit.training.step import TrainingState, forward_backward
from tests.training.tiny import Owned, logical, make_mesh, own_batch, owned, tiny

TP2, TP4, PP2 = "parallel.tp=2", "parallel.tp=4", "parallel.pp=2"
SP = "parallel.sequence_parallel=true"


def norm_and_gradients(config: Config) -> tuple[float, Owned]:
    """On the calling rank."""
    mesh = make_mesh(config)
    state = TrainingState.create(config, mesh)
    forward_backward(state, own_batch(config, mesh, 0))
    norm = global_norm(state.parameters.values(), mesh).item()
    return norm, owned(state, ((name, p.grad) for name, p in state.parameters.items()))


def norm_of(gradients: dict[str, Tensor]) -> float:
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ((TP2,), 2),
        ((TP4,), 4),  # more ranks than KV heads
        ((PP2,), 2),
        ((), 2),  # DP
        ((TP2, SP), 2),
        ((TP2, PP2), 4),
    ],
    ids=["tp2", "tp4", "pp2", "dp2", "tp2-sp", "tp2-pp2"],
)
def test_every_layout_has_the_norm_of_one_process(
    settings: tuple[str, ...], world_size: int, tied: str
) -> None:
    model = ("precision.compute=float64", f"model.tie_word_embeddings={tied}")
    expected, whole = norm_and_gradients(tiny(*model))
    config = tiny(*model, *settings)
    ranks = run_ranks(lambda: norm_and_gradients(config), world_size)
    gradients = logical([part for _, part in ranks])
    # fp64 sums in another order: 2^-53 each, over a few thousand terms.
    assert norm_of(logical([whole])) == pytest.approx(expected, rel=1e-12)
    assert gradients.keys() == whole.keys()
    for norm, _ in ranks:
        assert norm == ranks[0][0]  # ranks must agree on whether to clip
        assert norm == pytest.approx(expected, rel=1e-12)
        assert norm == pytest.approx(norm_of(gradients), rel=1e-12)


@pytest.mark.parametrize(("max_norm", "factor"), [(0.25, 0.25 / 2), (2.0, 1), (3.0, 1), (0.0, 1)])
def test_clip(max_norm: float, factor: float) -> None:
    state = TrainingState.create(tiny(), ParallelMesh())
    flats = [bucket.flat for bucket in state.gradients.buckets]
    for flat in flats:
        flat.normal_(generator=torch.Generator().manual_seed(0))
    before = [flat.clone() for flat in flats]
    clip(state.gradients, 2.0, max_norm)
    # Powers of two, so that scaling is exact.
    assert all(torch.equal(flat, old * factor) for flat, old in zip(flats, before, strict=True))
    assert all(p.grad is not None and p.grad.any() for p in state.parameters.values())
