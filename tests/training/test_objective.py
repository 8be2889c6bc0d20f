"""What is minimised, if not the plain cross-entropy: loss, objective and gradient by torch's own
functions over all samples at once."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.config import Config
from megabit.data.batches import Batch
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.training.embedding import EmbeddingObjective
from megabit.training.objective import LanguageModelObjective, build_objective
from megabit.training.step import TrainingState, forward_backward, train_step
from tests.training.tiny import Owned, global_batch, logical, make_mesh, own_batch, owned, tiny

FP64, TP2, PP2 = "precision.compute=float64", "parallel.tp=2", "parallel.pp=2"
LAYOUTS = [
    pytest.param((), 1, id="one"),
    pytest.param((), 2, id="dp2"),
    pytest.param((TP2, PP2), 4, id="tp2-pp2"),
]
OPTIONS = [
    pytest.param((), id="plain"),
    pytest.param(("loss.z_loss=0.01", "loss.label_smoothing=0.1"), id="z-smoothing"),
    pytest.param(("loss.select=hard", "loss.select_ratio=0.3"), id="hard"),
    pytest.param(("loss.select=hard", "loss.z_loss=0.01"), id="hard-z"),
]


def plain(config: Config) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, objective and gradients of all samples of step 0."""
    options = config.loss
    stage = build_stages(config, ParallelMesh())
    batch = global_batch(config, 0)
    logits = stage.logits(stage(batch.inputs[0]))
    targets, masks = batch.targets.flatten(), batch.mask[0]
    losses = F.cross_entropy(logits, targets, reduction="none")
    terms = F.cross_entropy(
        logits, targets, reduction="none", label_smoothing=options.label_smoothing
    )
    terms = terms + options.z_loss * logits.logsumexp(-1) ** 2
    counted = masks.clone()
    if options.select == "hard":
        for row, mask in enumerate(masks):
            own = losses.view_as(masks)[row].tolist()
            targets_of_row = [i for i in range(len(own)) if mask[i]]
            best = sorted(targets_of_row, key=lambda i: -own[i])
            for i in best[math.ceil(options.select_ratio * len(best) - 1e-9) :]:
                counted[row, i] = False
    objective = terms[counted.flatten()].mean()
    names, parameters = zip(*stage.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(objective, parameters), strict=True))
    return losses[masks.flatten()].mean().item(), objective.item(), gradients


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_objective_and_gradient(
    options: tuple[str, ...], layout: tuple[str, ...], world_size: int
) -> None:
    config = tiny(FP64, *options, *layout)

    def run() -> tuple[float, float, Owned]:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        result = forward_backward(state, own_batch(config, mesh, 0), 0)
        assert result.objective.num_tokens == global_batch(config, 0).mask.sum()
        return *result.sums(mesh), owned(state.optimizer, "gradient")

    expected_loss, expected_objective, expected = plain(tiny(FP64, *options))
    assert (expected_loss == pytest.approx(expected_objective, rel=1e-12)) == (options == ())
    ranks = run_ranks(run, world_size)
    for loss, objective, _ in ranks:
        # fp64 sums in another order.
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert objective == pytest.approx(expected_objective, rel=1e-12)
    gradients = logical(part for *_, part in ranks)
    for name, gradient in expected.items():
        difference = (gradients[name] - gradient).abs().max()
        assert difference <= 1e-11 * gradient.abs().max(), name


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_same_bits_at_every_layout(compute: str) -> None:
    """Selection, too: whoever ranks tokens by their loss sees the same losses."""
    options = (f"precision.compute={compute}", "loss.select=hard", "loss.label_smoothing=0.1")

    def run(config: Config) -> tuple[float, float]:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        loss, objective = forward_backward(state, own_batch(config, mesh, 0), 0).sums(mesh)
        return loss, objective

    (expected,) = run_ranks(lambda: run(tiny(*options)), 1)
    for settings, world_size in (((TP2, "parallel.sequence_parallel=true"), 2), ((PP2,), 4)):
        ranks = run_ranks(lambda s=settings: run(tiny(*options, *s)), world_size)
        assert ranks == [expected] * world_size, settings


def test_the_full_loss_is_reported_beside_the_objective() -> None:
    config = tiny("loss.select=hard", "loss.select_ratio=0.25")
    mesh = ParallelMesh()
    report = train_step(TrainingState.create(config, mesh), own_batch(config, mesh, 0), 0)
    plain_report = train_step(TrainingState.create(tiny(), mesh), own_batch(config, mesh, 0), 0)
    assert report.loss == plain_report.loss == plain_report.objective
    assert report.objective > report.loss
    assert report.num_tokens == plain_report.num_tokens


def test_which_objective() -> None:
    mesh = ParallelMesh()
    for name, kind in (
        ("language_model", LanguageModelObjective),
        ("embedding", EmbeddingObjective),
    ):
        config = tiny(f"loss.objective={name}")
        batch = own_batch(config, mesh, 0)
        built = build_objective(config, mesh, build_stages(config, mesh), batch)
        assert isinstance(built, kind)


def test_triplets_are_counted_before_the_step() -> None:
    """3 microbatches of 4 samples on each of two DP ranks: 12 triplets each, of which 0.3 are 4."""
    config = tiny(
        *("loss.objective=embedding", "loss.mining_ratio=0.3"),
        *("train.micro_batch_size=4", "train.global_batch_size=24"),
    )

    def run() -> tuple[int, int, int]:
        mesh = make_mesh(config)
        batch = own_batch(config, mesh, 0)
        objective = EmbeddingObjective.of(config, mesh, build_stages(config, mesh), batch)
        assert [x.shape for x in objective.inputs] == [(8, 8)] * 3
        first = batch.inputs[0, 0]
        assert torch.equal(objective.inputs[0][:2].flatten(), first)  # halves of one sample
        return objective.num_terms, objective.num_targets, objective.num_tokens

    assert run_ranks(run, 2) == [(6 * 4, 6 * 12, 24 * 16)] * 2


def test_masks_are_not_for_embeddings() -> None:
    config = tiny("loss.objective=embedding")
    mesh = ParallelMesh()
    batch = own_batch(config, mesh, 0)
    masked = Batch(batch.inputs, batch.targets, torch.zeros_like(batch.mask))
    state = TrainingState.create(config, mesh)
    sums = [forward_backward(state, x, 0).sums(mesh) for x in (batch, masked)]
    assert sums[0] == sums[1]
