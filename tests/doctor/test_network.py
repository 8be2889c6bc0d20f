"""Pairs and collectives between real ranks; and the words for given measurements."""

import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from torch import Tensor

from megabit.doctor import clocks, collectives, links, pairs
from megabit.doctor.clocks import Clock
from megabit.doctor.collectives import Timing, expected_s
from megabit.doctor.links import Links
from megabit.doctor.pairs import Effort, Pair, rounds_of
from megabit.doctor.ranks import Ranks
from megabit.errors import RunError
from megabit.launch import RankError
from tests.doctor.clusters import cluster_of, on_ranks

GBIT = 1e9 / 8
QUICK = Effort(seconds=0.05, largest=2**20)


# The tournament.


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13])
def test_everybody_meets_everybody_once_and_nobody_is_in_two_places(count: int) -> None:
    rounds = rounds_of(count)
    assert len(rounds) == count - 1 + count % 2
    for meetings in rounds:
        players = [player for pair in meetings for player in pair]
        assert len(players) == len(set(players))
    met = [frozenset(pair) for meetings in rounds for pair in meetings]
    assert len(met) == len(set(met)) == count * (count - 1) // 2


def test_all_pairs_of_real_ranks_are_measured() -> None:
    everywhere = on_ranks(lambda ranks: pairs.measure(ranks, [[0, 1, 2]], QUICK), 3)
    for found in everywhere:
        assert found == everywhere[0]
        assert {frozenset((pair.first, pair.second)) for pair in found} == {
            frozenset(pair) for pair in combinations(range(3), 2)
        }
        assert all(min(pair.latency_s, pair.rate_there, pair.rate_back) > 0 for pair in found)


def test_clubs_play_by_themselves_and_again() -> None:
    def play(ranks: Ranks) -> tuple[list[Pair], list[Pair]]:
        found = pairs.measure(ranks, [[0, 1], [2], [3]], QUICK)
        return found, pairs.measure_again(ranks, found, QUICK)

    for found, again in on_ranks(play, 4, hosts=2):
        ((pair,), (better,)) = found, again
        assert (pair.first, pair.second) == (better.first, better.second) == (0, 1)
        assert better.rate_there >= pair.rate_there
        assert better.latency_s <= pair.latency_s


def test_who_is_gone_is_named(tmp_path: Path) -> None:
    def play(ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise ValueError("gone")
        try:
            pairs.measure(ranks, [[0, 1]], QUICK)
        except RunError as error:
            (tmp_path / "said").write_text(str(error))
            raise

    with pytest.raises(RankError, match="gone"):
        on_ranks(play, 2)
    if (tmp_path / "said").exists():  # else it was ended before it could say so
        assert "rank 0 waits in vain for rank 1" in (tmp_path / "said").read_text()


def test_clocks_of_hosts_of_one_machine_agree() -> None:
    for found in on_ranks(clocks.measure, 4, hosts=2):
        (clock,) = found
        assert clock.rank == 2
        # It is the same clock; 1 µs for its own steps.
        assert abs(clock.offset_s) <= clock.uncertainty_s + 1e-6
        assert not list(clocks.judge([clock], cluster_of(2, 2)))
    assert list(clocks.figures([Clock(1, 0.5, 0.1)], cluster_of(1, 1))) == [
        ("clocks", "at most 500 ms ± 100 ms apart (b)")
    ]


# Links.


def network(count: int, *slow: tuple[int, int, float, float], between: str = "hosts") -> Links:
    """All pairs of ``count`` ranks at 9.4 Gbit/s and 0.1 ms, but (first, second, there, back)."""
    rates = {(a, b): (there, back) for a, b, there, back in slow}
    return Links(
        between,
        [
            Pair(a, b, 1e-4, *(GBIT * rate for rate in rates.get((a, b), (9.4, 9.4))))
            for a, b in combinations(range(count), 2)
        ],
    )


def words(of: Links, *ranks_on_hosts: int) -> list[str]:
    return [
        f"{finding.severity}: {finding.what}"
        for finding in links.judge(of, cluster_of(*ranks_on_hosts))
    ]


def test_equal_links_are_fine() -> None:
    assert not words(network(4), 1, 1, 1, 1)
    assert not words(network(2), 1, 1)


def test_a_slow_link_is_named() -> None:
    assert words(network(4, (1, 3, 0.094, 0.094)), 1, 1, 1, 1) == [
        "wrong: b ↔ d: 94 Mbit/s, typical is 9.4 Gbit/s"
    ]


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_slow_link_among_few(count: int) -> None:
    found = words(network(count, (0, 1, 0.094, 0.094)), *[1] * count)
    assert found == ["wrong: a ↔ b: 94 Mbit/s, typical is 9.4 Gbit/s"]


def test_a_slow_direction_is_named() -> None:
    assert words(network(3, (1, 2, 9.4, 0.094)), 1, 1, 1) == [
        "wrong: c → b: 94 Mbit/s, the other way 9.4 Gbit/s, typical is 9.4 Gbit/s"
    ]
    assert words(network(2, (0, 1, 0.094, 9.4)), 1, 1) == [
        "wrong: a → b: 94 Mbit/s, the other way 9.4 Gbit/s, typical is 9.4 Gbit/s"
    ]


def test_a_host_that_is_slow_with_everyone_is_named_once() -> None:
    slow = [(0, 2, 0.09, 0.09), (1, 2, 0.1, 0.1)]
    assert words(network(3, *slow), 1, 1, 1) == [
        "wrong: c is slow with all others: 95 Mbit/s, typical is 9.4 Gbit/s"
    ]


def test_many_slow_links_are_counted() -> None:
    slow = [(a, b, 1.0, 1.0) for a in range(5) for b in range(5, 8)]
    found = words(network(12, *slow), *[1] * 12)
    assert len(found) == links.MAX_NAMED + 1
    assert found[-1] == "wrong: 5 more links are slow"


def test_ranks_of_a_host_are_only_warned_of() -> None:
    found = words(network(3, (0, 1, 0.1, 0.1), between="ranks"), 3)
    assert found == ["warning: rank 0 ↔ rank 1: 100 Mbit/s, typical is 9.4 Gbit/s"]


def test_a_long_way_is_named() -> None:
    of = network(3)
    late = replace(of, pairs=[of.pairs[0], replace(of.pairs[1], latency_s=0.04), of.pairs[2]])
    assert words(late, 1, 1, 1) == ["warning: a ↔ c: a few bytes take 40 ms, typical is 100 µs"]


def test_a_link_that_was_slow_for_a_moment_is_not_named() -> None:
    of = network(3, (0, 1, 0.1, 0.1))
    assert not words(of.corrected([Pair(0, 1, 1e-4, 9.4 * GBIT, 9.4 * GBIT)]), 1, 1, 1)


# Collectives.


def test_collectives_of_real_ranks_are_right() -> None:
    of = Links("ranks", [Pair(0, 1, 1e-4, GBIT, GBIT)])
    everywhere = on_ranks(lambda ranks: collectives.measure(ranks, of, 2**16), 3)
    assert [(timing.kind, timing.num_bytes) for timing in everywhere[0]] == [
        ("all-reduce", 8),
        ("all-reduce", 2**16),
        ("all-gather", 2**16),
        ("all-to-all", 2**16),
    ]
    for timings in everywhere:
        assert timings == everywhere[0]  # the time of the slowest rank is the same for all
        assert not any(timing.wrong_on for timing in timings)
        assert all(timing.seconds > 0 for timing in timings)


def test_a_rank_with_wrong_sums_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = collectives.all_reduce

    def run(ranks: Ranks) -> list[Timing]:
        if ranks.rank == 1:  # a bit of what it receives flips
            monkeypatch.setattr(
                collectives,
                "all_reduce",
                lambda x, *rest: reduce(x, *rest) if x.dim() == 0 else reduce(x, *rest).add_(1),
            )
        return collectives.measure(ranks, None, 8)

    for timings in on_ranks(run, 3):
        found = [f"{f.severity}: {f.what}" for f in collectives.judge(timings, cluster_of(3))]
        assert found == ["wrong: rank 1: wrong result of an all-reduce of 8 B"]


def test_the_expected_time() -> None:
    # 4 ranks: 6 steps of 1 ms, and 1.5 times 10 MB at 1 GB/s.
    assert expected_s("all-reduce", 4, 1e7, 1e-3, 1e9) == pytest.approx(0.006 + 0.015)
    assert expected_s("all-gather", 4, 1e7, 1e-3, 1e9) == pytest.approx(0.003 + 0.0075)
    assert expected_s("all-to-all", 1, 1e7, 1e-3, 1e9) == 0


def test_slow_collectives() -> None:
    fine = Timing("all-reduce", 2**24, 0.05, 0.02, 1e9, [])
    slow = replace(fine, seconds=0.2)
    small = Timing("all-reduce", 8, 0.004, 0.0001, 1e9, [])
    assert not list(collectives.judge([fine, small], cluster_of(1, 1)))
    (finding,) = collectives.judge([fine, slow, small], cluster_of(1, 1))
    assert finding.severity == "warning"
    assert finding.what == (
        "all-reduce of 17 MB takes 200 ms, 10.0 times as long as the links let expect (20 ms)"
    )


def test_collectives_that_are_far_faster_than_expected_cannot_be_judged() -> None:
    fast = Timing("all-reduce", 8, 0.24e-3, 4.5e-3, 1e9, [])
    fine = replace(fast, seconds=2e-3)
    unknown = replace(fast, expected_s=None)
    (finding,) = collectives.judge([fine, fast, unknown], cluster_of(1, 1))
    assert finding.severity == "note"
    assert finding.what == (
        "all-reduce of 8 B takes 240 µs, far below the 4.5 ms that the links let expect: whether "
        "it is slow cannot be told"
    )
    assert [row[4] for row in collectives.rows([fine, fast, unknown])] == ["0.4", "0.1?", ""]
    (finding,) = collectives.judge([fast, replace(fast, num_bytes=16)], cluster_of(1, 1))
    assert finding.what.endswith(", nor of 1 more")


def test_a_ping_that_had_to_wait_is_not_the_latency() -> None:
    """Of a rank that is often away for 20 ms, as on a machine that does other things."""

    def play(ranks: Ranks) -> list[Pair]:
        receive, calls = Ranks.receive, iter(range(10**9))

        def late(self: Ranks, x: Tensor, peer: int) -> Tensor:
            received = receive(self, x, peer)
            if ranks.rank == 1 and next(calls) % 4:
                time.sleep(0.02)
            return received

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "receive", late)
            return pairs.measure(ranks, [[0, 1]], Effort(seconds=2.0, largest=2**18))

    for (pair,) in on_ranks(play, 2):
        assert pair.latency_s < 5e-3  # the median would be 10 ms
