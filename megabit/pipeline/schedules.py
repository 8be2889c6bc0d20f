"""Schedules whose backward passes compute all gradients at once, and that of evaluation.

A generator is a function of p ranks, m microbatches and v chunks that states the order in which
each rank computes, and nothing else: ``communicate`` derives the messages, ``catalog`` has the
generators' names. In all of them the F's of a chunk run in the order of the microbatches, and so do
its backward passes: so gradients add up in one order, hence to the same bits, whatever the
schedule.
"""

from collections.abc import Sequence

from megabit.pipeline.actions import Backward, Compute, Forward, Schedule
from megabit.pipeline.placement import Placement
from megabit.units import counted


def gpipe(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """All forwards, then all backwards; a rank keeps the activations of all microbatches.

    Huang et al. 2019, https://arxiv.org/abs/1811.06965.
    """
    require_chunks(chunks, 1)
    order = [*map(Forward, range(microbatches)), *map(Backward, range(microbatches))]
    return Schedule(Placement.loop(ranks), microbatches, [[*order] for _ in range(ranks)])


def one_forward_one_backward(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Fill the pipeline, then alternate one forward and one backward, then drain it.

    The bubble is GPipe's, but rank r keeps the activations of at most p − r microbatches.
    PipeDream-Flush: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.1.
    """
    require_chunks(chunks, 1)
    forwards = [*map(Forward, range(microbatches))]
    backwards = [*map(Backward, range(microbatches))]
    orders = [alternate(forwards, backwards, ranks - 1 - rank) for rank in range(ranks)]
    return Schedule(Placement.loop(ranks), microbatches, orders)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B of v chunks: the bubble is as long as a chunk, 1/v of 1F1B's.

    Microbatches go in groups of p. A rank runs a group's forwards chunk by chunk, and its backwards
    likewise, from the last chunk to the first. It keeps the activations of at most p + (p−1)/v
    microbatches. If p does not divide m, this is the order of the next multiple with the rest left
    out: groups that are really smaller could have ranks wait for one another forever.
    Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.2.
    """
    forwards, backwards = list[Compute](), list[Compute]()
    for start in range(0, microbatches, ranks):
        group = range(start, start + ranks)
        forwards += [Forward(i, chunk) for chunk in range(chunks) for i in group]
        backwards += [Backward(i, chunk) for chunk in reversed(range(chunks)) for i in group]
    orders = []
    for rank in range(ranks):
        # What a rank computes before the first gradient is there: all but the last chunk, and two
        # for each hop to the last rank, since forward and backward each take it once.
        warmup = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
        order = alternate(forwards, backwards, warmup)
        orders.append([compute for compute in order if compute.microbatch < microbatches])
    return Schedule(Placement.loop(ranks, chunks), microbatches, orders)


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """All forwards and nothing else, for evaluation.

    If all stages take equally long, a rank always runs the last one that it can. Where stages go
    round and round, these are groups of p microbatches, chunk by chunk, as in ``interleaved``.
    """
    orders: list[list[Compute]] = [[] for _ in placement.stages]
    arrived = [microbatches] + [0] * (placement.num_stages - 1)
    done = [0] * placement.num_stages
    while done[-1] < microbatches:
        running = []
        for stages, order in zip(placement.stages, orders, strict=True):
            ready = [stage for stage in stages if done[stage] < arrived[stage]]
            if ready:
                running.append(max(ready))
                order.append(Forward(done[max(ready)], stages.index(max(ready))))
        for stage in running:
            done[stage] += 1
            if stage + 1 < placement.num_stages:
                arrived[stage + 1] += 1
    return Schedule(placement, microbatches, orders)


def alternate(
    forwards: Sequence[Compute], backwards: Sequence[Compute], warmup: int
) -> list[Compute]:
    """``warmup`` of ``forwards``, then one of each in turn, then what is left of ``backwards``."""
    order = [*forwards[:warmup]]
    pairs = [*zip(forwards[warmup:], backwards, strict=False)]
    for pair in pairs:
        order += pair
    return [*order, *backwards[len(pairs) :]]


def require_chunks(chunks: int, right: int) -> None:
    if chunks != right:
        raise ValueError(f"must have {counted(right, 'stage')} on each rank, not {chunks}")
