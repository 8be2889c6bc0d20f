"""Schedules whose ranks hold two stages each, there and back: rank r has stages r and 2p−1−r.

The first rank has both ends of the model, so that the activations of a microbatch are kept long on
one stage of a rank and shortly on the other: all ranks keep equally many. How many, against the
bubble, is a choice. Qi et al. 2024, https://arxiv.org/abs/2405.15362.

A *building block* says when each rank runs F and B of both chunks for one microbatch. Each further
microbatch does the same 6 units of time later, for F, B and W of two chunks. No two computes of a
rank may be at the same time modulo 6. W's go where ``fill_bubbles`` finds room.
"""

from itertools import product

from megabit.pipeline.actions import Compute, Forward, InputGradient, Schedule
from megabit.pipeline.placement import Placement
from megabit.pipeline.schedules import require_chunks
from megabit.pipeline.zero_bubble import fill_bubbles

PERIOD = 6


def zb_v(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B's activations, p, and almost no bubble: (p−1)/(6m) of a step if F, B and W take equally
    long.

    That is how much later the last rank starts. It comes again in every step, since all ranks wait
    for the norm of the gradients in between.
    """
    return _v_shaped(ranks, microbatches, chunks, steps=(4, 2, 4, 2), activations=ranks)


def v_half(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """About half of 1F1B's activations, (p+2)//2, and half its bubble: (3p−4)/(6m), or 3/(6m) for
    p = 2."""
    return _v_shaped(ranks, microbatches, chunks, steps=(2, 1, 2, 1), activations=(ranks + 2) // 2)


def v_min(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """About a third of 1F1B's activations, (p+4)//3, and two thirds of its bubble: (4p−5)/(6m), or
    (4p−3)/(6m) where 3 divides p."""
    return _v_shaped(ranks, microbatches, chunks, steps=(1, 1, 1, 1), activations=(ranks + 4) // 3)


Steps = tuple[int, int, int, int]
"""Units from a rank to the next one, in F of chunk 0, F of chunk 1, B of chunk 1, B of chunk 0."""


def _v_shaped(
    ranks: int, microbatches: int, chunks: int, steps: Steps, activations: int
) -> Schedule:
    """The schedule of a building block; a rank keeps ``activations`` of all of its layers."""
    require_chunks(chunks, 2)
    orders: list[list[Compute]] = []
    for forward_0, forward_1, backward_1, backward_0 in _building_block(ranks, steps):
        times: list[tuple[int, Compute]] = []
        for i in range(microbatches):
            times += [
                (PERIOD * i + forward_0, Forward(i, 0)),
                (PERIOD * i + forward_1, Forward(i, 1)),
                (PERIOD * i + backward_1, InputGradient(i, 1)),
                (PERIOD * i + backward_0, InputGradient(i, 0)),
            ]
        orders.append([compute for _, compute in sorted(times, key=lambda item: item[0])])
    schedule = Schedule(Placement.v(ranks), microbatches, orders)
    return fill_bubbles(schedule, limit=2 * activations)


def _building_block(ranks: int, steps: Steps) -> list[Steps]:
    """When each rank runs F0, F1, B1 and B0, with the shortest turns that let no two collide."""
    blocks = (
        _block_with_turns(ranks, steps, turns)
        for turns in sorted(product(range(1, PERIOD + 1), repeat=3), key=lambda t: (sum(t), t))
    )
    return next(
        block
        for block in blocks
        if all(len({time % PERIOD for time in times}) == len(times) for times in block)
    )


def _block_with_turns(ranks: int, steps: Steps, turns: tuple[int, ...]) -> list[Steps]:
    """The same with given units from the last F0 to the first F1, from there to B1, and to B0."""
    hops = ranks - 1
    forward_1 = hops * steps[0] + turns[0]
    backward_1 = forward_1 + hops * steps[1] + turns[1]
    backward_0 = backward_1 + hops * steps[2] + turns[2]
    return [
        (
            rank * steps[0],
            forward_1 + (hops - rank) * steps[1],
            backward_1 + rank * steps[2],
            backward_0 + (hops - rank) * steps[3],
        )
        for rank in range(ranks)
    ]
