"""Schedules for tests: all of ours at many sizes, and random ones that are valid."""

import random

from hypothesis import strategies as st

from megabit.pipeline.actions import (
    Backward,
    Compute,
    Forward,
    InputGradient,
    Schedule,
    WeightGradient,
    needed_by,
    produced_by,
)
from megabit.pipeline.catalog import GENERATORS
from megabit.pipeline.placement import Placement

CHUNKS = {
    "gpipe": [1],
    "1f1b": [1],
    "interleaved": [1, 2, 3, 4],
    "zb-h1": [1],
    "zb-v": [2],
    "v-half": [2],
    "v-min": [2],
}
"""How many stages a rank may have in each schedule."""


def sizes(max_ranks: int = 16, max_microbatches: int = 64) -> st.SearchStrategy:
    """Name, ranks, microbatches and chunks of a schedule."""
    return st.sampled_from(sorted(CHUNKS)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.integers(1, max_ranks),
            st.integers(1, max_microbatches),
            st.sampled_from(CHUNKS[name]),
        )
    )


def generate(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The order of computes only."""
    return GENERATORS[name](ranks, microbatches, chunks)


def of_chunk(schedule: Schedule, rank: int, chunk: int, *kinds: type[Compute]) -> list[int]:
    """The microbatches of a chunk's computes of some kinds, in order."""
    return [
        compute.microbatch
        for compute in schedule.computes(rank)
        if compute.chunk == chunk and isinstance(compute, kinds)
    ]


def random_placement(ranks: int, chunks: int, rng: random.Random) -> Placement:
    """Any stages on any rank, except that both ends of the model are where they must be."""
    last = ranks * chunks - 1
    held = [[] for _ in range(ranks)]
    held[0].append(0)
    if last > 0:
        # Rank 0 has no room for both ends if it has one chunk.
        held[rng.choice([0, ranks - 1]) if chunks > 1 else ranks - 1].append(last)
    for stage in rng.sample(range(1, last), max(last - 1, 0)):
        rng.choice([stages for stages in held if len(stages) < chunks]).append(stage)
    return Placement(tuple(tuple(sorted(stages)) for stages in held))


def random_schedule(
    placement: Placement, microbatches: int, is_fused: bool, rng: random.Random
) -> Schedule:
    """Ranks run whatever they can in any order, except that microbatches come in order."""
    stages = range(placement.num_stages)
    kinds = [Forward, Backward] if is_fused else [Forward, InputGradient, WeightGradient]
    done = {(stage, kind): 0 for stage in stages for kind in kinds}
    arrived = set()
    orders: list[list[Compute]] = [[] for _ in placement.stages]

    def ready() -> list[tuple[int, Compute]]:
        found = []
        for (stage, kind), i in done.items():
            if i == microbatches:
                continue
            rank = placement.rank_of(stage)
            compute = kind(i, placement.chunk_of(stage))
            before = kinds[kinds.index(kind) - 1]
            if kind is not Forward and done[stage, before] <= i:
                continue
            needed = needed_by(compute, rank, placement)
            if needed is None or (rank, needed.kind, i, needed.chunk) in arrived:
                found.append((rank, compute))
        return found

    while choices := ready():
        rank, compute = rng.choice(choices)
        orders[rank].append(compute)
        done[placement.stage(rank, compute.chunk), type(compute)] += 1
        made = produced_by(compute, rank, placement)
        if made is not None:
            arrived.add((made.peer, made.kind, made.microbatch, made.chunk))
    return Schedule(placement, microbatches, orders)
