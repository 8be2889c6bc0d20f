"""torch.distributed.pipelining's schedules beside ours: what is equal, and what differs and why.

What torch's generators give is read as a ``Schedule``, validated and simulated like ours.
"""

from collections.abc import Callable

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from megabit.pipeline.actions import (
    Action,
    Backward,
    Compute,
    Exchange,
    Forward,
    InputGradient,
    Schedule,
    WeightGradient,
    needed_by,
    produced_by,
)
from megabit.pipeline.placement import Placement
from megabit.pipeline.simulate import Costs, peak_activations, simulate
from megabit.pipeline.validate import ScheduleError, compute_findings, validate
from megabit.pipeline.zero_bubble import fill_bubbles
from tests.pipeline.cases import generate

KINDS: dict[str, type[Compute]] = {
    "F": Forward,
    "I": InputGradient,
    "W": WeightGradient,
    "B": Backward,
}
MESSAGES: dict[str, tuple[Callable, type[Compute]]] = {
    "SEND_F": (produced_by, Forward),
    "SEND_B": (produced_by, Backward),
    "RECV_F": (needed_by, Forward),
    "RECV_B": (needed_by, Backward),
}
RANKS = [2, 3, 4, 8]
SIZES = [(p, m) for p in RANKS for m in sorted({p, 2 * p - 1, 2 * p, 2 * p + 2, 4 * p})]
IN_GROUPS = [(p, m) for p in RANKS for m in (p, 2 * p, 4 * p)]
"""Where p divides m."""


def torch_schedule(
    name: str, ranks: int, microbatches: int, chunks: int = 1, **options: bool
) -> Schedule:
    placement = Placement.v(ranks) if name == "ZBVZeroBubble" else Placement.loop(ranks, chunks)

    def convert(operation: object, rank: int) -> Action | None:
        name = operation.computation_type.value
        if name not in KINDS and name not in MESSAGES:
            return None  # what FSDP does around a step
        chunk, microbatch = placement.chunk_of(operation.stage_index), operation.microbatch_index
        if name in KINDS:
            return KINDS[name](microbatch, chunk)
        find, kind = MESSAGES[name]
        message = find(kind(microbatch, chunk), rank, placement)
        is_send = find is produced_by
        return Exchange((message,) if is_send else (), () if is_send else (message,))

    operations = get_schedule_ops(
        name, ranks, microbatches, None if chunks == 1 else chunks, **options
    )
    converted = [[convert(op, rank) for op in ops if op] for rank, ops in enumerate(operations)]
    orders = [[action for action in actions if action is not None] for actions in converted]
    return Schedule(placement, microbatches, orders)


def bubble(schedule: Schedule) -> float:
    """Beyond what a rank computes, in units of a chunk's F = B = W."""
    chunks = schedule.placement.chunks
    unit = Costs.even(schedule.placement, chunks, chunks, chunks)
    return simulate(schedule, unit).duration - 3 * chunks * schedule.microbatches


def orders(schedule: Schedule) -> list[list[Compute]]:
    return [schedule.computes(rank) for rank in range(schedule.placement.ranks)]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_gpipe_is_the_same(ranks: int, microbatches: int) -> None:
    theirs, ours = (
        torch_schedule("GPipe", ranks, microbatches),
        generate("gpipe", ranks, microbatches),
    )
    assert compute_findings(theirs) == []
    assert orders(theirs) == orders(ours)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_1f1b_is_the_same(ranks: int, microbatches: int) -> None:
    """But for the last rank, whose forwards torch's list (which torch draws, and does not run)
    numbers from 1; the validator sees that."""
    theirs, ours = (
        torch_schedule("1F1B", ranks, microbatches),
        generate("1f1b", ranks, microbatches),
    )
    last = f"rank {ranks - 1}: runs F{microbatches}, but microbatches are 0 to {microbatches - 1}"
    assert compute_findings(theirs) == [last]
    assert orders(theirs)[:-1] == orders(ours)[:-1]
    shifted = [
        Forward(compute.microbatch - 1) if isinstance(compute, Forward) else compute
        for compute in theirs.computes(ranks - 1)
    ]
    assert shifted == ours.computes(ranks - 1)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [*IN_GROUPS, (4, 3), (8, 7), (8, 2)])
def test_interleaved_is_the_same(ranks: int, microbatches: int, chunks: int) -> None:
    """Where p divides m, and where there are fewer microbatches than ranks."""
    theirs = torch_schedule("Interleaved1F1B", ranks, microbatches, chunks)
    ours = generate("interleaved", ranks, microbatches, chunks)
    assert compute_findings(theirs) == []
    if microbatches % ranks == 0:
        assert orders(theirs) == orders(ours)
        assert bubble(theirs) == 3 * (ranks - 1)
    assert bubble(theirs) == bubble(ours)
    assert peak_activations(theirs) == peak_activations(ours)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 7), (4, 10), (8, 15), (8, 18)])
def test_interleaved_in_groups_of_another_size(ranks: int, microbatches: int, chunks: int) -> None:
    """Where p does not divide m, torch cuts m into m // p equal groups (and refuses m = 11 at
    p = 4), so larger ones: a smaller bubble, for more activations. Ours are groups of p, the last
    one smaller, which keeps to the memory of p + (p−1)/v microbatches."""
    theirs = torch_schedule("Interleaved1F1B", ranks, microbatches, chunks)
    ours = generate("interleaved", ranks, microbatches, chunks)
    assert compute_findings(theirs) == []
    assert bubble(theirs) < bubble(ours)
    assert max(peak_activations(theirs)) > max(peak_activations(ours))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_zb_v_is_as_good(ranks: int, microbatches: int) -> None:
    """Same bubble and same activations from m = 2p − 1 on. The sequences differ: torch's warm-up
    runs all forwards that there is room for, ours follow a building block, and W's go into gaps
    instead of right behind B. torch's order is one of 2p − 1 microbatches with the rest left out if
    there are fewer, so ours has less of a bubble then."""
    theirs = torch_schedule("ZBVZeroBubble", ranks, microbatches, 2)
    ours = generate("zb-v", ranks, microbatches, 2)
    assert compute_findings(theirs) == []
    assert bubble(ours) == ranks - 1
    if microbatches >= 2 * ranks - 1:
        assert bubble(theirs) == bubble(ours)
    else:
        assert bubble(theirs) > bubble(ours)
    assert max(peak_activations(theirs)) == max(peak_activations(ours))


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), IN_GROUPS)
def test_interleaved_zero_bubble_has_the_published_bubble(
    ranks: int, microbatches: int, chunks: int
) -> None:
    """ZB-H1 of several chunks, which we don't have: (p−1)(F+B−W) of a chunk, p activations."""
    theirs = torch_schedule("InterleavedZeroBubble", ranks, microbatches, chunks)
    assert compute_findings(theirs) == []
    assert bubble(theirs) == ranks - 1
    assert max(peak_activations(theirs)) == ranks


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("ZBVZeroBubble", 2), ("InterleavedZeroBubble", 2), ("InterleavedZeroBubble", 3)],
)
@pytest.mark.parametrize(("ranks", "microbatches"), IN_GROUPS)
def test_our_weight_gradients_in_their_order(
    name: str, chunks: int, ranks: int, microbatches: int
) -> None:
    """Of torch's F's and B's ``fill_bubbles`` makes no worse a schedule than torch."""
    theirs = torch_schedule(name, ranks, microbatches, chunks)
    most = max(peak_activations(theirs))
    order = [
        [c for c in computes if not isinstance(c, WeightGradient)] for computes in theirs.ranks
    ]
    filled = fill_bubbles(
        Schedule(theirs.placement, microbatches, order), limit=round(most * chunks)
    )
    assert bubble(filled) == ranks - 1 <= bubble(theirs)
    assert max(peak_activations(filled)) <= most


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 4, 2), (3, 6, 3), (8, 16, 2)])
def test_their_messages(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    """torch posts messages one by one. In its usual order the validator finds nothing; with
    ``defer_pp_recv`` ranks that block would hang, or take one message for another."""
    usual = torch_schedule(name, ranks, microbatches, chunks, with_comms=True)
    validate(usual)
    deferred = torch_schedule(
        name, ranks, microbatches, chunks, with_comms=True, defer_pp_recv=True
    )
    with pytest.raises(ScheduleError, match=r"deadlock|where that sends"):
        validate(deferred)
