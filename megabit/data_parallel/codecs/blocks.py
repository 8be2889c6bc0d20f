"""int8 and int4: a block of a row shares a scale, its largest magnitude.

    x [n, rows, columns] → blocks of ``block`` elements of a row, the last one shorter
      → scale = max|x| of the block, fp32; code = round(x / scale · limit), to nearest even
    decoded: code / limit · scale, with limit 127 or 7

The largest element of a block comes back exactly, and so do all where blocks have one element; the
others are off by half a unit at most, scale / (2 · limit). A block that has an infinity or a NaN
comes back without a finite element: ranks must see that, and skip the step.

A tensor's message is ``[scales, fp32 | codes | zeros up to a multiple of 4 bytes]``, row by row.
Two int4 codes share a byte, the first in its low half; no byte holds two rows.

Block scales are those of ZeRO++ (arXiv 2306.10209).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.data_parallel.codecs.message import FLOAT_BYTES, aligned, floats_of

LOW_HALF = 15


@dataclass(frozen=True)
class BlockCodec:
    """Integers of ``bits`` bits and a scale for each block of a row."""

    block: int
    """Elements that share a scale."""
    bits: Literal[8, 4]
    needs_maximum = False

    @property
    def limit(self) -> int:
        """The largest code; the smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    def tensor_bytes(self, rows: int, columns: int) -> int:
        """4 for each block, and ``bits`` / 8 for each element: of a row a whole number."""
        return self._scale_bytes(rows, columns) + aligned(rows * self._row_bytes(columns))

    def encode(self, x: Tensor, maximum: Tensor | None, generator: torch.Generator) -> Tensor:
        """See ``wire.Codec``. Deterministic: draws nothing from ``generator``."""
        n, rows, columns = x.shape
        blocks = self._blocks(x)
        scales = blocks.abs().amax(-1, keepdim=True)
        # In a block of zeros, or one that is not finite, all codes are 0: x/∞, or a NaN replaced.
        divisors = scales.where(scales > 0, math.inf)
        codes = (blocks / divisors).mul_(self.limit).round_().nan_to_num_(0)
        codes = codes.flatten(2)[..., :columns]

        message = x.new_zeros((n, self.tensor_bytes(rows, columns)), dtype=torch.uint8)
        floats_of(message, scales[0].numel()).copy_(scales.flatten(1))
        held = self._codes(message, rows, columns)
        held.copy_(codes if self.bits == 8 else _pair(codes.to(torch.int8)))
        return message

    def decode(self, message: Tensor, rows: int, columns: int) -> Tensor:
        """See ``wire.Codec``."""
        blocks = self._blocks_of(columns)
        scales = floats_of(message, rows * blocks).unflatten(1, (rows, blocks, 1))
        codes = self._codes(message, rows, columns)
        if self.bits == 4:
            codes = _unpair(codes)[..., :columns]
        # Divided first: of the largest code that is 1, and the scale comes back as it is.
        return (self._blocks(codes.float()) / self.limit).mul_(scales).flatten(2)[..., :columns]

    def _codes(self, message: Tensor, rows: int, columns: int) -> Tensor:
        """Where a message has them: a view, int8 ``[n, rows, bytes of a row]``."""
        start, width = self._scale_bytes(rows, columns), self._row_bytes(columns)
        held = message[:, start : start + rows * width]
        return held.view(torch.int8).unflatten(1, (rows, width))

    def _width(self, columns: int) -> int:
        return min(self.block, columns)

    def _blocks_of(self, columns: int) -> int:
        return -(-columns // self._width(columns))

    def _scale_bytes(self, rows: int, columns: int) -> int:
        return FLOAT_BYTES * rows * self._blocks_of(columns)

    def _row_bytes(self, columns: int) -> int:
        return -(-columns * self.bits // 8)

    def _blocks(self, x: Tensor) -> Tensor:
        """``[n, rows, columns]`` → ``[n, rows, blocks, width]``, filled up with zeros."""
        blocks, width = self._blocks_of(x.shape[-1]), self._width(x.shape[-1])
        missing = blocks * width - x.shape[-1]
        return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (blocks, width))


def _pair(codes: Tensor) -> Tensor:
    """int8 ``[…, k]`` in −8..7 → int8 ``[…, ceil(k/2)]``, two to a byte."""
    codes = F.pad(codes, (0, 1)) if codes.shape[-1] % 2 else codes
    first, second = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return first & LOW_HALF | second << 4


def _unpair(pairs: Tensor) -> Tensor:
    """The inverse of ``_pair``: ``[…, b]`` → ``[…, 2b]``; shifts of int8 keep the sign."""
    return torch.stack([pairs << 4 >> 4, pairs >> 4], dim=-1).flatten(-2)
