"""Weight gradients in the bubble: ZB-H1, and filling bubbles as such."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabit.pipeline.actions import Forward, InputGradient, Schedule, WeightGradient
from megabit.pipeline.placement import Placement
from megabit.pipeline.simulate import peak_activations
from megabit.pipeline.zero_bubble import fill_bubbles
from tests.pipeline.cases import generate, random_placement, random_schedule


def without_weight_gradients(schedule: Schedule) -> Schedule:
    orders = [
        [c for c in schedule.computes(rank) if not isinstance(c, WeightGradient)]
        for rank in range(schedule.placement.ranks)
    ]
    return replace(schedule, ranks=orders)


def test_zb_h1_as_text() -> None:
    assert str(generate("zb-h1", 3, 4)) == (
        "rank 0: F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3\n"
        "rank 1: F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3\n"
        "rank 2: F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"
    )


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 16), st.integers(1, 64))
def test_zb_h1_is_1f1b_but_for_the_weight_gradients(ranks: int, microbatches: int) -> None:
    schedule = generate("zb-h1", ranks, microbatches)
    fused = generate("1f1b", ranks, microbatches)
    for ours, theirs in zip(without_weight_gradients(schedule).ranks, fused.ranks, strict=True):
        kinds = [(isinstance(c, Forward), c.microbatch) for c in ours]
        assert kinds == [(isinstance(c, Forward), c.microbatch) for c in theirs]
    # Later ranks keep more than in 1F1B, up to what rank 0 keeps there.
    assert max(peak_activations(schedule)) == min(ranks, microbatches)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.integers(1, 20), st.integers(0, 99)
)
def test_filling_keeps_the_order_and_the_limit(
    ranks: int, chunks: int, microbatches: int, limit: int, seed: int
) -> None:
    rng = random.Random(seed)
    placement = random_placement(ranks, chunks, rng)
    order = without_weight_gradients(random_schedule(placement, microbatches, False, rng))
    # What this order keeps from F to B; less than that is too little, whatever the W's do.
    live = [
        [isinstance(c, Forward) - isinstance(c, InputGradient) for c in computes]
        for computes in order.ranks
    ]
    needed = max(sum(steps[:i]) for steps in live for i in range(len(steps) + 1))
    if limit < needed:
        with pytest.raises(ValueError, match=f"no rank can go on with {limit} activations"):
            fill_bubbles(order, limit)
        return
    filled = fill_bubbles(order, limit)
    assert without_weight_gradients(filled) == order
    assert max(peak_activations(filled)) * chunks <= limit
    for computes in filled.ranks:
        put_off = [c for c in computes if isinstance(c, InputGradient)]
        weights = [c for c in computes if isinstance(c, WeightGradient)]
        assert [(c.microbatch, c.chunk) for c in weights] == [
            (c.microbatch, c.chunk) for c in put_off
        ]


def test_a_limit_that_is_too_small() -> None:
    order = without_weight_gradients(generate("zb-h1", 3, 4))
    with pytest.raises(ValueError, match="no rank can go on with 2 activations, next are F2 on"):
        fill_bubbles(order, 2)


def test_an_order_that_cannot_be_run() -> None:
    """Each rank wants something first that only the other's second can give it."""
    order = Schedule(
        Placement.loop(2),
        1,
        [[InputGradient(0), Forward(0)], [Forward(0), InputGradient(0)]],
    )
    with pytest.raises(ValueError, match="next are B0 on rank 0, F0 on rank 1"):
        fill_bubbles(order, 9)
