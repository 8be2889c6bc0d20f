"""A Hadamard transform of activations before they are quantized (BitNet v2, arXiv 2504.18415).

It spreads what is in few columns over all of a block, so that one outlier does not cost the rest of
the token its resolution. Blocks are as wide as the fixed blocks that TP cuts a dimension into
allow, so that no degree tears one: a rank transforms its own columns and sends nothing.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.tensor_parallel import BlockPartition
from megabit_kernels import numerics


def transform_width(partition: BlockPartition) -> int:
    """The largest power of two that divides the width of every block of ``partition``."""
    edges = map(partition.edge, range(1, partition.num_blocks + 1))
    common = math.gcd(*edges)
    return common & -common


def hadamard(x: Tensor, width: int) -> Tensor:
    """``x [T, k]`` → ``x·H/√width`` for each run of ``width`` columns, in the dtype of ``x``.

    H is Sylvester's: symmetric, entries ±1, ``H·H = width·1``. ``width`` is a power of two that
    divides k.
    """
    return _Hadamard.apply(x, width)


class _Hadamard(Function):
    """H/√width is its own inverse and its own transpose, so backward is the same transform."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        ctx.width = width
        return _transformed(x, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _transformed(grads[0], ctx.width), None


def _transformed(x: Tensor, width: int) -> Tensor:
    """By butterflies (a, b) → (a + b, a − b): single IEEE operations, whose bits do not depend on
    how many columns there are beside them. Rounded to the dtype of ``x`` once, at the end."""
    y = x.to(numerics.stats_dtype(x.dtype))
    half = 1
    while half < width:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return (y * (1 / math.sqrt(width))).to(x.dtype)
