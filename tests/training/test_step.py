"""One optimizer step: what the loss means, when it is refused, and when codes change."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.config import Config
from megabit.data.batches import Batch
from megabit.errors import RunError
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.tensor_parallel import ternary_layers
from megabit.training.step import StepReport, TrainingState, forward_backward, train_step
from megabit_kernels import TernaryWeight
from tests.training.tiny import (
    Owned,
    bits,
    global_batch,
    logical,
    make_mesh,
    own_batch,
    owned,
    tiny,
)

TP2, PP2, SP = "parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"


def plain_loss_and_gradients(config: Config) -> tuple[float, dict[str, Tensor]]:
    """All samples in one forward pass, torch's own loss, its mean over the tokens that count."""
    stage = build_stages(config, ParallelMesh())
    batch = global_batch(config, 0)
    logits = stage.logits(stage(batch.inputs[0]))
    keep = batch.mask.flatten()
    loss = F.cross_entropy(logits[keep], batch.targets.flatten()[keep])
    names, parameters = zip(*stage.named_parameters(), strict=True)
    return loss.item(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize(
    ("settings", "world_size"),
    [((), 1), ((), 2), ((TP2,), 2), ((PP2,), 2), ((PP2,), 4), ((TP2, SP), 4)],
    ids=["one", "dp2", "tp2", "pp2", "pp2-dp2", "tp2-sp-dp2"],
)
def test_uneven_masks_give_the_mean_over_all_tokens(
    settings: tuple[str, ...], world_size: int, tied: str
) -> None:
    config = tiny("precision.compute=float64", f"model.tie_word_embeddings={tied}", *settings)

    def run() -> tuple[float, int, Owned]:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        result = forward_backward(state, own_batch(config, mesh, 0), 0)
        loss, _ = result.sums(mesh)
        return loss, result.objective.num_targets, owned(state.optimizer, "gradient")

    expected_loss, expected = plain_loss_and_gradients(
        tiny("precision.compute=float64", f"model.tie_word_embeddings={tied}")
    )
    ranks = run_ranks(run, world_size)
    for loss, num_tokens, _ in ranks:
        assert num_tokens == global_batch(config, 0).mask.sum()
        # fp64 sums of 2^7 tokens in another order: a few units of 2^-53, and as much per layer.
        assert loss == pytest.approx(expected_loss, rel=1e-12)
    gradients = logical(part for _, _, part in ranks)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (gradients[name] - gradient).abs().max()
        assert difference <= 1e-12 * gradient.abs().max(), name


@torch.no_grad()
def poison_replica(state: TrainingState) -> None:
    """Makes activations of the calling rank not a number."""
    next(p for name, p in state.stages.named_parameters() if "norm" in name)[0] = torch.nan


@pytest.mark.parametrize(
    ("settings", "world_size", "poisoned"),
    [((), 1, 0), ((), 2, 1), ((TP2,), 2, 1), ((PP2,), 2, 0), ((PP2,), 2, 1), ((TP2, PP2), 4, 2)],
    ids=["one", "dp2", "tp2", "pp2-first", "pp2-last", "tp2-pp2"],
)
def test_activations_that_are_not_finite_change_nothing(
    settings: tuple[str, ...], world_size: int, poisoned: int
) -> None:
    config = tiny(*settings)

    def run() -> StepReport:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        train_step(state, own_batch(config, mesh, 0), 0)
        before = bits(state)  # when the last step's weights have all arrived
        state.optimizer.publisher.settle()
        if mesh.world.rank == poisoned:
            poison_replica(state)
        report = train_step(state, own_batch(config, mesh, 1), 1)
        assert all(map(torch.equal, bits(state), before))
        return report

    reports = run_ranks(run, world_size)
    assert all(report.is_skipped and math.isinf(report.grad_norm) for report in reports)
    assert all(math.isnan(report.loss) for report in reports)


@pytest.mark.parametrize(("settings", "world_size"), [((), 1), ((PP2,), 4)])
def test_a_step_without_targets_is_refused(settings: tuple[str, ...], world_size: int) -> None:
    config = tiny(*settings)

    def run() -> None:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        batch = own_batch(config, mesh, 0)
        before = bits(state)
        with pytest.raises(RunError, match="no target token"):
            train_step(state, Batch(batch.inputs, batch.targets, torch.zeros_like(batch.mask)), 0)
        assert all(map(torch.equal, bits(state), before))

    run_ranks(run, world_size)


def test_a_rank_without_targets_takes_part() -> None:
    """The masks of one DP rank may cover all that it has: the sum is over the whole batch."""
    config = tiny("precision.compute=float64")

    def run(masked: int) -> float:
        mesh = make_mesh(config)
        batch = own_batch(config, mesh, 0)
        if mesh.dp.rank == masked:
            batch.mask.zero_()
        state = TrainingState.create(config, mesh)
        return train_step(state, batch, 0).loss

    losses = run_ranks(lambda: run(masked=0), 2)
    batch = global_batch(config, 0)
    stage = build_stages(config, ParallelMesh())
    keep = batch.mask.clone()
    keep[:, : config.train.global_batch_size // 2] = False
    logits = stage.logits(stage(batch.inputs[0]))[keep.flatten()]
    expected = F.cross_entropy(logits, batch.targets[keep]).item()
    assert losses == pytest.approx([expected] * 2, rel=1e-12)  # fp64, another order


def test_codes_change_once_a_step() -> None:
    """Microbatches and evaluations use the very objects that the last step has made."""
    config = tiny("optim.lr=[0.02,0.02]", "optim.warmup_steps=0")
    mesh = ParallelMesh()
    state = TrainingState.create(config, mesh)
    layers = list(ternary_layers(state.stages))
    seen: list[list[TernaryWeight]] = []

    def look(*_: Any) -> None:
        seen.append([layer.ternary() for layer in layers])

    def differing(compare: Callable[[TernaryWeight, TernaryWeight], bool]) -> int:
        pairs = zip(seen[0], seen[-1], strict=True)
        return sum(not compare(first, last) for first, last in pairs)

    state.stages.register_forward_hook(look)
    num_microbatches = config.train.global_batch_size // config.train.micro_batch_size
    train_step(state, own_batch(config, mesh, 0), 0)
    assert len(seen) == num_microbatches
    assert all(w is first for look in seen for w, first in zip(look, seen[0], strict=True))

    look()
    assert differing(lambda first, last: first is last) == len(layers)
    assert differing(lambda first, last: torch.equal(first.codes(), last.codes())) > 0

    seen.clear()
    look()
    with torch.no_grad():
        state.stages(own_batch(config, mesh, 1).inputs[0])
    forward_backward(state, own_batch(config, mesh, 1), 1)
    assert differing(lambda first, last: first is last) == 0
