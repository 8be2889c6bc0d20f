"""When the rules of the stability guard fire, and how often they act."""

import math

import pytest

from megabit.config import GuardRule
from megabit.training.guard import Guard


def judged(guard: Guard, *steps: tuple[float, float], first: int = 0) -> list[list[str]]:
    """The actions at steps with such (loss, gradient norm)."""
    return [
        [verdict.action for verdict in guard.judge(first + i, loss, norm)]
        for i, (loss, norm) in enumerate(steps)
    ]


CALM = [(3.0 + 0.01 * (i % 5), 1.0 + 0.1 * (i % 3)) for i in range(8)]


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (math.inf, 1.0), (3.0, math.inf)])
def test_what_is_not_finite(bad: tuple[float, float]) -> None:
    guard = Guard([GuardRule(watch="nonfinite", action="skip", times=2, calm_steps=1)])
    assert judged(guard, (3.0, 1.0), bad, (3.0, 1.0)) == [[], ["skip"], []]
    assert guard.history.losses == [3.0, 3.0]


def test_too_many_in_a_row_end_the_run_and_a_calm_step_forgives() -> None:
    bad, good = (math.nan, math.inf), (3.0, 1.0)
    guard = Guard([GuardRule(watch="nonfinite", action="skip", times=2, calm_steps=1)])
    assert judged(guard, bad, bad, good, bad, bad, bad) == [
        ["skip"],
        ["skip"],
        [],
        ["skip"],
        ["skip"],
        ["stop"],
    ]


def test_without_calm_steps_nothing_is_forgotten() -> None:
    guard = Guard([GuardRule(watch="grad_norm", above=10, action="skip", times=1, then="alert")])
    steps = [(3.0, 11.0), *CALM * 20, (3.0, 11.0), (3.0, 12.0)]
    actions = judged(guard, *steps)
    assert actions[0] == ["skip"]
    assert actions[-2:] == [["alert"], ["alert"]]
    assert not any(actions[1:-2])


def test_rules_are_known_by_what_they_are_and_not_by_their_place() -> None:
    bad, rule = (math.nan, 1.0), GuardRule(watch="nonfinite", action="skip", times=1)
    guard = Guard([rule])
    assert judged(guard, bad) == [["skip"]]
    guard.rules = [GuardRule(watch="grad_norm", above=9, action="alert"), rule]
    assert judged(guard, bad, first=1) == [["stop"]]


def test_a_spike_is_judged_by_the_median_distance_of_the_window() -> None:
    guard = Guard([GuardRule(watch="loss_spike", above=6, window=8, action="rollback")])
    assert not any(judged(guard, *CALM))
    # Median 3.01, median distance 0.01: a score of 6 is 3.01 + 6 · 0.014826.
    assert judged(guard, (3.098, 1.0), first=8) == [[]]
    (verdict,) = guard.judge(9, 3.25, 1.0)
    assert verdict.action == "rollback"
    evidence = verdict.evidence
    assert evidence["loss"] == 3.25
    assert evidence["z"] == pytest.approx((3.25 - evidence["median"]) / 0.014826, rel=1e-6)
    # What was spared is not remembered.
    assert 3.25 not in guard.history.losses


def test_a_spike_needs_a_whole_window() -> None:
    guard = Guard([GuardRule(watch="loss_spike", above=6, window=16, action="skip")])
    assert not any(judged(guard, *CALM, (99.0, 1.0)))


def test_equal_losses_do_not_make_a_spike_of_noise() -> None:
    guard = Guard([GuardRule(watch="loss_spike", above=6, window=4, action="skip")])
    assert judged(guard, *[(2.0, 1.0)] * 4, (2.01, 1.0), (2.02, 1.0)) == [[]] * 5 + [["skip"]]


def test_a_norm_spike_and_a_norm_limit_are_two_rules() -> None:
    rules = [
        GuardRule(watch="grad_norm", above=5, action="alert"),
        GuardRule(watch="grad_norm_spike", above=6, window=8, action="skip"),
    ]
    guard = Guard(rules)
    assert not any(judged(guard, *CALM))
    assert judged(guard, (3.0, 4.0), (3.0, 6.0), first=8) == [["skip"], ["alert", "skip"]]


def test_the_deviation_of_the_norm_fires_once_a_window() -> None:
    guard = Guard([GuardRule(watch="grad_norm_std", above=0.5, window=4, times=9)])
    restless = [(3.0, 1.0 + 2 * (i % 2)) for i in range(12)]
    fired = [i for i, actions in enumerate(judged(guard, *restless)) if actions]
    assert fired == [3, 7, 11]


def test_a_plateau_compares_two_windows_and_then_waits_for_two_others() -> None:
    guard = Guard([GuardRule(watch="plateau", above=0.01, window=4, action="lower_lr", times=9)])
    falling = [(4.0 - 0.1 * i, 1.0) for i in range(10)]
    flat = [(3.1, 1.0)] * 20
    actions = judged(guard, *falling, *flat)
    fired = [i for i, found in enumerate(actions) if found]
    # Windows of 4 after step 9 are flat from step 17 on, but for what is above 0.01 · 4 before.
    assert fired == [16, 24]
    assert {found for found in map(tuple, actions) if found} == {("lower_lr",)}


def test_a_plateau_may_be_found_again_after_going_back() -> None:
    """Steps before the last deed are others, though their numbers are lower."""
    guard = Guard([GuardRule(watch="plateau", above=0.01, window=2, action="lower_lr", times=9)])
    flat = [(3.0, 1.0)] * 4
    assert judged(guard, *flat, first=20)[-1] == ["lower_lr"]
    guard.history.losses.clear()
    assert judged(guard, *flat, first=10)[-1] == ["lower_lr"]


def test_the_history_is_as_long_as_the_longest_window() -> None:
    guard = Guard(
        [GuardRule(watch="plateau", window=3), GuardRule(watch="loss_spike", above=6, window=4)]
    )
    judged(guard, *CALM)
    assert guard.history.losses == [loss for loss, _ in CALM[-6:]]


def test_evidence_can_be_read() -> None:
    guard = Guard([GuardRule(watch="grad_norm", above=10, action="skip")])
    (verdict,) = guard.judge(0, 3.0, 12.5)
    assert verdict.text == "grad_norm: grad_norm 12.5, above 10, time 1: skip"
