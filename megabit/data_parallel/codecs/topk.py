"""Top-k: of each row the elements of largest magnitude, as they are; the rest as zero.

    x [n, rows, columns] → the k = ceil(ratio · columns) largest |x| of each row, at equal
      magnitude those further left, a NaN before all → values in fp32, and where in the row they are

A tensor's message is ``[values, fp32 | indices | zeros up to a multiple of 4 bytes]``, row by row.
An index takes 2 bytes in rows of up to 65,536 elements, else 4, and none where a row travels whole.

What is not sent must be added to the next gradient, or the same small elements are lost each time:
"Sparsified SGD with Memory", arXiv 1809.07599.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from megabit.data_parallel.codecs.message import FLOAT_BYTES, aligned, floats_of

SHORT_ROW = 1 << 16
"""Columns up to which an index fits into 2 bytes."""
MAGNITUDE = 0x7FFF_FFFF
"""All bits of an fp32 number but its sign. As integers these order as magnitudes do, and those of a
NaN are above those of infinity."""


@dataclass(frozen=True)
class TopKCodec:
    """The largest elements of each row."""

    ratio: float
    """Share of a row, above 0 and at most 1."""
    needs_maximum = False

    def kept(self, columns: int) -> int:
        """Elements of a row that are sent. The ratio counts as written: 0.07 of 100 is 7."""
        return math.ceil(Fraction(str(self.ratio)) * columns)

    def tensor_bytes(self, rows: int, columns: int) -> int:
        """4 for a value, and 2 or 4 for its index."""
        kept = rows * self.kept(columns)
        return FLOAT_BYTES * kept + aligned(kept * self._index_bytes(columns))

    def encode(self, x: Tensor, maximum: Tensor | None, generator: torch.Generator) -> Tensor:
        """See ``wire.Codec``. Deterministic: draws nothing from ``generator``."""
        n, rows, columns = x.shape
        kept = self.kept(columns)
        message = x.new_zeros((n, self.tensor_bytes(rows, columns)), dtype=torch.uint8)
        values = floats_of(message, rows * kept).unflatten(1, (rows, kept))
        if kept == columns:
            values.copy_(x)
            return message
        indices = _largest(x, kept)
        values.copy_(x.gather(-1, indices))
        self._indices(message, rows, columns).copy_(indices)
        return message

    def decode(self, message: Tensor, rows: int, columns: int) -> Tensor:
        """See ``wire.Codec``."""
        kept = self.kept(columns)
        values = floats_of(message, rows * kept).unflatten(1, (rows, kept))
        if kept == columns:
            return values.clone()
        indices = self._indices(message, rows, columns).long()
        if columns <= SHORT_ROW:
            indices &= SHORT_ROW - 1  # torch takes its highest bit for a sign
        return values.new_zeros((len(message), rows, columns)).scatter_(-1, indices, values)

    def _index_bytes(self, columns: int) -> int:
        if self.kept(columns) == columns:
            return 0
        return 2 if columns <= SHORT_ROW else 4

    def _indices(self, message: Tensor, rows: int, columns: int) -> Tensor:
        """Where a message has them: a view ``[n, rows, k]`` of int16 or int32."""
        kept = self.kept(columns)
        size, start = self._index_bytes(columns), FLOAT_BYTES * rows * kept
        held = message[:, start : start + size * rows * kept]
        return held.view(torch.int16 if size == 2 else torch.int32).unflatten(1, (rows, kept))


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` elements of largest magnitude of each row: int64 ``[n, rows, k]``.

    ``topk`` of floats takes any of equal elements. Of these keys no two are equal: magnitude first,
    then how far left.
    """
    columns = x.shape[-1]
    from_right = torch.arange(columns - 1, -1, -1, device=x.device)
    keys = (x.contiguous().view(torch.int32) & MAGNITUDE).long()
    return keys.bitwise_left_shift_(32).bitwise_or_(from_right).topk(count, dim=-1).indices
