"""What codecs have lost of gradients, as parts of logical tensors: to be saved and restored.

Each sender of coded messages (a DP rank, or in two levels a host) has lost something of all rows of
its TP shard. What counts is the sum over senders, which the model is still to get; so with another
number of senders each takes what some of those before had lost, and nothing is left behind.

A tied head on another stage than the embedding has gradients, and messages, of its own. Where the
layout that goes on has one place for both, that takes what both had lost.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megabit.data_parallel.buckets import Bucket
from megabit.data_parallel.layout import Slot
from megabit.data_parallel.masters import Piece
from megabit.data_parallel.reduction import Lost
from megabit.data_parallel.zero import ZeroOptimizer
from megabit.mesh import Levels
from megabit.reduce import all_gather

ERROR, HEAD_ERROR = "gradient_error", "head_gradient_error"
"""What a checkpoint calls what sender s has lost, ``gradient_error{s}/name``; and of a tied head
that has messages of its own."""

Read = Callable[[str, tuple[slice, ...]], Tensor | None]
"""Gives rows of a checkpoint's tensor, fp32, by ``kind/name`` and index; None if it has none."""


def lost_names(optimizer: ZeroOptimizer) -> list[tuple[str, str]]:
    """Kind and name of all that ``lost_pieces`` has of this rank's stages, of each sender."""
    called = [
        _called(optimizer, slot) for bucket in _coded(optimizer) for slot in bucket.layout.slots
    ]
    return [(kind, name) for name, kind in called]


def lost_pieces(optimizer: ZeroOptimizer) -> Iterator[Piece]:
    """What this rank saves: over all ranks, every element of every sender's once; zeros where
    nothing is lost, as after a step that this island alone has skipped. Collective over the ranks
    of a host, which share it out."""
    reduction, levels = optimizer.gradients.reduction, optimizer.mesh.dp_levels
    sender, senders = reduction.senders
    for bucket in _coded(optimizer):
        layout, lost = bucket.layout, reduction.lost.get(bucket.number)
        values = torch.zeros((senders, layout.part)) if lost is None else lost.values
        parts, own = values, range(layout.ranks)
        if levels is not None:
            parts, own = _of_host(values.to(optimizer.mesh.device), levels)
        for slot in bucket.layout.slots:
            name, kind = _called(optimizer, slot)
            rows = _rows_of(slot, own, owned=kind == ERROR)
            if rows:
                local = bucket.layout.local(parts, slot)[rows.start : rows.stop]
                yield Piece(name, slot.parameter.shard, rows, {f"{kind}{sender}": local})


def restore_lost(optimizer: ZeroOptimizer, senders: int, read: Read) -> None:
    """Take over what so many senders had lost, from a checkpoint; 0: nothing was."""
    reduction, mesh = optimizer.gradients.reduction, optimizer.mesh
    reduction.forget()
    if not senders:
        return
    own, count = reduction.senders
    for bucket in _coded(optimizer):
        layout = bucket.layout
        parts = torch.zeros((layout.ranks, layout.part), device=mesh.device)
        for slot in layout.slots:
            name, kind = _called(optimizer, slot)
            kinds = [kind, HEAD_ERROR] if _is_both_uses(optimizer, slot) else [kind]
            index = Piece(name, slot.parameter.shard, range(slot.rows), {}).index
            for sender in range(own, senders, count):
                for each in kinds:
                    local = read(f"{each}{sender}/{name}", index)
                    if local is not None:
                        layout.add(parts, slot, local.to(mesh.device))
        if mesh.dp_levels is not None:
            intra = mesh.dp_levels.intra
            parts = parts.unflatten(0, (-1, intra.size))[:, intra.rank].clone()
        reduction.lost[bucket.number] = Lost(layout, parts)


def _coded(optimizer: ZeroOptimizer) -> Sequence[Bucket]:
    """Buckets of which something is kept that was lost."""
    if not optimizer.gradients.reduction.with_feedback or optimizer.mesh.dp.size == 1:
        return []
    return [bucket for bucket in optimizer.gradients.buckets if bucket.is_coded]


def _of_host(values: Tensor, levels: Levels) -> tuple[Tensor, range]:
    """What a host has lost, ``[inter, part]`` of each of its ranks → ``[ranks, part]``; and the
    parts of it that this rank saves."""
    intra, inter = levels.intra, levels.inter
    of_ranks = all_gather(values.unsqueeze(0), intra, "control")  # [intra, inter, part]
    first = intra.rank * inter.size
    return of_ranks.transpose(0, 1).flatten(0, 1), range(first, first + inter.size)


def _rows_of(slot: Slot, parts: range, owned: bool) -> range:
    """Local rows in ``parts``, which are neighbours.

    Args:
        owned: only those that this rank counts of what TP ranks share.
    """
    rows = [slot.owned_rows_of(part) if owned else slot.rows_of(part) for part in parts]
    rows = [each for each in rows if each]
    return range(rows[0].start, rows[-1].stop) if rows else range(0)


def _called(optimizer: ZeroOptimizer, slot: Slot) -> tuple[str, str]:
    """Name of a slot's logical tensor, and kind of what is lost of it."""
    if optimizer.tied is None:
        return slot.name, ERROR
    embedding, second_use = optimizer.tied
    if slot.parameter is second_use:
        name = next(
            other.name
            for bucket in optimizer.gradients.buckets
            for other in bucket.layout.slots
            if other.parameter is embedding
        )
        return name, HEAD_ERROR
    mesh = optimizer.mesh
    is_copy = slot.parameter is embedding and mesh.embedding.size > 1 and mesh.embedding.rank == 1
    return slot.name, HEAD_ERROR if is_copy else ERROR


def _is_both_uses(optimizer: ZeroOptimizer, slot: Slot) -> bool:
    """Whether a slot gets the gradients of embedding and tied head together."""
    if optimizer.tied is None or slot.parameter is not optimizer.tied[0]:
        return False
    return optimizer.tied[1] is None and optimizer.mesh.embedding.size == 1
