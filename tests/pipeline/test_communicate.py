"""Messages derived from the order of computes: all of them, once, in time, and free of deadlock."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabit.pipeline.actions import Compute, Exchange, Message, Schedule, needed_by, produced_by
from megabit.pipeline.communicate import LOOKAHEAD, with_communication
from megabit.pipeline.simulate import Costs, Stuck, simulate
from megabit.pipeline.validate import validate
from tests.pipeline.cases import generate, random_placement, random_schedule, sizes

random_cases = st.builds(
    lambda ranks, chunks, microbatches, is_fused, seed: random_schedule(
        random_placement(ranks, chunks, random.Random(seed)),
        microbatches,
        is_fused,
        random.Random(seed + 1),
    ),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 2**16),
)
our_cases = sizes(max_ranks=10, max_microbatches=24).map(lambda size: generate(*size))


def test_1f1b_as_text() -> None:
    assert str(with_communication(generate("1f1b", 3, 3))) == (
        "rank 0: F0 [send a0→1] F1 [send a1→1] F2 [send a2→1, recv g0←1, recv g1←1] BW0"
        " [recv g2←1] BW1 BW2\n"
        "rank 1: [recv a0←0, recv a1←0] F0 [send a0→2] F1 [send a1→2, recv a2←0, recv g0←2] BW0"
        " [send g0→0] F2 [send a2→2, recv g1←2] BW1 [send g1→0, recv g2←2] BW2 [send g2→0]\n"
        "rank 2: [recv a0←1] F0 [recv a1←1] BW0 [send g0→1] F1 [recv a2←1] BW1 [send g1→1] F2 BW2"
        " [send g2→1]"
    )


def test_one_rank_communicates_nothing() -> None:
    for name, chunks in (("1f1b", 1), ("interleaved", 3), ("zb-v", 2)):
        schedule = generate(name, 1, 3, chunks)
        assert with_communication(schedule) == schedule


def test_the_turn_of_a_v_sends_nothing() -> None:
    """Stages p−1 and p are both on the last rank."""
    for action in with_communication(generate("zb-v", 2, 3, 2)).ranks[1]:
        if isinstance(action, Exchange):
            assert all(message.peer == 0 for message in action.sends + action.receives)


@settings(deadline=None, max_examples=60)
@given(our_cases)
def test_ours_are_valid(schedule: Schedule) -> None:
    communicated = with_communication(schedule)
    for rank, computes in enumerate(schedule.ranks):
        assert communicated.computes(rank) == computes
    validate(communicated)


@settings(deadline=None)
@given(random_cases)
def test_any_order_that_can_be_run_is_made_valid(schedule: Schedule) -> None:
    """All messages once, in an order that ranks agree on, and free of deadlock even if each
    exchange blocks: what ``validate`` proves."""
    validate(with_communication(schedule))


@settings(deadline=None, max_examples=60)
@given(st.one_of(our_cases, random_cases))
def test_at_most_one_exchange_between_two_computes(schedule: Schedule) -> None:
    for actions in with_communication(schedule).ranks:
        exchanges = [isinstance(action, Exchange) for action in actions]
        assert not any(first and second for first, second in pairwise(exchanges))


@settings(deadline=None, max_examples=60)
@given(st.one_of(our_cases, random_cases))
def test_sends_leave_at_once(schedule: Schedule) -> None:
    placement = schedule.placement
    for rank, actions in enumerate(with_communication(schedule).ranks):
        for before, action in pairwise([None, *actions]):
            sent = ()
            if isinstance(before, Compute):
                made = produced_by(before, rank, placement)
                sent = (made,) if made is not None and made.peer != rank else ()
            if isinstance(action, Exchange):
                assert action.sends == sent
            else:
                assert sent == ()


def waits(schedule: Schedule) -> Iterator[tuple[int, Message, Exchange, int]]:
    """Each receive of ``schedule``: its rank, its exchange, and how many computes run between that
    and the one that needs it."""
    for rank, actions in enumerate(schedule.ranks):
        posted = {}
        place = 0
        for action in actions:
            if isinstance(action, Exchange):
                posted.update((message, (place, action)) for message in action.receives)
                continue
            needed = needed_by(action, rank, schedule.placement)
            if needed is not None and needed.peer != rank:
                when, exchange = posted[needed]
                yield rank, needed, exchange, place - when
            place += 1


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(1, 12), st.integers(1, 32))
def test_receives_are_posted_a_little_early(name: str, ranks: int, microbatches: int) -> None:
    schedule = with_communication(generate(name, ranks, microbatches))
    assert all(early in range(LOOKAHEAD + 1) for *_, early in waits(schedule))


@settings(deadline=None, max_examples=60)
@given(st.one_of(our_cases, random_cases))
def test_receives_are_posted_earlier_only_if_the_order_demands(schedule: Schedule) -> None:
    """All ranks post messages in the order in which these are computed. So a receive comes earlier
    than ``LOOKAHEAD`` only if a later message must be posted with it."""
    placement, chunks = schedule.placement, schedule.placement.chunks
    timeline = simulate(schedule, Costs.even(placement, chunks, chunks, chunks))
    computed = {}
    for rank, spans in enumerate(timeline.ranks):
        for span in spans:
            made = produced_by(span.compute, rank, placement)
            if made is not None:
                key = (made.peer, made.kind, made.microbatch, made.chunk)
                computed[key] = (span.end, rank)

    def time(message: Message, target: int) -> tuple[float, int]:
        return computed[target, message.kind, message.microbatch, message.chunk]

    def times(exchange: Exchange, rank: int) -> list[tuple[float, int]]:
        sent = [time(message, message.peer) for message in exchange.sends]
        return sent + [time(message, rank) for message in exchange.receives]

    communicated = with_communication(schedule)
    for rank, actions in enumerate(communicated.ranks):
        exchanges = [action for action in actions if isinstance(action, Exchange)]
        for first, second in pairwise(exchanges):
            assert max(times(first, rank)) < min(times(second, rank))
    for rank, message, exchange, early in waits(communicated):
        assert early >= 0
        if early > LOOKAHEAD:
            assert time(message, rank) < max(times(exchange, rank))


def test_an_order_that_cannot_be_run() -> None:
    schedule = generate("1f1b", 2, 2)
    first = schedule.computes(0)
    swapped = Schedule(schedule.placement, 2, [[*first[2:], *first[:2]], schedule.computes(1)])
    with pytest.raises(Stuck, match="rank 0 cannot run BW0"):
        with_communication(swapped)
