"""Broken schedules, each caught with a message that says what is wrong and where."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabit.pipeline.actions import Action, Backward, Exchange, Forward, Message
from megabit.pipeline.schedules import forward_only, gpipe, make_schedule, with_communication
from megabit.pipeline.validate import ScheduleError, validate

STAGES, MICROBATCHES = 3, 4


def findings(schedule: list[list[Action]], stages: int = STAGES) -> tuple[str, ...]:
    with pytest.raises(ScheduleError) as raised:
        validate(schedule, stages, MICROBATCHES)
    return raised.value.findings


@pytest.fixture
def schedule() -> list[list[Action]]:
    """A sound schedule, for a test to break."""
    return make_schedule("1f1b", STAGES, MICROBATCHES)


def exchange_with(actions: list[Action], text: str) -> int:
    """The position of the exchange that prints ``text``, such as ``send a1→2``."""
    [position] = [i for i, a in enumerate(actions) if isinstance(a, Exchange) and text in str(a)]
    return position


def split(actions: list[Action], send_first: bool) -> list[Action]:
    """The same messages, with each exchange's sends and receives one after the other."""
    result: list[Action] = []
    for action in actions:
        if isinstance(action, Exchange):
            send, receive = Exchange(action.sends, ()), Exchange((), action.receives)
            result += [send, receive] if send_first else [receive, send]
        else:
            result.append(action)
    return result


def test_missing_backward(schedule: list[list[Action]]) -> None:
    schedule[1].remove(Backward(2))
    assert findings(schedule) == ("stage 1: never runs B2",)


def test_backward_in_a_forward_only_schedule(schedule: list[list[Action]]) -> None:
    with pytest.raises(ScheduleError, match="stage 0: runs B0, which does not belong here"):
        validate(schedule, STAGES, MICROBATCHES, forward_only=True)


def test_no_backwards_in_a_training_schedule() -> None:
    only = with_communication(forward_only(STAGES, MICROBATCHES))
    validate(only, STAGES, MICROBATCHES, forward_only=True)
    assert "stage 2: never runs B3" in findings(only)


def test_duplicated_forward(schedule: list[list[Action]]) -> None:
    schedule[0].append(Forward(1))
    assert findings(schedule) == ("stage 0: runs F1 2 times",)


def test_backward_before_its_forward(schedule: list[list[Action]]) -> None:
    last = schedule[2]
    forward, backward = last.index(Forward(1)), last.index(Backward(1))
    last[forward], last[backward] = last[backward], last[forward]
    assert findings(schedule) == ("stage 2: runs B1 before F1",)


def test_microbatch_out_of_range(schedule: list[list[Action]]) -> None:
    schedule[0].append(Forward(4))
    assert findings(schedule) == ("stage 0: runs F4, which does not belong here",)


def test_dropped_receive(schedule: list[list[Action]]) -> None:
    position = exchange_with(schedule[1], "recv a3←0")
    exchange = schedule[1][position]
    assert isinstance(exchange, Exchange)
    schedule[1][position] = replace(exchange, receives=())
    assert findings(schedule) == ("stage 1: never receives a3 from stage 0",)


def test_receive_after_use(schedule: list[list[Action]]) -> None:
    schedule[2][:2] = schedule[2][1::-1]
    assert findings(schedule) == ("stage 2: runs F0 before it receives a0 from stage 1",)


def test_send_before_it_is_produced(schedule: list[list[Action]]) -> None:
    first = schedule[0]
    first[:2] = first[1::-1]
    assert findings(schedule) == ("stage 0: sends a0 to stage 1 before F0 has produced it",)


def test_sent_twice(schedule: list[list[Action]]) -> None:
    schedule[0].append(Exchange((Message("activation", 0, 1),), ()))
    assert findings(schedule) == ("stage 0: sends a0 to stage 1 2 times",)


def test_wrong_peer(schedule: list[list[Action]]) -> None:
    schedule[0][1] = Exchange((Message("activation", 0, 2),), ())
    assert findings(schedule) == (
        "stage 0: never sends a0 to stage 1",
        "stage 0: sends a0 to stage 2, which does not need it",
    )


def test_peer_that_does_not_exist(schedule: list[list[Action]]) -> None:
    schedule[2].append(Exchange((), (Message("gradient", 0, 3),)))
    assert findings(schedule) == ("stage 2: receives g0 from stage 3, which it does not need",)


def test_swapped_messages() -> None:
    """Each stage is consistent in itself, but the first one runs F1 before F0."""
    orders = gpipe(2, MICROBATCHES)
    orders[0][:2] = [Forward(1), Forward(0)]
    assert findings(with_communication(orders), stages=2) == (
        "stage 1: receives a0 from stage 0 where that sends a1",
    )


def test_wrong_number_of_stages(schedule: list[list[Action]]) -> None:
    assert findings(schedule, stages=4) == ("has 3 stages, must have 4",)


def test_all_findings_are_reported(schedule: list[list[Action]]) -> None:
    schedule[0].remove(Backward(0))
    schedule[2].append(Forward(0))
    assert findings(schedule) == ("stage 0: never runs B0", "stage 2: runs F0 2 times")


def test_both_neighbours_send_first() -> None:
    """The hang that exchanges are there to prevent; a buffered transport would hide it."""
    schedule = [split(actions, send_first=True) for actions in make_schedule("1f1b", 2, 4)]
    assert findings(schedule, stages=2) == (
        "stage 0: deadlock, waits to send a1 to stage 1",
        "stage 1: deadlock, waits to send g0 to stage 0",
    )


def test_both_neighbours_receive_first() -> None:
    schedule = [split(actions, send_first=False) for actions in make_schedule("1f1b", 2, 4)]
    assert findings(schedule, stages=2) == (
        "stage 0: deadlock, waits to receive g0 from stage 1",
        "stage 1: deadlock, waits to receive a1 from stage 0",
    )


def test_neighbours_in_opposite_order_do_not_deadlock() -> None:
    """Only the order that cannot work is refused, not separate sends and receives as such."""
    first, second = make_schedule("1f1b", 2, 4)
    validate([split(first, send_first=True), split(second, send_first=False)], 2, 4)


@settings(deadline=None)
@given(st.data(), st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 8), st.integers(1, 16))
def test_no_action_can_be_spared(
    data: st.DataObject, name: Literal["1f1b", "gpipe"], stages: int, microbatches: int
) -> None:
    schedule = make_schedule(name, stages, microbatches)
    actions = data.draw(st.sampled_from(schedule))
    del actions[data.draw(st.integers(0, len(actions) - 1))]
    with pytest.raises(ScheduleError, match="never"):
        validate(schedule, stages, microbatches)
