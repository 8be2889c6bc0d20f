"""Broken schedules, each caught with a line that says what is wrong and where."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabit.pipeline.actions import (
    Action,
    Backward,
    Compute,
    Exchange,
    Forward,
    InputGradient,
    Message,
    Schedule,
    WeightGradient,
    needed_by,
    produced_by,
)
from megabit.pipeline.communicate import with_communication
from megabit.pipeline.placement import Placement
from megabit.pipeline.schedules import forward_only
from megabit.pipeline.validate import ScheduleError, compute_findings, validate
from tests.pipeline.cases import generate, random_placement, random_schedule, sizes

RANKS, MICROBATCHES = 3, 4
IN_ORDER = "microbatches must come in order, else gradients would add up in another order"


def make(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """A sound schedule with its messages, whose lists a test may break."""
    schedule = with_communication(generate(name, ranks, microbatches, chunks))
    return replace(schedule, ranks=[list(actions) for actions in schedule.ranks])


def findings(schedule: Schedule, forward_only: bool = False) -> tuple[str, ...]:
    with pytest.raises(ScheduleError) as raised:
        validate(schedule, forward_only=forward_only)
    return raised.value.findings


@pytest.fixture
def schedule() -> Schedule:
    return make("1f1b", RANKS, MICROBATCHES)


@pytest.fixture
def split_schedule() -> Schedule:
    """With B and W."""
    return make("zb-h1", RANKS, MICROBATCHES)


def exchange_with(actions: list[Action], text: str) -> int:
    """The position of the exchange that prints ``text``, such as ``send a1→2``."""
    [position] = [i for i, a in enumerate(actions) if isinstance(a, Exchange) and text in str(a)]
    return position


def swap(actions: list[Action], one: Action, other: Action) -> None:
    i, j = actions.index(one), actions.index(other)
    actions[i], actions[j] = other, one


def posted_one_by_one(schedule: Schedule) -> list[list[Action]]:
    """Each receive right before it is needed, each send right after it was computed, one at a time:
    what one would write without thinking about it."""
    ranks: list[list[Action]] = []
    for rank in range(schedule.placement.ranks):
        actions: list[Action] = []
        for compute in schedule.computes(rank):
            needed = needed_by(compute, rank, schedule.placement)
            if needed is not None and needed.peer != rank:
                actions.append(Exchange((), (needed,)))
            actions.append(compute)
            made = produced_by(compute, rank, schedule.placement)
            if made is not None and made.peer != rank:
                actions.append(Exchange((made,), ()))
        ranks.append(actions)
    return ranks


# What is sound.


@settings(deadline=None, max_examples=60)
@given(sizes())
def test_every_schedule_is_valid(size: tuple[str, int, int, int]) -> None:
    validate(make(*size))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_every_forward_schedule_is_valid(
    ranks: int, microbatches: int, chunks: int, is_random: bool, seed: int
) -> None:
    placement = Placement.loop(ranks, chunks)
    if is_random:
        placement = random_placement(ranks, chunks, random.Random(seed))
    validate(with_communication(forward_only(placement, microbatches)), forward_only=True)


def test_a_stage_may_split_some_backward_passes_and_not_others() -> None:
    schedule = generate("1f1b", 2, 3)
    orders = [schedule.computes(rank) for rank in range(2)]
    orders[0][orders[0].index(Backward(1)) :] = [
        *(InputGradient(1), Backward(2), WeightGradient(1))
    ]
    assert compute_findings(replace(schedule, ranks=orders)) == [
        f"rank 0: runs BW2 before W1; {IN_ORDER}"
    ]
    orders[0][-3:] = [InputGradient(1), WeightGradient(1), Backward(2)]
    validate(with_communication(replace(schedule, ranks=orders)))


# Computes.


def test_missing_backward(schedule: Schedule) -> None:
    schedule.ranks[1].remove(Backward(2))
    assert findings(schedule) == ("rank 1: never runs BW2, nor B2 and W2",)


def test_missing_input_gradient(split_schedule: Schedule) -> None:
    split_schedule.ranks[1].remove(InputGradient(2))
    assert findings(split_schedule) == ("rank 1: never runs B2",)


def test_missing_weight_gradient(split_schedule: Schedule) -> None:
    split_schedule.ranks[1].remove(WeightGradient(3))
    assert findings(split_schedule) == ("rank 1: never runs W3",)


def test_backward_twice_in_two_ways(split_schedule: Schedule) -> None:
    split_schedule.ranks[2].append(Backward(3))
    assert findings(split_schedule) == (
        "rank 2: runs BW3 and also B3, which is part of it",
        "rank 2: runs BW3 and also W3, which is part of it",
    )


def test_repeated_computes(schedule: Schedule, split_schedule: Schedule) -> None:
    schedule.ranks[0].append(Forward(3))
    assert findings(schedule) == ("rank 0: runs F3 2 times",)
    split_schedule.ranks[0] += [InputGradient(3), WeightGradient(3)]
    assert findings(split_schedule) == ("rank 0: runs B3 2 times", "rank 0: runs W3 2 times")


def test_backward_before_its_forward(schedule: Schedule) -> None:
    swap(schedule.ranks[2], Forward(1), Backward(1))
    assert findings(schedule) == ("rank 2: runs BW1 before F1",)


def test_input_gradient_before_its_forward(split_schedule: Schedule) -> None:
    swap(split_schedule.ranks[2], Forward(1), InputGradient(1))
    assert findings(split_schedule) == ("rank 2: runs B1 before F1",)


def test_weight_gradient_before_its_input_gradient(split_schedule: Schedule) -> None:
    swap(split_schedule.ranks[0], InputGradient(0), WeightGradient(0))
    # The gradient leaves with the exchange after W0, so only the rank itself is at fault.
    assert "rank 0: runs W0 before B0" in findings(split_schedule)


@pytest.mark.parametrize("kind", [Forward, InputGradient, WeightGradient])
def test_microbatches_out_of_order(split_schedule: Schedule, kind: type[Compute]) -> None:
    swap(split_schedule.ranks[0], kind(2), kind(3))
    assert f"rank 0: runs {kind(3)} before {kind(2)}; {IN_ORDER}" in findings(split_schedule)


def test_backwards_out_of_order() -> None:
    """All ranks agree, so it would run; but it would not give the same gradients."""
    orders = [[*map(Forward, range(3)), *map(Backward, (0, 2, 1))]] * RANKS
    schedule = Schedule(Placement.loop(RANKS), 3, orders)
    expected = [f"rank {rank}: runs BW2 before BW1; {IN_ORDER}" for rank in range(RANKS)]
    assert compute_findings(schedule) == expected
    assert findings(with_communication(schedule)) == tuple(expected)


def test_chunks_may_come_in_any_order_but_each_in_its_own() -> None:
    schedule = make("interleaved", 2, 4, 2)
    swap(schedule.ranks[1], Forward(2, 1), Forward(3, 1))
    assert f"rank 1: runs F3.1 before F2.1; {IN_ORDER}" in findings(schedule)


def test_stages_of_one_rank_in_the_wrong_order() -> None:
    schedule = make("zb-v", 2, 2, 2)
    swap(schedule.ranks[1], Forward(0), Forward(0, 1))
    assert "rank 1: runs F0.1 before F0, whose result it needs" in findings(schedule)
    schedule = make("zb-v", 2, 2, 2)
    swap(schedule.ranks[1], InputGradient(0), InputGradient(0, 1))
    assert "rank 1: runs B0 before B0.1, whose result it needs" in findings(schedule)


def test_numbers_out_of_range(schedule: Schedule) -> None:
    schedule.ranks[0].append(Forward(4))
    schedule.ranks[1].append(Forward(-1))
    schedule.ranks[2] += [Backward(0, 1), Forward(0, -1)]
    assert findings(schedule) == (
        "rank 0: runs F4, but microbatches are 0 to 3",
        "rank 1: runs F-1, but microbatches are 0 to 3",
        "rank 2: runs BW0.1, but its chunks are 0 to 0",
        "rank 2: runs F0.-1, but its chunks are 0 to 0",
    )


def test_no_action(schedule: Schedule) -> None:
    schedule.ranks[1].append("F3")
    schedule.ranks[2].append(Compute(3))
    assert findings(schedule) == (
        "rank 1: 'F3' is no action",
        "rank 2: Compute(microbatch=3, chunk=0) is no action",
    )


def test_backward_in_a_forward_schedule(schedule: Schedule) -> None:
    assert findings(schedule, forward_only=True)[0] == (
        "rank 0: runs BW0, which does not belong in a forward pass"
    )


def test_no_backwards_in_a_training_schedule() -> None:
    only = with_communication(forward_only(Placement.loop(RANKS), MICROBATCHES))
    validate(only, forward_only=True)
    assert "rank 2: never runs BW3, nor B3 and W3" in findings(only)


# Placement and size.


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ((), "ranks hold different numbers of stages, or none"),
        (((), ()), "ranks hold different numbers of stages, or none"),
        (((0, 1), (2,)), "ranks hold different numbers of stages, or none"),
        (((0,), (2,)), "does not have each of the stages 0 to 1 once"),
        (((0, 1), (1, 2)), "does not have each of the stages 0 to 3 once"),
        (((3, 0), (1, 2)), "has a rank whose later chunk comes earlier in the model"),
        (
            ((1,), (0,)),
            "must have the first stage on rank 0, and the last on rank 0 or the last rank",
        ),
        (
            ((0,), (2,), (1,)),
            "must have the first stage on rank 0, and the last on rank 0 or the last rank",
        ),
    ],
)
def test_placements(stages: tuple[tuple[int, ...], ...], problem: str) -> None:
    schedule = Schedule(Placement(stages), MICROBATCHES, [])
    assert findings(schedule) == (f"placement: {problem}",)


def test_wrong_number_of_ranks(schedule: Schedule) -> None:
    fewer = replace(schedule, ranks=schedule.ranks[:2])
    assert findings(fewer) == ("has actions for 2 ranks, but its placement has 3",)


def test_no_microbatches(schedule: Schedule) -> None:
    none = replace(schedule, microbatches=0, ranks=[[]] * RANKS)
    assert findings(none) == ("has 0 microbatches, needs one or more",)


# Messages.


def test_dropped_receive(schedule: Schedule) -> None:
    actions = schedule.ranks[1]
    position = exchange_with(actions, "recv a3←0")
    exchange = actions[position]
    rest = tuple(m for m in exchange.receives if str(m) != "a3")
    actions[position] = replace(exchange, receives=rest)
    assert findings(schedule) == ("rank 1: never receives a3 from rank 0",)


def test_dropped_send(schedule: Schedule) -> None:
    actions = schedule.ranks[1]
    position = exchange_with(actions, "send g3→0")
    actions[position] = replace(actions[position], sends=())
    assert findings(schedule) == ("rank 1: never sends g3 to rank 0",)


def test_receive_after_use(schedule: Schedule) -> None:
    schedule.ranks[2][:2] = schedule.ranks[2][1::-1]
    assert findings(schedule) == ("rank 2: runs F0 before it receives a0 from rank 1",)


def test_gradient_received_after_use(split_schedule: Schedule) -> None:
    actions = split_schedule.ranks[1]
    position = exchange_with(actions, "recv g3←2")
    exchange = actions[position]
    rest = tuple(m for m in exchange.receives if str(m) != "g3")
    actions[position] = replace(exchange, receives=rest)
    actions.append(Exchange((), (Message("gradient", 3, 0, 2),)))
    assert findings(split_schedule) == ("rank 1: runs B3 before it receives g3 from rank 2",)


def test_send_before_it_is_computed(schedule: Schedule) -> None:
    first = schedule.ranks[0]
    first[:2] = first[1::-1]
    assert findings(schedule) == ("rank 0: sends a0 to rank 1 before F0 has computed it",)


def test_sent_twice(schedule: Schedule) -> None:
    schedule.ranks[0].append(Exchange((Message("activation", 0, 0, 1),), ()))
    assert findings(schedule) == ("rank 0: sends a0 to rank 1 2 times",)


def test_wrong_peer(schedule: Schedule) -> None:
    schedule.ranks[0][1] = Exchange((Message("activation", 0, 0, 2),), ())
    assert findings(schedule) == (
        "rank 0: never sends a0 to rank 1",
        "rank 0: sends a0 to rank 2, which does not need it",
    )


def test_wrong_chunk() -> None:
    schedule = make("interleaved", 2, 2, 2)
    schedule.ranks[0][1] = Exchange((Message("activation", 0, 1, 1),), ())
    assert findings(schedule) == (
        "rank 0: never sends a0 to rank 1",
        "rank 0: sends a0.1 to rank 1 2 times",
        "rank 0: sends a0.1 to rank 1 before F0.1 has computed it",
    )


def test_peer_that_does_not_exist(schedule: Schedule) -> None:
    schedule.ranks[2].append(Exchange((), (Message("gradient", 0, 0, 3),)))
    assert findings(schedule) == ("rank 2: receives g0 from rank 3, which it does not need",)


def test_message_to_itself() -> None:
    schedule = make("zb-v", 2, 2, 2)
    message = Message("activation", 0, 1, 1)
    schedule.ranks[1].append(Exchange((message,), (message,)))
    assert findings(schedule) == (
        "rank 1: sends a0.1 to rank 1, which does not need it",
        "rank 1: receives a0.1 from rank 1, which it does not need",
    )


def test_swapped_messages() -> None:
    """Each rank is consistent in itself, but one sends a1 first and the other expects a0."""
    schedule = make("gpipe", 2, MICROBATCHES)
    first = schedule.ranks[0]
    early = first.pop(exchange_with(first, "send a0→1"))
    position = exchange_with(first, "send a1→1")
    late = first[position]
    first[position] = replace(late, sends=late.sends + early.sends)
    assert findings(schedule) == ("rank 1: receives a0 from rank 0 where that sends a1",)


def test_all_findings_are_reported(schedule: Schedule) -> None:
    schedule.ranks[0].remove(Backward(0))
    schedule.ranks[2].append(Forward(3))
    assert findings(schedule) == (
        "rank 0: never runs BW0, nor B0 and W0",
        "rank 2: runs F3 2 times",
    )


# Ranks that wait for one another.


CYCLIC = Schedule(
    Placement(((0, 3), (1, 2))),
    2,
    [
        [
            *(Forward(0), Forward(1), Forward(0, 1), Forward(1, 1)),
            *(Backward(0, 1), Backward(0), Backward(1, 1), Backward(1)),
        ],
        [
            *(Forward(0), Forward(0, 1), Forward(1), Forward(1, 1)),
            *(Backward(0, 1), Backward(1, 1), Backward(0), Backward(1)),
        ],
    ],
)
"""Rank 0 wants microbatch 0 to be through before it sends 1 back; rank 1 wants 1 first."""


def test_computes_that_wait_for_one_another() -> None:
    """No messages can help."""
    assert compute_findings(CYCLIC) == [
        "rank 0: stuck before BW0, for which rank 1 never gets to compute g0",
        "rank 1: stuck before BW1.1, for which rank 0 never gets to compute g1.1",
    ]


def test_a_cycle_of_computes_is_named_though_messages_hang_too() -> None:
    schedule = replace(CYCLIC, ranks=posted_one_by_one(CYCLIC))
    assert findings(schedule)[0].startswith("rank 0: stuck before BW0, for which")


def test_two_blocking_sends_face_to_face() -> None:
    """The hang that exchanges are there to prevent; a buffered transport would hide it."""
    schedule = generate("1f1b", 2, 4)
    assert findings(replace(schedule, ranks=posted_one_by_one(schedule))) == (
        "rank 0: deadlock, waits to send a1 to rank 1",
        "rank 1: deadlock, waits to send g0 to rank 0",
    )


def test_two_blocking_receives_face_to_face() -> None:
    schedule = generate("1f1b", 2, 2)
    first, second = posted_one_by_one(schedule)
    # Rank 0 waits for the gradient before it sends a1, rank 1 for a1 before it computes that.
    swap(first, Exchange((Message("activation", 1, 0, 1),), ()), first[4])
    second.insert(2, second.pop(4))
    assert findings(replace(schedule, ranks=[first, second])) == (
        "rank 0: deadlock, waits to receive g0 from rank 1",
        "rank 1: deadlock, waits to receive a1 from rank 0",
    )


def test_only_the_order_that_cannot_work_is_refused() -> None:
    """Not separate sends and receives as such."""
    schedule = generate("1f1b", 2, 2)
    first, second = posted_one_by_one(schedule)
    second.insert(2, second.pop(4))
    validate(replace(schedule, ranks=[first, second]))


def test_ranks_that_wait_in_a_circle() -> None:
    """Round and round, every rank sends to the next one, which does the same."""
    schedule = forward_only(Placement.loop(3, 2), 3)
    posted = replace(schedule, ranks=posted_one_by_one(schedule))
    assert findings(posted, forward_only=True) == (
        "rank 0: deadlock, waits to send a2 to rank 1",
        "rank 1: deadlock, waits to send a1 to rank 2",
        "rank 2: deadlock, waits to send a0.1 to rank 0",
    )


# Properties.


@settings(deadline=None)
@given(st.data(), sizes(max_ranks=8, max_microbatches=8))
def test_no_action_can_be_spared(data: st.DataObject, size: tuple[str, int, int, int]) -> None:
    schedule = make(*size)
    actions = data.draw(st.sampled_from(schedule.ranks))
    del actions[data.draw(st.integers(0, len(actions) - 1))]
    with pytest.raises(ScheduleError, match="never"):
        validate(schedule)


@settings(deadline=None)
@given(st.data(), sizes(max_ranks=8, max_microbatches=8))
def test_a_microbatch_cannot_go_back_before_it_came(
    data: st.DataObject, size: tuple[str, int, int, int]
) -> None:
    schedule = make(*size)
    rank = data.draw(st.integers(0, size[1] - 1))
    forward = data.draw(
        st.sampled_from([c for c in schedule.computes(rank) if isinstance(c, Forward)])
    )
    backward = next(
        c
        for c in schedule.computes(rank)
        if isinstance(c, Backward | InputGradient)
        and (c.microbatch, c.chunk) == (forward.microbatch, forward.chunk)
    )
    swap(schedule.ranks[rank], forward, backward)
    assert f"rank {rank}: runs {backward} before {forward}" in findings(schedule)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.integers(0, 2**16)
)
def test_no_compute_of_a_random_schedule_can_be_repeated(
    ranks: int, chunks: int, microbatches: int, is_fused: bool, seed: int
) -> None:
    rng = random.Random(seed)
    placement = random_placement(ranks, chunks, rng)
    schedule = random_schedule(placement, microbatches, is_fused, rng)
    assert compute_findings(schedule) == []
    rank = rng.randrange(ranks)
    order = schedule.computes(rank)
    again = rng.choice(order)
    broken = [*schedule.ranks]
    broken[rank] = [*order, again]
    found = compute_findings(replace(schedule, ranks=broken))
    assert f"rank {rank}: runs {again} 2 times" in found
