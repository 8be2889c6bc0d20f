"""The rows of each tensor that a rank brings to a meeting of islands, and what is done with them.

A rank meets those with the same place in the other islands (``mesh.outer``), which hold the same
rows of the same tensors. It brings the rows that it updates under ZeRO: with ``optim.zero_stage`` 0
all DP ranks of an island have all rows, but each brings its own part only, and the island's ranks
give each other the result (``publish``). So nothing crosses islands twice but rows that ranks of a
TP group share (KV heads, gains), and these get the same bits on all of them, since nothing at a
meeting depends on more than a row and the columns that are held of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from megabit.data_parallel import Piece, ZeroOptimizer
from megabit.data_parallel.masters import Master
from megabit.reduce import start_all_gather
from megabit.tensor_parallel import Shard

AnyTensor = TypeVar("AnyTensor", bound="OuterTensor")


@dataclass
class OuterTensor:
    """This rank's rows of a tensor."""

    name: str
    shard: Shard
    rows: range
    """Of the local tensor."""
    owned: range
    """Those of them that count where ranks of a TP group hold the same."""
    weights: Tensor
    """View ``[rows, k]`` of the master."""
    master: Master
    is_gain: bool
    """Whether it is a vector: a row is then a single number."""

    @property
    def first_row(self) -> int:
        """Where in the logical tensor the rows begin."""
        return self.piece({}).index[0].start

    def piece(self, tensors: Mapping[str, Tensor], owned: bool = False) -> Piece:
        """``tensors [rows, k]`` in the shape of the local tensor's rows, as a checkpoint wants
        them; views.

        Args:
            owned: of those rows only that this rank counts.
        """
        rows = self.owned if owned else self.rows
        held = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        shape = self.shard.local_shape[1:]
        return Piece(
            self.name,
            self.shard,
            rows,
            {kind: values[held].view(-1, *shape) for kind, values in tensors.items()},
        )

    def owned_of(self, values: Tensor) -> Tensor:
        """The rows of ``values [rows, k]`` that this rank counts."""
        return values[self.owned.start - self.rows.start : self.owned.stop - self.rows.start]


@dataclass
class AnchoredTensor(OuterTensor):
    """A tensor with what islands keep of it from one meeting to the next; all ``[rows, k]``."""

    anchor: Tensor
    """What all islands began the round with: the same bits on all of them."""
    momentum: Tensor
    """Of the outer step: the same bits on all islands."""
    error: Tensor | None = None
    """What this island's messages have lost so far, where something is lost."""

    @staticmethod
    def of(held: OuterTensor, is_coded: bool) -> "AnchoredTensor":
        """Of the present weights, before the first round."""
        zeros = torch.zeros_like(held.weights)
        return AnchoredTensor(
            **vars(held),
            anchor=held.weights.clone(),
            momentum=zeros,
            error=zeros.clone() if is_coded else None,
        )

    def begin(self) -> None:
        """Take the present weights as what all islands begin with."""
        self.anchor.copy_(self.weights)
        self.momentum.zero_()
        if self.error is not None:
            self.error.zero_()

    def kept(self, owned: bool) -> Piece:
        """Views of what is kept, for a checkpoint.

        Args:
            owned: of those rows only that this rank counts.
        """
        kept = {"outer_anchor": self.anchor, "outer_momentum": self.momentum}
        if self.error is not None:
            kept["outer_error"] = self.error
        return self.piece(kept, owned)


def outer_tensors(optimizer: ZeroOptimizer) -> list[OuterTensor]:
    """What this rank brings to meetings, in the order of buckets; the same list on all ranks of
    ``mesh.outer``."""
    return [*_outer_tensors(optimizer)]


def _outer_tensors(optimizer: ZeroOptimizer) -> Iterator[OuterTensor]:
    part = optimizer.mesh.dp.rank
    own = range(part, part + 1)
    for master in optimizer.masters:
        layout = master.bucket.layout
        if layout.kind == "second use":  # its weights are those of the first
            continue
        for slot in layout.slots:
            for rows, weights in master.held(slot, master.weights.detach(), parts=own):
                yield OuterTensor(
                    slot.name,
                    slot.parameter.shard,
                    rows,
                    slot.owned_rows_of(part),
                    weights,
                    master,
                    layout.kind in ("gain", "partial gain"),
                )


def by_bucket(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Tensors that travel in one message: those of a bucket, which are neighbours."""
    return [[*group] for _, group in groupby(tensors, key=lambda tensor: tensor.master.name)]


def publish(optimizer: ZeroOptimizer, changed: Sequence[OuterTensor]) -> None:
    """Give everyone in the island the new values of ``changed`` masters; codes and γ are made anew
    of all masters. Collective over the stage.

    Whoever changes masters calls ``optimizer.publisher.settle()`` first.
    """
    dp = optimizer.mesh.dp
    if not optimizer.is_sharded and dp.size > 1:
        masters = [group[0].master.weights.detach() for group in by_bucket(changed)]
        gathers = [start_all_gather(w[dp.rank : dp.rank + 1], dp, "weights") for w in masters]
        for weights, gather in zip(masters, gathers, strict=True):
            weights.copy_(gather.wait())
    optimizer.publish()
