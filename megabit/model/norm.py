"""RMSNorm whose dimension may be split over tensor-parallel ranks (SubLN).

The sum of squares and the absmax of a token are taken for each fixed block of columns, exchanged in
one gather and combined in block order (``reduce``), so the result does not depend on TP. The
computation is ``numerics.rms_norm``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megabit.apex import fused_rms_norm
from megabit.mesh import Axis
from megabit.reduce import gather_blocks, sum_blocks
from megabit.tensor_parallel import LayerContext, Shard, ShardedParameter, Span, reduce_blocks
from megabit_kernels import numerics


class Normalized(NamedTuple):
    """A norm's output and what the quantizer behind it needs."""

    values: Tensor
    """``[T, h]`` in the input's dtype"""
    absmax: Tensor
    """``[T, 1]``: max|values| of each token over the whole logical dimension, at least fp32"""


class RMSNorm(nn.Module):
    """``x [T, h]`` → ``Normalized``, with a learned gain.

    Args:
        columns: the part of the normalized dimension that this rank has; the whole of it for the
            norms between layers, heads or feed-forward columns for SubLN. A split one sends two
            numbers per block and token over TP forward, one backward.
    """

    def __init__(self, columns: Span, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.eps = eps
        is_split = columns.width < columns.size
        # A norm that is not split runs on own tokens under sequence parallelism.
        partial = context.sequence_parallel and columns.is_replicated
        self.axis = context.tp if is_split else Axis.single("tp")
        # Only for a norm that no TP degree splits: apex rounds otherwise, and TP may change no bit.
        never_split = columns.num_blocks == 1
        self.apex_norm = fused_rms_norm() if never_split and context.device.type == "cuda" else None
        self.weight = ShardedParameter(
            Shard((columns.size,), 0, columns, partial), context.master_dtype, context.device
        )

    def forward(self, x: Tensor) -> Normalized:
        if self.apex_norm is not None:
            values = self.apex_norm(x, self.weight, (x.shape[-1],), self.eps).to(x.dtype)
            absmax = values.detach().abs().amax(-1, keepdim=True)
            return Normalized(values, absmax.to(numerics.stats_dtype(x.dtype)))
        values, absmax = _RMSNorm.apply(x, self.weight, self.eps, self.weight.shard.span, self.axis)
        return Normalized(values, absmax)


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, eps: float, columns: Span, axis: Axis
    ) -> tuple[Tensor, Tensor]:
        dtype = numerics.stats_dtype(x.dtype)
        wide = x.to(dtype)
        widths = columns.block_widths
        scaled = wide * gain.to(dtype)
        squares = reduce_blocks(wide.square(), widths, lambda block: block.sum(-1))
        largest = reduce_blocks(scaled.abs(), widths, lambda block: block.amax(-1))
        squares, largest = gather_blocks(torch.stack([squares, largest]), axis)
        rstd = torch.rsqrt(squares.sum(-1, keepdim=True) / columns.size + eps)
        ctx.save_for_backward(x, gain, rstd)
        ctx.columns, ctx.axis = columns, axis
        absmax = largest.amax(-1, keepdim=True) * rstd
        ctx.mark_non_differentiable(absmax)
        return scaled.mul_(rstd).to(x.dtype), absmax

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, rstd = ctx.saved_tensors
        columns: Span = ctx.columns
        normalized = x.to(rstd.dtype) * rstd
        grad = grads[0].to(rstd.dtype)
        d_gain = (grad * normalized).sum(0).to(gain.dtype)
        d_normalized = grad * gain.to(rstd.dtype)
        blocks = reduce_blocks(
            d_normalized * normalized, columns.block_widths, lambda block: block.sum(-1)
        )
        projection = sum_blocks(blocks, ctx.axis).unsqueeze(-1) / columns.size
        dx = d_normalized.sub_(normalized.mul_(projection)).mul_(rstd)
        return dx.to(x.dtype), d_gain, None, None, None
