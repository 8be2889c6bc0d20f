"""DiLoCo on real ranks: neutral settings, a simulation in plain torch, what islands agree on."""

import functools

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from tests.data_parallel.small import STEPS, SmallRun, config_of, make_mesh
from tests.outer.islands import (
    IslandRun,
    PlainIslands,
    Weights,
    all_the_same,
    assert_same,
    assert_same_model,
    on_wire,
    outer_config,
)
from tests.training.tiny import Owned, logical, owned

NEUTRAL = ("outer.lr=1", "outer.momentum=0")
ROUNDS = 15
"""Steps of three rounds."""


def alone(zero_stage: int = 1) -> Weights:
    """Plain training, of all ranks together."""
    small = SmallRun.create(config_of(zero_stage), make_mesh())
    for step in range(ROUNDS):
        small.step(step)
    return Weights.of(small)


@pytest.mark.parametrize(("dp", "zero_stage"), [(1, 1), (2, 0), (2, 1)])
def test_one_island_with_neutral_settings_is_plain_training(dp: int, zero_stage: int) -> None:
    config = outer_config(1, *NEUTRAL, zero_stage=zero_stage)
    met = run_ranks(lambda: IslandRun.create(config).train(ROUNDS).weights(), dp)
    for rank, plain in zip(met, run_ranks(lambda: alone(zero_stage), dp), strict=True):
        assert_same(rank, plain)


@pytest.mark.parametrize("fragments", [1, 3])
def test_islands_with_neutral_settings_and_the_same_data_are_plain_training(fragments: int) -> None:
    """(a + a) / 2 is a, so no bit of masters, moments or codes changes."""
    config = outer_config(2, *NEUTRAL, f"outer.fragments={fragments}")
    plain = alone()
    ranks = run_ranks(lambda: IslandRun.create(config, all_the_same).train(ROUNDS).weights(), 2)
    for rank in ranks:
        assert_same(rank, plain)


@pytest.mark.parametrize(
    ("islands", "dp", "zero_stage", "momentum"), [(2, 2, 1, 0.9), (2, 2, 0, 0.9), (3, 1, 1, 0.0)]
)
def test_simulation_in_plain_torch(islands: int, dp: int, zero_stage: int, momentum: float) -> None:
    """In fp64, where no weight comes near enough to a boundary between codes for rounding to
    decide: AdamW, the mean and the outer step each add in another order than torch does."""
    settings = (f"outer.momentum={momentum}", "precision.compute=float64")
    config = outer_config(islands, *settings, zero_stage=zero_stage)
    simulated = PlainIslands.create(config.outer, torch.float64).train(STEPS, 5)

    def train() -> tuple[Owned, Owned, dict[str, Tensor]]:
        run = IslandRun.create(config).train(STEPS)
        optimizer = run.small.optimizer
        return owned(optimizer), owned(optimizer, "exp_avg"), run.small.codes()

    ranks = run_ranks(train, islands * dp)
    for island, plain in enumerate(simulated.islands):
        own = ranks[island * dp : (island + 1) * dp]
        masters, moments = (logical(rank[kind] for rank in own) for kind in (0, 1))
        for name, weight in plain.weights.items():
            torch.testing.assert_close(masters[name], weight.detach(), rtol=0, atol=1e-12)
            exp_avg = plain.adam.state[weight]["exp_avg"]
            torch.testing.assert_close(moments[name], exp_avg, rtol=0, atol=1e-12)
        codes = plain.codes()
        assert all(torch.equal(own[0][2][name], codes[name]) for name in codes)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_islands_have_one_model_after_a_meeting(wire: str, zero_stage: int) -> None:
    """And models of their own before: masters and codes differ after the fourth step."""
    config = outer_config(2, *on_wire(wire), zero_stage=zero_stage)

    def train() -> tuple[list[bool], Weights, Weights]:
        run = IslandRun.create(config)
        met = [run.step() for _ in range(4)]
        before = run.weights()
        met.append(run.step())
        return met, before, run.weights()

    ranks = run_ranks(train, 4)
    assert all(rank[0] == [False] * 4 + [True] for rank in ranks)
    for first, second in zip(ranks[:2], ranks[2:], strict=True):  # the same place in each island
        assert not any(map(torch.equal, first[1].masters, second[1].masters))
        assert not all(torch.equal(c, second[1].codes[name]) for name, c in first[1].codes.items())
        assert_same_model(first[2], second[2])
    for rank in ranks:  # everyone has the same codes
        assert all(torch.equal(c, ranks[0][2].codes[name]) for name, c in rank[2].codes.items())


def test_a_coded_meeting_is_near_a_plain_one() -> None:
    """After one meeting an int8 mean change is off by half a unit of its block in each shot, the
    second of which is of what the first has left: 1/127 of the largest change at most, and the
    outer step makes lr · (1 + momentum) of it."""

    def meet(wire: str) -> tuple[list[Tensor], list[Tensor]]:
        run = IslandRun.create(outer_config(2, f"outer.wire={wire}"))
        before = [m.weights.detach().clone() for m in run.small.optimizer.masters]
        run.train(4)
        own = [m.weights.detach() for m in run.small.optimizer.masters]
        changes = [(a - b).abs().amax() for a, b in zip(own, before, strict=True)]
        run.step()
        return [m.weights.detach().clone() for m in run.small.optimizer.masters], changes

    plain, coded = (run_ranks(functools.partial(meet, wire), 2) for wire in ("float32", "int8"))
    largest = [max(pair) for pair in zip(*(rank[1] for rank in plain), strict=True)]
    for a, b, change in zip(plain[0][0], coded[0][0], largest, strict=True):
        # The fifth step adds to the change; a quarter more is generous.
        assert (a - b).abs().amax() <= 1.25 * change / 127 * 0.7 * 1.9
    assert not all(map(torch.equal, plain[0][0], coded[0][0]))


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_bytes_are_as_expected(wire: str, zero_stage: int) -> None:
    """In every step, on every rank, with sizes that nothing divides."""
    config = outer_config(
        *(3, *on_wire(wire), "outer.fragments=2"),
        zero_stage=zero_stage,
    )

    def train() -> list[tuple[float, float]]:
        run = IslandRun.create(config)
        counts = []
        for step in range(1, 11):
            before = run.sent()
            run.step()
            counts.append((run.sent() - before, run.outer.expected_bytes(step)))
        return counts

    for counts in run_ranks(train, 6):
        measured, expected = zip(*counts, strict=True)
        # Counted as shares of a ring, which thirds are not exact in.
        assert measured == pytest.approx(expected, rel=1e-12)
        assert sum(count > 0 for count in measured) == 4


def test_bytes_are_a_small_part_of_plain_training() -> None:
    """fp32, two islands: 4 bytes for each weight and round on each rank; int8 with blocks of 128
    rows at most 40 wide: 1.2."""

    def sent(wire: str) -> float:
        run = IslandRun.create(outer_config(2, f"outer.wire={wire}")).train(5)
        weights = sum(piece.tensors["master"].numel() for piece in run.small.optimizer.pieces())
        return run.sent() / weights

    assert run_ranks(lambda: sent("float32"), 2) == pytest.approx([4, 4], rel=0.01)
    assert all(count < 1.5 for count in run_ranks(lambda: sent("int8"), 2))


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_run_ends_with_one_model(fragments: int) -> None:
    """Whatever of the last round is left over comes to its plain mean; what has just met does not
    meet again."""
    config = outer_config(2, f"outer.fragments={fragments}")

    def train(steps: int) -> tuple[Weights, bool, float, Weights]:
        run = IslandRun.create(config).train(steps)
        before, sent = run.weights(), run.sent()
        met = run.outer.conclude(steps)
        return before, met, run.sent() - sent, run.weights()

    for steps in (5, 7):
        ranks = run_ranks(functools.partial(train, steps), 2)
        assert_same_model(ranks[0][3], ranks[1][3])
        islands = (rank[0].masters for rank in ranks)
        for one, a, b in zip(ranks[0][3].masters, *islands, strict=True):
            assert torch.equal(one, (a + b) / 2)
        is_over = fragments == 1 and steps == 5
        assert all(rank[1] is not is_over for rank in ranks)
        assert all((rank[2] == 0) is is_over for rank in ranks)
