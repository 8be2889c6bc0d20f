"""Schedules that split the backward pass, and do gradients of weights where a rank would wait.

Only the gradient of a stage's input (B) is waited for by another rank; those of its weights (W) can
be computed at any later time. Qi et al. 2023, https://arxiv.org/abs/2401.10241.
"""

from collections import deque

from megabit.pipeline.actions import (
    Compute,
    Forward,
    InputGradient,
    Message,
    Schedule,
    WeightGradient,
    needed_by,
    produced_by,
)
from megabit.pipeline.placement import Placement
from megabit.pipeline.schedules import alternate, require_chunks


def zb_h1(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B with W's in its bubble, which becomes (p−1)·(F+B−W) instead of (p−1)·(F+B+W).

    A rank keeps the activations of at most p microbatches, as in 1F1B (there, later ranks keep
    fewer). Section 2.3 of the paper.
    """
    require_chunks(chunks, 1)
    forwards = [*map(Forward, range(microbatches))]
    gradients = [*map(InputGradient, range(microbatches))]
    orders = [alternate(forwards, gradients, ranks - 1 - rank) for rank in range(ranks)]
    return fill_bubbles(Schedule(Placement.loop(ranks), microbatches, orders), limit=ranks)


def fill_bubbles(schedule: Schedule, limit: int) -> Schedule:
    """Put W's into ``schedule``, which has each rank's F's and B's in order.

    All ranks run it, every compute taking one unit of time. Where the next F or B would have to
    wait for another rank, or where an F would make the rank keep more than ``limit`` activations
    (of one stage and microbatch each, from F to W), the rank runs the oldest W that it has put off.

    Raises:
        ValueError: no rank can go on: ``limit`` is too small, or the order cannot be run at all.
    """
    placement = schedule.placement
    waiting = [deque(schedule.computes(rank)) for rank in range(placement.ranks)]
    put_off: list[deque[WeightGradient]] = [deque() for _ in waiting]
    kept = [0] * placement.ranks
    arrived: list[set[Message]] = [set() for _ in waiting]
    orders: list[list[Compute]] = [[] for _ in waiting]

    def can_run(compute: Compute, rank: int) -> bool:
        needed = needed_by(compute, rank, placement)
        is_room = kept[rank] < limit or not isinstance(compute, Forward)
        return is_room and (needed is None or needed in arrived[rank])

    while any(waiting) or any(put_off):
        running: list[tuple[int, Compute]] = []
        for rank in range(placement.ranks):
            if waiting[rank] and can_run(waiting[rank][0], rank):
                running.append((rank, waiting[rank].popleft()))
            elif put_off[rank]:
                running.append((rank, put_off[rank].popleft()))
        if not running:  # then nothing will arrive, either
            raise ValueError(
                f"no rank can go on with {limit} activations, next are "
                + ", ".join(
                    f"{order[0]} on rank {rank}" for rank, order in enumerate(waiting) if order
                )
            )
        for rank, compute in running:
            orders[rank].append(compute)
            kept[rank] += isinstance(compute, Forward) - isinstance(compute, WeightGradient)
            if isinstance(compute, InputGradient):
                put_off[rank].append(WeightGradient(compute.microbatch, compute.chunk))
            made = produced_by(compute, rank, placement)
            if made is not None:
                arrived[made.peer].add(Message(made.kind, made.microbatch, made.chunk, rank))
    return Schedule(placement, schedule.microbatches, orders)
