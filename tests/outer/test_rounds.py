"""Who waits for whom, on a clock that is set by hand."""

import pytest

from megabit.outer.rounds import Rounds


def rounds_of(islands: int, staleness: int = 0, patience_s: float = 10.0) -> Rounds[str]:
    rounds: Rounds[str] = Rounds(islands, staleness, patience_s, now=0)
    for number in range(islands):
        assert rounds.join(number, 0, is_known=True, now=0)
    return rounds


def close(rounds: Rounds[str], now: float = 0) -> dict[int, str] | None:
    terms = rounds.ready()
    if terms is not None:
        rounds.advance(now)
    return None if terms is None else dict(terms)


def test_a_round_is_closed_when_all_have_delivered_it() -> None:
    rounds = rounds_of(2)
    assert rounds.deliver(1, 0, "b0")
    rounds.ask(1, 1, now=0)
    assert close(rounds) is None
    assert rounds.granted() == []
    assert rounds.deliver(0, 0, "a0")
    assert [*(close(rounds) or {}).items()] == [(0, "a0"), (1, "b0")]  # in order of islands
    assert rounds.granted() == [1]
    assert rounds.granted() == []
    assert rounds.version == 1


def test_staleness_is_how_far_ahead_an_island_may_be() -> None:
    rounds = rounds_of(2, staleness=2)
    for number in range(3):
        assert rounds.deliver(0, number, f"a{number}")
        rounds.ask(0, number - 1, now=0)  # number + 1 − staleness
        assert rounds.granted() == ([0] if number < 2 else [])
    with pytest.raises(ValueError, match="round 3 is not to be delivered yet"):
        rounds.deliver(0, 3, "a3")
    rounds.deliver(1, 0, "b0")
    assert close(rounds) == {0: "a0", 1: "b0"}
    assert close(rounds) is None
    assert rounds.granted() == [0]


def test_patience_begins_when_somebody_waits() -> None:
    rounds = rounds_of(3)
    assert rounds.overdue(1000) == []  # all of them train
    rounds.deliver(0, 0, "a")
    rounds.ask(0, 1, now=1000)
    rounds.deliver(2, 0, "c")  # waits for nobody yet, and nobody for it
    assert rounds.overdue(1010) == []
    assert rounds.overdue(1011) == [1]
    rounds.leave(1, now=1011)
    assert close(rounds, now=1011) == {0: "a", 2: "c"}
    assert rounds.granted() == [0]
    rounds.deliver(0, 1, "a")
    rounds.ask(0, 2, now=1012)
    assert rounds.overdue(1022) == []
    assert rounds.overdue(1023) == [2]


def test_patience_with_who_has_just_come_begins_then() -> None:
    rounds = rounds_of(2)
    rounds.deliver(0, 0, "a")
    rounds.ask(0, 1, now=0)
    rounds.join(1, 0, is_known=True, now=9)
    assert rounds.overdue(19) == []
    assert rounds.overdue(20) == [1]


def test_who_never_comes_is_waited_for_once() -> None:
    rounds: Rounds[str] = Rounds(2, 0, 10, now=0)
    rounds.join(0, 0, is_known=True, now=0)
    rounds.deliver(0, 0, "a")
    rounds.ask(0, 1, now=50)
    assert close(rounds) is None
    assert rounds.overdue(61) == [1]
    rounds.leave(1, now=61)
    assert close(rounds, now=61) == {0: "a"}
    rounds.deliver(0, 1, "a")
    assert close(rounds, now=61) == {0: "a"}


def test_who_was_dropped_is_too_late_and_begins_the_open_round() -> None:
    rounds = rounds_of(2)
    rounds.leave(1, now=0)
    for number in range(3):
        rounds.deliver(0, number, "a")
        assert close(rounds) == {0: "a"}
    assert not rounds.deliver(1, 0, "b")
    assert rounds.islands[1].too_late == 1
    rounds.ask(1, 1, now=0)
    assert rounds.granted() == [1]
    assert rounds.islands[1].state == "dropped"  # whoever grants it lets it join
    assert not rounds.join(1, 0, is_known=False, now=0)
    rounds.deliver(0, 3, "a")
    assert close(rounds) is None  # it is waited for again
    assert rounds.deliver(1, 3, "b")
    assert close(rounds) == {0: "a", 1: "b"}


def test_what_a_dropped_island_had_delivered_counts() -> None:
    rounds = rounds_of(3)
    rounds.deliver(1, 0, "b")
    rounds.leave(1, now=0)
    rounds.deliver(0, 0, "a")
    assert close(rounds) is None
    rounds.deliver(2, 0, "c")
    assert close(rounds) == {0: "a", 1: "b", 2: "c"}


@pytest.mark.parametrize(
    ("round_", "is_known", "keeps"),
    [(4, True, False), (5, True, True), (6, True, True), (7, True, False), (5, False, False)],
)
def test_who_comes_back_keeps_a_round_that_is_not_closed(
    round_: int, is_known: bool, keeps: bool
) -> None:
    rounds: Rounds[str] = Rounds(2, 1, 10, now=0, version=5)
    assert rounds.join(0, round_, is_known, now=0) is keeps


def test_nothing_is_closed_for_nobody() -> None:
    rounds = rounds_of(2)
    rounds.deliver(0, 0, "a")
    rounds.leave(0, now=0)
    rounds.leave(1, now=0, is_finished=True)
    assert close(rounds) is None
    assert not rounds.is_over
    assert rounds.join(0, 0, is_known=True, now=0)
    rounds.deliver(0, 0, "again")
    assert close(rounds) == {0: "again"}
    rounds.leave(0, now=0, is_finished=True)
    assert rounds.is_over


def test_after_a_restart_all_that_had_not_finished_are_expected() -> None:
    """Who was stopped before the owner was, and comes back later than others, is waited for."""
    rounds: Rounds[str] = Rounds(3, 0, 10, now=0, version=7, states=["live", "dropped", "finished"])
    assert [island.state for island in rounds.islands] == ["expected", "expected", "finished"]
    assert rounds.join(0, 7, is_known=True, now=0)
    rounds.deliver(0, 7, "a")
    assert rounds.ready() is None
    assert rounds.join(1, 7, is_known=True, now=5)
    rounds.deliver(1, 7, "b")
    assert close(rounds) == {0: "a", 1: "b"}
