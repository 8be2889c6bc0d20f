"""The generators: complete, free of deadlock, with the activations that the papers promise."""

from itertools import pairwise
from typing import Literal, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabit.pipeline.actions import Backward, Exchange, Forward, Message
from megabit.pipeline.schedules import format_schedule, make_schedule
from megabit.pipeline.validate import peak_activations, validate

Name: TypeAlias = Literal["1f1b", "gpipe", "forward_only"]

stage_counts = st.integers(1, 16)
microbatch_counts = st.integers(1, 64)
names = st.sampled_from(["1f1b", "gpipe", "forward_only"])


@settings(deadline=None)
@given(names, stage_counts, microbatch_counts)
def test_every_schedule_is_valid(name: Name, stages: int, microbatches: int) -> None:
    schedule = make_schedule(name, stages, microbatches)
    validate(schedule, stages, microbatches, forward_only=name == "forward_only")


@settings(deadline=None)
@given(stage_counts, microbatch_counts)
def test_peak_activations(stages: int, microbatches: int) -> None:
    assert peak_activations(make_schedule("gpipe", stages, microbatches)) == [microbatches] * stages
    assert peak_activations(make_schedule("1f1b", stages, microbatches)) == [
        min(microbatches, stages - stage) for stage in range(stages)
    ]


@settings(deadline=None)
@given(names, stage_counts, microbatch_counts)
def test_microbatches_run_in_order(name: Name, stages: int, microbatches: int) -> None:
    backwards = [] if name == "forward_only" else [Backward(i) for i in range(microbatches)]
    for actions in make_schedule(name, stages, microbatches):
        forwards = [action for action in actions if isinstance(action, Forward)]
        assert forwards == [Forward(i) for i in range(microbatches)]
        assert [action for action in actions if isinstance(action, Backward)] == backwards


@settings(deadline=None)
@given(names, stage_counts, microbatch_counts)
def test_at_most_one_exchange_between_two_computes(
    name: Name, stages: int, microbatches: int
) -> None:
    for actions in make_schedule(name, stages, microbatches):
        exchanges = [isinstance(action, Exchange) for action in actions]
        assert not any(first and second for first, second in pairwise(exchanges))


def test_one_stage_communicates_nothing() -> None:
    assert make_schedule("1f1b", 1, 2) == [[Forward(0), Backward(0), Forward(1), Backward(1)]]


def test_1f1b_as_text() -> None:
    assert format_schedule(make_schedule("1f1b", 3, 3)) == (
        "stage 0: F0 [send a0→1] F1 [send a1→1] F2 [send a2→1, recv g0←1] B0"
        " [recv g1←1] B1 [recv g2←1] B2\n"
        "stage 1: [recv a0←0] F0 [send a0→2, recv a1←0] F1 [send a1→2, recv g0←2] B0"
        " [send g0→0, recv a2←0] F2 [send a2→2, recv g1←2] B1 [send g1→0, recv g2←2] B2"
        " [send g2→0]\n"
        "stage 2: [recv a0←1] F0 B0 [send g0→1, recv a1←1] F1 B1 [send g1→1, recv a2←1] F2 B2"
        " [send g2→1]"
    )


def test_gpipe_as_text() -> None:
    assert format_schedule(make_schedule("gpipe", 2, 2)) == (
        "stage 0: F0 [send a0→1] F1 [send a1→1, recv g0←1] B0 [recv g1←1] B1\n"
        "stage 1: [recv a0←0] F0 [recv a1←0] F1 B0 [send g0→0] B1 [send g1→0]"
    )


def test_forward_only_as_text() -> None:
    assert format_schedule(make_schedule("forward_only", 2, 2)) == (
        "stage 0: F0 [send a0→1] F1 [send a1→1]\nstage 1: [recv a0←0] F0 [recv a1←0] F1"
    )


def test_stage_numbers_are_aligned() -> None:
    lines = format_schedule(make_schedule("forward_only", 11, 1)).splitlines()
    assert lines[9].startswith("stage  9: [recv a0←8] F0")
    assert lines[10].startswith("stage 10: [recv a0←9] F0")


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Forward(3), "F3"),
        (Backward(3), "B3"),
        (
            Exchange((Message("activation", 3, 2),), (Message("gradient", 1, 2),)),
            "[send a3→2, recv g1←2]",
        ),
    ],
)
def test_actions_print(action: object, text: str) -> None:
    assert str(action) == text
