"""What a gradient looks like on its way over DP: a codec makes bytes of rows, and rows of bytes.

A codec sees one tensor's rows of one bucket part at a time, never more than a row at once in what
it decides: ranks of a TP group that hold the same row (shared KV heads) then lose the same of it.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megabit.data_parallel.layout import BucketLayout, Slot


class Codec(Protocol):
    """A lossy format of gradients."""

    needs_maximum: bool
    """Whether ``encode`` wants the largest magnitude that any rank's tensor has (TernGrad)."""

    def tensor_bytes(self, rows: int, columns: int) -> int:
        """Bytes of so many rows; a multiple of 4, so that each tensor's message is aligned."""
        ...

    def encode(self, x: Tensor, maximum: Tensor | None, generator: torch.Generator) -> Tensor:
        """``x [n, rows, columns]`` in fp32 → uint8 ``[n, tensor_bytes(rows, columns)]``.

        Args:
            maximum: scalar, at least max|x| of every rank; None unless ``needs_maximum``.
            generator: for stochastic rounding, on ``x``'s device; another state for each tensor,
                step and rank.
        """
        ...

    def decode(self, message: Tensor, rows: int, columns: int) -> Tensor:
        """What ``encode`` made → fp32 ``[n, rows, columns]``."""
        ...


def maxima(parts: Tensor, layout: BucketLayout) -> Tensor:
    """max|x| of each tensor in ``parts [n, part]``: ``[slots]``; infinite where one is NaN, which a
    maximum over ranks may lose (gloo's does)."""
    found = torch.stack([_rows(parts, slot).abs().amax() for slot in layout.slots])
    return found.nan_to_num(nan=math.inf, posinf=math.inf)


def encode_parts(
    codec: Codec,
    parts: Tensor,
    layout: BucketLayout,
    maximum: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """``parts [n, part]`` → uint8 ``[n, bytes of a part]``.

    Args:
        maximum: ``[slots]``, agreed by ranks; None unless the codec needs it.
    """
    messages = [
        codec.encode(_rows(parts, slot), None if maximum is None else maximum[i], generator)
        for i, slot in enumerate(layout.slots)
    ]
    return torch.cat(messages, dim=1)


def decode_parts(codec: Codec, message: Tensor, layout: BucketLayout) -> Tensor:
    """uint8 ``[n, bytes of a part]`` → fp32 ``[n, part]``; zeros between tensors."""
    parts = torch.zeros((len(message), layout.part), device=message.device)
    for slot, piece in _pieces(codec, message, layout):
        _rows(parts, slot).copy_(codec.decode(piece, slot.rows_per_rank, slot.columns))
    return parts


def _pieces(codec: Codec, message: Tensor, layout: BucketLayout) -> Iterator[tuple[Slot, Tensor]]:
    sizes = [codec.tensor_bytes(slot.rows_per_rank, slot.columns) for slot in layout.slots]
    return zip(layout.slots, message.split(sizes, dim=1), strict=True)


def _rows(parts: Tensor, slot: Slot) -> Tensor:
    """The view ``[n, rows, columns]`` of a tensor in ``parts [n, part]``."""
    held = parts[:, slot.offset : slot.offset + slot.size]
    return held.unflatten(1, (slot.rows_per_rank, slot.columns))
