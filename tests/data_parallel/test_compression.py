"""Compressed gradients between real ranks: neutral settings are plain data parallelism, what is
lost arrives later, bytes are those of the formula, and what is not finite is seen by all."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from megabit.training.step import TrainingState, train_step
from tests.data_parallel.small import STEPS, SmallRun, config_of, make_mesh
from tests.training.tiny import Owned, bits, logical, own_batch, owned, poisoned, tiny
from tests.training.tiny import make_mesh as tiny_mesh

PLAIN = ("precision.gradients=float32",)
INT8, INT4 = ("precision.gradients=int8",), ("precision.gradients=int4",)
TOPK, TERNARY = ("precision.gradients=topk",), ("precision.gradients=ternary",)
SINGLE = "communication.block=1"
NEUTRAL = {
    "int8": (*INT8, SINGLE),
    "int4": (*INT4, SINGLE),
    "topk": (*TOPK, "communication.topk_ratio=1"),
    "ternary": (*TERNARY, "communication.min_numel=1000000000"),
}
LOSSY = {"int8": INT8, "int4": INT4, "topk": (*TOPK, "communication.topk_ratio=0.1")}
"""With error feedback."""
ROUNDS = 60


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_neutral_settings_are_plain_data_parallelism(zero_stage: int) -> None:
    """Every master weight after training, bit for bit."""

    def run() -> dict[str, Owned]:
        mesh, trained = make_mesh(), {}
        for name, settings in {"plain": PLAIN, **NEUTRAL, "int8 that loses": INT8}.items():
            small = SmallRun.create(config_of(zero_stage, *settings), mesh)
            for step in range(STEPS):
                small.step(step)
            trained[name] = owned(small.optimizer)
        return trained

    ranks = run_ranks(run, 2)
    weights = {name: logical(rank[name] for rank in ranks) for name in ranks[0]}
    plain = weights.pop("plain")
    differing = weights.pop("int8 that loses")
    assert any(not torch.equal(differing[name], plain[name]) for name in plain)
    for setting, found in weights.items():
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain), setting


class Sums(NamedTuple):
    """Of one rank, after ``ROUNDS`` backward passes over the same tokens."""

    arrived: list[Tensor]
    """``[part]`` of each bucket, fp64: what this rank has added up."""
    lost: dict[int, Tensor]
    """``[ranks, part]`` by number of bucket: what it has not sent yet, by who is to get it."""


def repeat(settings: tuple[str, ...]) -> Sums:
    small = SmallRun.create(config_of(1, *settings), make_mesh())
    gradients = small.optimizer.gradients
    arrived = [torch.zeros(bucket.layout.part).double() for bucket in gradients.buckets]
    for _ in range(ROUNDS):
        small.backward(step=3)
        for so_far, bucket in zip(arrived, gradients.buckets, strict=True):
            assert bucket.total is not None
            so_far += bucket.total[0]
    return Sums(arrived, {n: lost.values for n, lost in gradients.reduction.lost.items()})


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_lost_arrives_later(name: str) -> None:
    """Of a gradient that stays the same, all that has arrived is T times the exact sum without what
    ranks still hold back: so the mean is unbiased in the long run (see test_error_feedback)."""
    ranks = run_ranks(lambda: repeat(LOSSY[name]), 2)
    exact = run_ranks(lambda: repeat(NEUTRAL["int8"]), 2)  # in the same buckets
    assert len(ranks[0].lost) >= 4
    for rank, (own, whole) in enumerate(zip(ranks, exact, strict=True)):
        for number, (arrived, expected) in enumerate(zip(own.arrived, whole.arrived, strict=True)):
            if number not in own.lost:  # gains
                assert torch.equal(arrived, expected)
                continue
            held_back = torch.stack([other.lost[number][rank].double() for other in ranks]).sum(0)
            difference = (arrived - (expected - held_back)).abs().max()
            # Each round adds in fp32: the gradient and the error, and what two ranks have sent.
            largest = expected.abs().max() / ROUNDS + held_back.abs().max()
            assert difference <= ROUNDS * largest * 2**-22
            assert (arrived - expected).abs().max() > 100 * difference


def test_what_is_sent_has_the_bytes_of_the_formula() -> None:
    def run() -> list[tuple[float, float]]:
        mesh, sizes = make_mesh(), []
        for settings in (*LOSSY.values(), TERNARY):
            small = SmallRun.create(config_of(1, *settings), mesh)
            codec = small.optimizer.gradients.reduction.codec
            assert codec is not None
            expected = 0.0
            for bucket in small.optimizer.gradients.buckets:
                layout = bucket.layout
                if bucket.is_coded:
                    part = sum(codec.tensor_bytes(s.rows_per_rank, s.columns) for s in layout.slots)
                    expected += part * (mesh.dp.size - 1)
                    if codec.needs_maximum:  # an all-reduce of one number for each tensor
                        expected += 4 * len(layout.slots) * 2 * (mesh.dp.size - 1) / mesh.dp.size
                else:
                    expected += 4 * layout.part * (mesh.dp.size - 1)
            before = mesh.sent().get(("dp", "weight gradients"), 0.0)
            small.backward(0)
            sizes.append((mesh.sent()["dp", "weight gradients"] - before, expected))
        return sizes

    for ranks in run_ranks(run, 2):
        for sent, expected in ranks:
            assert sent == expected > 0


def skip_and_go_on(settings: tuple[str, ...]) -> list[float]:
    """Gradient norms of a step that rank 1 spoils, and of two after it."""
    config = tiny(*settings)
    mesh = tiny_mesh(config)
    state = TrainingState.create(config, mesh)
    train_step(state, own_batch(config, mesh, 0), 0)
    before = bits(state)
    names = [s.name for b in state.optimizer.gradients.buckets for s in b.layout.slots]
    victim = next(name for name in names if "up_proj" in name)
    with poisoned(state, victim, math.nan if mesh.world.rank == 1 else 0.0):
        report = train_step(state, own_batch(config, mesh, 1), 1)
    assert report.is_skipped
    assert all(torch.equal(old, new) for old, new in zip(before, bits(state), strict=True))
    later = [train_step(state, own_batch(config, mesh, step), step) for step in (2, 3)]
    assert not any(step.is_skipped for step in later)
    return [step.grad_norm for step in later]


def test_a_gradient_that_is_not_finite_is_skipped_by_all_and_forgotten() -> None:
    def run() -> list[list[float]]:
        return [skip_and_go_on(settings) for settings in (*LOSSY.values(), TERNARY)]

    first, second = run_ranks(run, 2)
    assert first == second
    assert all(math.isfinite(norm) for norms in first for norm in norms)
