"""The mean of islands' weights, and what is sent for it.

``PlainMean`` adds the masters themselves, as a tree (``reduce.start_tree_all_reduce``): where 2, 4,
8, … islands have the same weights, the mean is these, bit by bit.

``CodedMean`` sends how far weights have come from the anchor, in two shots. Of W islands, the j-th
adds the logical rows j, j + W, j + 2W, … of every tensor:

    change + error → encode → all-to-all → decode, add in fp32, divide by W → encode → all-gather
    → decode: the mean change, from the same bytes, and so in the same bits, on all islands

*Error feedback*: what encoding has lost of a change is added to the next one. What the second shot
has lost, the island that has encoded it knows, and adds W times as much to its own next change. So
the mean changes that were applied add up to those that were meant, but for the last round's errors.
Which island adds a row, and what is lost of it, depends on its logical number and on the columns
that a rank holds, so ranks of a TP group that hold the same row go on agreeing.

A rank sends ``2(W−1)/W`` · 4 bytes for each of its weights in a meeting; coded as bf16, 2 instead
of 4, and as int8, 1 and 4 for each block (``communication.block``). ``nbytes`` is exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.data_parallel.codecs.message import aligned
from megabit.data_parallel.wire import Codec
from megabit.mesh import Axis
from megabit.outer.tensors import AnchoredTensor, OuterTensor
from megabit.reduce import (
    Chain,
    Pending,
    start_all_gather,
    start_all_to_all,
    start_tree_all_reduce,
    tree_sum,
)

Finish = Callable[[], list[Tensor]]
"""Waits for a mean, and gives it: ``[rows, k]`` of each tensor."""


class Mean(Protocol):
    """How islands find the mean of their weights."""

    def start(self, tensors: Sequence[AnchoredTensor]) -> Finish:
        """Begin the mean of tensors that travel in one message; collective over islands."""
        ...

    def nbytes(self, tensors: Sequence[OuterTensor]) -> int:
        """What a rank sends for it."""
        ...


@dataclass(frozen=True)
class PlainMean:
    """Of fp32 weights, over ``axis``."""

    axis: Axis

    def start(self, tensors: Sequence[AnchoredTensor]) -> Finish:
        """See ``Mean``."""
        return start_mean([tensor.weights for tensor in tensors], self.axis)

    def nbytes(self, tensors: Sequence[OuterTensor]) -> int:
        """See ``Mean``."""
        weights = [tensor.weights for tensor in tensors]
        part = -(-sum(w.numel() for w in weights) // self.axis.size)
        return 2 * (self.axis.size - 1) * part * weights[0].element_size()


def start_mean(weights: Sequence[Tensor], axis: Axis) -> Finish:
    """Begin the mean of each of ``weights [rows, k]`` over ``axis``, in one message."""
    total = start_tree_all_reduce(torch.cat([w.flatten() for w in weights]), axis, "outer")

    def finish() -> list[Tensor]:
        means = total.wait().div_(axis.size).split([w.numel() for w in weights])
        return [mean.view_as(w) for mean, w in zip(means, weights, strict=True)]

    return finish


@dataclass(frozen=True)
class CodedMean:
    """Of what ``codec`` leaves of changes, over ``axis``; gains are sent as fp32."""

    axis: Axis
    codec: Codec
    """Deterministic."""

    def start(self, tensors: Sequence[AnchoredTensor]) -> Finish:
        """See ``Mean``."""
        exchange = _Exchange(tensors, [self._codec_of(t) for t in tensors], self.axis)
        gathered = Chain.of(exchange.send_changes(), exchange.send_means)
        return lambda: exchange.means(gathered.wait())

    def nbytes(self, tensors: Sequence[OuterTensor]) -> int:
        """See ``Mean``."""
        islands = self.axis.size
        shot = sum(
            self._codec_of(t).tensor_bytes(-(-len(t.rows) // islands), t.weights.shape[1])
            for t in tensors
        )
        return 2 * (islands - 1) * shot

    def _codec_of(self, tensor: OuterTensor) -> Codec:
        """A row of a gain is one number, and there are few."""
        return CastCodec(torch.float32) if tensor.is_gain else self.codec


@dataclass(frozen=True)
class CastCodec:
    """Numbers of another type, in the order of rows."""

    dtype: torch.dtype
    needs_maximum = False

    def tensor_bytes(self, rows: int, columns: int) -> int:
        """See ``wire.Codec``."""
        return aligned(rows * columns * self.dtype.itemsize)

    def encode(self, x: Tensor, maximum: Tensor | None, generator: torch.Generator) -> Tensor:
        """See ``wire.Codec``. Rounds to nearest."""
        numbers = x.to(self.dtype).flatten(1).contiguous().view(torch.uint8)
        return F.pad(numbers, (0, self.tensor_bytes(*x.shape[1:]) - numbers.shape[1]))

    def decode(self, message: Tensor, rows: int, columns: int) -> Tensor:
        """See ``wire.Codec``."""
        numbers = message[:, : rows * columns * self.dtype.itemsize].contiguous()
        return numbers.view(self.dtype).float().view(-1, rows, columns)


@dataclass(frozen=True)
class RowSplit:
    """The rows of a tensor that each of W islands adds: logical row i is that of island i mod W."""

    first_row: int
    """Where in the logical tensor the rows begin."""
    rows: int
    islands: int

    @property
    def most(self) -> int:
        """At most so many for an island."""
        return -(-self.rows // self.islands)

    def of(self, island: int) -> slice:
        """The rows of ``island``."""
        return slice((island - self.first_row) % self.islands, None, self.islands)

    def split(self, x: Tensor) -> Tensor:
        """``[rows, k]`` → ``[islands, most, k]``, filled up with zeros."""
        parts = x.new_zeros((self.islands, self.most, x.shape[1]))
        for island, part in enumerate(parts):
            rows = x[self.of(island)]
            part[: len(rows)] = rows
        return parts

    def join(self, parts: Tensor) -> Tensor:
        """The inverse of ``split``."""
        x = parts.new_empty((self.rows, parts.shape[-1]))
        for island, part in enumerate(parts):
            rows = x[self.of(island)]
            rows.copy_(part[: len(rows)])
        return x


class _Exchange:
    """The changes of some tensors on their way, in one message a shot."""

    def __init__(
        self, tensors: Sequence[AnchoredTensor], codecs: Sequence[Codec], axis: Axis
    ) -> None:
        self.tensors, self.codecs, self.axis = tensors, codecs, axis
        self.splits = [RowSplit(t.first_row, len(t.rows), axis.size) for t in tensors]
        self.generator = torch.Generator(tensors[0].anchor.device)

    def send_changes(self) -> Pending:
        """Each island gets its rows of everyone's change."""
        changes, errors = [], []
        for tensor, split in zip(self.tensors, self.splits, strict=True):
            assert tensor.error is not None
            errors.append(tensor.error)
            changes.append(split.split(tensor.anchor - tensor.weights + tensor.error))
        message = self._encode(changes)
        arrived = zip(errors, self.splits, changes, self._decode(message), strict=True)
        for error, split, meant, sent in arrived:
            error.copy_(split.join(meant - sent))
        return start_all_to_all(message, self.axis, "outer")

    def send_means(self, received: Tensor) -> Pending:
        """Each island adds its rows, and everyone gets what it has."""
        means = [tree_sum(x).div_(self.axis.size).unsqueeze(0) for x in self._decode(received)]
        message = self._encode(means)
        for tensor, split, meant, sent in zip(
            self.tensors, self.splits, means, self._decode(message), strict=True
        ):
            assert tensor.error is not None
            own = tensor.error[split.of(self.axis.rank)]
            own.add_((meant - sent)[0, : len(own)], alpha=self.axis.size)
        return start_all_gather(message, self.axis, "outer")

    def means(self, gathered: Tensor) -> list[Tensor]:
        """``[rows, k]`` of each tensor's mean weights."""
        changes = zip(self.tensors, self.splits, self._decode(gathered), strict=True)
        return [tensor.anchor - split.join(change) for tensor, split, change in changes]

    def _encode(self, parts: Sequence[Tensor]) -> Tensor:
        """``[n, most, k]`` of each tensor → uint8 ``[n, bytes]``."""
        pairs = zip(self.codecs, parts, strict=True)
        return torch.cat([codec.encode(x, None, self.generator) for codec, x in pairs], dim=1)

    def _decode(self, message: Tensor) -> list[Tensor]:
        """The inverse, but for what is lost."""
        shapes = [
            (split.most, tensor.anchor.shape[1])
            for tensor, split in zip(self.tensors, self.splits, strict=True)
        ]
        sizes = [c.tensor_bytes(*shape) for c, shape in zip(self.codecs, shapes, strict=True)]
        pieces = zip(self.codecs, message.split(sizes, dim=1), shapes, strict=True)
        return [codec.decode(piece, *shape) for codec, piece, shape in pieces]
