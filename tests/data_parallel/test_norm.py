"""The global norm and clipping: every logical element counts once, at any layout, in any order."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from megabit.config import Config
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import num_parameters
from megabit.training.step import TrainingState, forward_backward, train_step
from tests.training.tiny import Owned, logical, make_mesh, own_batch, owned, tiny

TP2, TP4, PP2 = "parallel.tp=2", "parallel.tp=4", "parallel.pp=2"
SP = "parallel.sequence_parallel=true"
EXACT = "parallel.exact=full"
ZERO0, ZERO2 = "optim.zero_stage=0", "optim.zero_stage=2"

LAYOUTS = {
    "tp2": ((TP2,), 2),
    "tp4": ((TP4,), 4),  # more ranks than KV heads
    "pp2": ((PP2,), 2),
    "dp2": ((), 2),
    "dp4-zero0": ((ZERO0,), 4),
    "dp4-zero2": ((ZERO2,), 4),
    "dp2-exact": ((EXACT,), 2),  # a tied embedding has two gradients
    "tp2-sp": ((TP2, SP), 2),
    "tp2-pp2": ((TP2, PP2), 4),
    "tp2-sp-dp2": ((TP2, SP), 4),
}
BY_LAYOUT = pytest.mark.parametrize(("settings", "world_size"), LAYOUTS.values(), ids=LAYOUTS)


def computed(config: Config) -> TrainingState:
    """With the gradients of a step, on the calling rank."""
    mesh = make_mesh(config)
    state = TrainingState.create(config, mesh)
    forward_backward(state, own_batch(config, mesh, 0), 0)
    return state


def norm_of(gradients: dict[str, Tensor]) -> float:
    joined = torch.cat([gradient.flatten() for gradient in gradients.values()])
    return joined.double().norm().item()


def planted(config: Config) -> dict[str, Tensor]:
    """fp32 gradients by logical name, of sizes between 1e-12 and 1e8: a sum of their squares in
    fp32 depends on the order in its first digits."""
    stage = TrainingState.create(config, ParallelMesh()).stages
    generator = torch.Generator().manual_seed(7)
    gradients = {}
    for name, parameter in stage.named_parameters():
        sizes = torch.rand(parameter.shape, generator=generator) * 20 - 12
        gradients[name] = torch.randn(parameter.shape, generator=generator) * 10**sizes
    return gradients


def plant(state: TrainingState, gradients: dict[str, Tensor]) -> None:
    for piece in state.optimizer.pieces():
        piece.tensors["gradient"].copy_(gradients[piece.name][piece.index])


def norm(state: TrainingState) -> float:
    return state.optimizer.gradient_norm(num_parameters(state.config.model))


@BY_LAYOUT
def test_every_layout_has_the_norm_of_one_process(
    settings: tuple[str, ...], world_size: int
) -> None:
    """Of its own gradients in fp64, and of planted ones in fp32 to the bit."""
    models = [f"model.tie_word_embeddings={tied}" for tied in ("true", "false")]
    plants = [planted(tiny(model)) for model in models]

    def run(*settings: str) -> list[tuple[float, Owned, float]]:
        results = []
        for model, gradients in zip(models, plants, strict=True):
            state = computed(tiny(model, "precision.compute=float64", *settings))
            computed_norm, own = norm(state), owned(state.optimizer, "gradient")
            state = computed(tiny(model, *settings))
            plant(state, gradients)
            results.append((computed_norm, own, norm(state)))
        return results

    ranks = run_ranks(lambda: run(*settings), world_size)
    for i, (expected, whole, expected_planted) in enumerate(run()):
        # fp64 sums in another order: 2^-53 each, over a few thousand terms. The norm's fixed point
        # has units of 2^-48 of the largest square for the 2^14 elements of this model.
        assert norm_of(logical([whole])) == pytest.approx(expected, rel=1e-12)
        gradients = logical(rank[i][1] for rank in ranks)
        assert gradients.keys() == logical([whole]).keys()
        for own_norm, _, own_planted in (rank[i] for rank in ranks):
            assert own_norm == ranks[0][i][0]  # ranks must agree on whether to clip
            assert own_norm == pytest.approx(expected, rel=1e-12)
            assert own_norm == pytest.approx(norm_of(gradients), rel=1e-12)
            assert own_planted == expected_planted
        # The same units; fp32 gradients mean less than that.
        assert expected_planted == pytest.approx(norm_of(plants[i]), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [((), 1), ((), 2), ((ZERO0,), 2), ((TP2, SP), 4), ((PP2,), 4)],
    ids=["one", "dp2", "dp2-zero0", "tp2-sp-dp2", "pp2-dp2"],
)
def test_one_element_that_is_not_finite_makes_the_norm_infinite_on_all_ranks(
    settings: tuple[str, ...], world_size: int
) -> None:
    """Wherever it is: the last element that a rank counts, on each rank in turn."""
    config = tiny(*settings)

    def run() -> tuple[list[float], float]:
        state = computed(config)
        last = [*state.optimizer.pieces(owned=True)][-1].tensors["gradient"].view(-1)
        norms = []
        for rank, bad in itertools.product(range(world_size), (math.nan, math.inf, -math.inf)):
            kept = last[-1].clone()
            if state.mesh.world.rank == rank:
                last[-1] = bad
            norms.append(norm(state))
            last[-1] = kept
        return norms, norm(state)

    for norms, after in run_ranks(run, world_size):
        assert norms == [math.inf] * 3 * world_size
        assert math.isfinite(after)


@pytest.mark.parametrize(("share", "factor"), [(0.25, 0.25), (1.0, 1), (2.0, 1), (0.0, 1)])
def test_clipping(share: float, factor: float) -> None:
    """A gradient that is longer than the limit is scaled down to it; no limit, no scaling."""
    batch = own_batch(tiny(), ParallelMesh(), 0)

    def moments(limit: float) -> tuple[float, list[Tensor]]:
        config = tiny(f"optim.clip_grad_norm={limit!r}")
        state = TrainingState.create(config, ParallelMesh())
        grad_norm = train_step(state, batch, 0).grad_norm
        return grad_norm, [piece.tensors["exp_avg"] for piece in state.optimizer.pieces()]

    grad_norm, whole = moments(0.0)
    clipped_norm, scaled = moments(share * grad_norm)
    assert clipped_norm == grad_norm  # what is reported is the norm before clipping
    # The factor is a power of two, so that scaling is exact.
    assert all(torch.equal(own, old * factor) for own, old in zip(scaled, whole, strict=True))
    assert all(moment.any() for moment in scaled)
