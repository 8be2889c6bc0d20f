"""Gossip on real ranks: pairs, what their meetings keep, and that islands come together."""

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megabit.config import Config
from megabit.launch import run_ranks
from megabit.outer.gossip import Gossip, partners
from tests.data_parallel.small import config_of
from tests.outer.islands import IslandRun, Weights, assert_same, assert_same_model
from tests.training.tiny import logical, owned


def gossip_config(islands: int, *settings: str, zero_stage: int = 1) -> Config:
    return config_of(
        zero_stage,
        *("outer.method=gossip", f"outer.islands={islands}", "outer.inner_steps=5"),
        *settings,
    )


@pytest.mark.parametrize("islands", [1, 2, 3, 4, 7, 8])
def test_pairs(islands: int) -> None:
    """Symmetric, nobody twice, at most one alone; and the same whoever asks."""
    for meeting in range(50):
        partner = partners(islands, 7, meeting)
        assert [partner[partner[island]] for island in range(islands)] == list(range(islands))
        assert sum(partner[island] == island for island in range(islands)) == islands % 2
        assert partner == partners(islands, 7, meeting)


def test_pairs_change() -> None:
    """Of four islands each meets each other in a third of the meetings; seeds differ."""
    met = Counter(partners(4, 7, meeting)[0] for meeting in range(600))
    # Three standard deviations of a binomial share are 35.
    assert all(165 < met[island] < 235 for island in (1, 2, 3))
    by_seed = [[partners(6, seed, meeting) for meeting in range(10)] for seed in (1, 2)]
    assert by_seed[0] != by_seed[1]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_two_islands_take_their_mean(zero_stage: int) -> None:
    """(a + b) / 2, the same bits on both; moments stay, and codes are those of the mean."""
    config = gossip_config(2, zero_stage=zero_stage)

    def train() -> tuple[Weights, Weights]:
        run = IslandRun.create(config).train(4)
        run.inner_step()
        before = run.weights()
        assert run.outer.after_step(5)
        return before, run.weights()

    ranks = run_ranks(train, 4)
    for first, second in zip(ranks[:2], ranks[2:], strict=True):
        assert_same_model(first[1], second[1])
        for mean, a, b in zip(first[1].masters, first[0].masters, second[0].masters, strict=True):
            assert torch.equal(mean, (a + b) / 2)
        for rank in (first, second):
            assert all(map(torch.equal, rank[0].moments, rank[1].moments))
        assert not all(torch.equal(c, first[1].codes[n]) for n, c in first[0].codes.items())


def test_two_islands_are_diloco_without_momentum() -> None:
    """Bit by bit, and with the same bytes."""
    neutral = ("outer.lr=1", "outer.momentum=0", "outer.inner_steps=5")
    diloco = config_of(1, "outer.method=diloco", "outer.islands=2", *neutral)

    def train(config: Config) -> tuple[Weights, float]:
        run = IslandRun.create(config).train(12)
        return run.weights(), run.sent()

    pairs = (run_ranks(partial(train, config), 2) for config in (gossip_config(2), diloco))
    for (gossiped, sent), (averaged, expected) in zip(*pairs, strict=True):
        assert_same(gossiped, averaged)
        assert sent == pytest.approx(expected, rel=0.01)  # messages of DiLoCo are padded


def spread(islands: list[dict[str, Tensor]]) -> float:
    """Root mean square of the islands' distances from their mean."""
    square = 0.0
    for name in islands[0]:
        weights = torch.stack([island[name].double() for island in islands])
        square += (weights - weights.mean(0)).square().sum().item() / len(islands)
    return square**0.5


@pytest.mark.parametrize("islands", [4, 5])
def test_islands_that_stand_still_come_together(islands: int) -> None:
    """The mean of all stays where it is, and the distance falls, by about half of its square a
    meeting. What a meeting reports is an estimate of it."""
    meetings = 8

    def meet() -> list[tuple[dict[str, Tensor], float]]:
        run = IslandRun.create(gossip_config(islands)).train(4)
        assert isinstance(run.outer, Gossip)
        seen = [(logical([owned(run.small.optimizer)]), 0.0)]
        for meeting in range(1, meetings + 1):
            assert run.outer.after_step(5 * meeting)
            seen.append((logical([owned(run.small.optimizer)]), run.outer.distance))
        return seen

    ranks = run_ranks(meet, islands)
    at = [[rank[meeting][0] for rank in ranks] for meeting in range(meetings + 1)]
    spreads = [spread(weights) for weights in at]
    assert all(after <= before for before, after in pairwise(spreads))
    assert spreads[-1] < spreads[0] * 0.5 ** (meetings / 4)
    for name in at[0][0]:
        before, after = (torch.stack([w[name].double() for w in at[i]]).mean(0) for i in (0, -1))
        # A sum of two rounds once in each meeting, and halves are exact.
        torch.testing.assert_close(before, after, rtol=0, atol=meetings * 1e-7)
    reports = [rank[meeting][1] for rank in ranks for meeting in range(1, meetings + 1)]
    assert reports[:meetings] * islands == reports  # the same on every rank
    for meeting, (before, report) in enumerate(zip(spreads, reports[:meetings], strict=False)):
        pairs = {frozenset((i, p)) for i, p in enumerate(partners(islands, 1234, meeting + 1))}
        squares = [
            sum(
                (at[meeting][a][n] - at[meeting][b][n]).double().square().sum().item()
                for n in at[0][0]
            )
            for a, b in (pair for pair in pairs if len(pair) == 2)
        ]
        assert report == pytest.approx((sum(squares) / len(squares) / 2) ** 0.5, rel=1e-5)
        assert report <= 3 * before


def test_a_run_ends_with_one_model() -> None:
    def train() -> tuple[bool, Weights]:
        run = IslandRun.create(gossip_config(3)).train(7)
        return run.outer.conclude(7), run.weights()

    ranks = run_ranks(train, 3)
    for met, weights in ranks:
        assert met
        assert_same_model(weights, ranks[0][1])


@pytest.mark.parametrize(("islands", "zero_stage"), [(2, 0), (3, 1)])
def test_bytes_are_as_expected(islands: int, zero_stage: int) -> None:
    """fp32 of what a rank updates, to one other island, and a number; the odd one sends only that,
    whose share over three islands is not a whole number of bytes."""

    def train() -> list[tuple[float, float]]:
        run = IslandRun.create(gossip_config(islands, zero_stage=zero_stage))
        counts = []
        for step in range(1, 16):
            before = run.sent()
            run.step()
            counts.append((run.sent() - before, run.outer.expected_bytes(step)))
        return counts

    ranks = run_ranks(train, 2 * islands)
    for counts in ranks:
        assert all(measured == pytest.approx(expected) for measured, expected in counts)
    sending = [sum(rank[step][0] > 20 for rank in ranks) for step in (4, 9, 14)]
    assert sending == [4] * 3  # two islands of two ranks


def test_resume_needs_masters_and_moments_only() -> None:
    """Who meets whom follows from the seed and the step."""

    def train() -> tuple[Weights, Weights]:
        whole = IslandRun.create(gossip_config(3)).train(7)
        resumed = IslandRun.create(gossip_config(3))
        assert [*resumed.outer.pieces()] == []
        own, saved = resumed.small.optimizer, whole.small.optimizer
        own.begin_restore(saved.updates)
        for to, source in zip(own.pieces(), saved.pieces(), strict=True):
            for kind, values in to.tensors.items():
                values.copy_(source.tensors[kind])
        own.publish()
        resumed.steps = 7
        return whole.train(8).weights(), resumed.train(8).weights()

    for whole, resumed in run_ranks(train, 3):
        assert_same(whole, resumed)
