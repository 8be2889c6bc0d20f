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
from megabit.config import ModelConfig
from megabit.interop.huggingface import arithmetic
from megabit.mesh import Axis
from megabit.reduce import all_reduce, gather_blocks, sum_blocks, tree_sum
from megabit.tensor_parallel import (
    PLAIN,
    ForwardPass,
    LayerContext,
    Shard,
    ShardedParameter,
    Span,
    reduce_blocks,
    whole,
)
from megabit_kernels import numerics


class Normalized(NamedTuple):
    """A norm's output and what the quantizer behind it needs."""

    values: Tensor
    """``[T, h]`` in the input's dtype"""
    absmax: Tensor
    """``[T, 1]``: max|values| of each token over the whole logical dimension, at least fp32"""


class RMSNorm(nn.Module):
    """``x [T, h]`` → ``Normalized``.

    Args:
        columns: the part of the normalized dimension that this rank has; the whole of it for the
            norms between layers, heads or feed-forward columns for SubLN. A split one sends two
            numbers per block and token over TP forward, one backward.
        has_gain: whether the result is multiplied by a learned gain.
    """

    weight: ShardedParameter | None

    def __init__(
        self, columns: Span, eps: float, context: LayerContext, has_gain: bool = True
    ) -> None:
        super().__init__()
        self.columns = columns
        self.eps = eps
        self.context = context
        is_split = columns.width < columns.size
        # A norm that is not split runs on own tokens under sequence parallelism.
        on_own_tokens = context.sequence_parallel and columns.is_replicated
        self.axis = context.tp if is_split else Axis.single("tp")
        self.gain_axis = context.tp if on_own_tokens else Axis.single("tp")
        # Only for a norm that no TP degree splits: apex rounds otherwise, and TP may change no bit.
        may_use_apex = has_gain and columns.num_blocks == 1 and context.tree_blocks is None
        self.apex_norm = (
            fused_rms_norm() if may_use_apex and context.device.type == "cuda" else None
        )
        self.weight = None
        if has_gain:
            partial = on_own_tokens and context.tree_blocks is None
            shard = Shard((columns.size,), 0, columns, partial)
            self.weight = ShardedParameter(shard, context.master_dtype, context.device)

    def forward(self, x: Tensor, forward_pass: ForwardPass = PLAIN) -> Normalized:
        gain = None if self.weight is None else self.weight.ready()
        if self.apex_norm is not None and gain is not None:
            values = self.apex_norm(x, gain, (x.shape[-1],), self.eps).to(x.dtype)
            absmax = values.detach().abs().amax(-1, keepdim=True)
            return Normalized(values, absmax.to(numerics.stats_dtype(x.dtype)))
        if not torch.is_grad_enabled():
            values, absmax, _ = _normalized(x, gain, self, forward_pass)
        else:
            values, absmax = _RMSNorm.apply(x, gain, self, forward_pass)
        return Normalized(values, absmax)

    def sum_over_tokens(self, x: Tensor) -> Tensor:
        """``[t, h]`` → ``[h]``, this rank's part of it or, in layout-exact training, all of it.

        There the sum is a tree over fixed blocks of the microbatch's tokens. It sends ``h`` numbers
        for a norm that runs on own tokens.
        """
        trees = self.context.tree_blocks
        if trees is None:
            return x.sum(0)
        own = trees // self.gain_axis.size
        blocks = x.unflatten(0, (own, -1)).transpose(0, 1)  # [t/own, own, h]
        total = tree_sum(tree_sum(blocks))
        if self.gain_axis.size == 1:
            return total
        return self.context.start_sum(total, "weight gradients").wait()


class HuggingFaceRMSNorm(RMSNorm):
    """``transformers``' RMSNorm, which rounds before it multiplies by the gain. For inference.

    Of a split one every rank gets all columns, so it has the same bits at every TP.
    """

    def forward(self, x: Tensor, forward_pass: ForwardPass = PLAIN) -> Normalized:
        """``absmax`` is empty: their layers take it of their input."""
        assert self.weight is not None
        columns = self.columns
        y = arithmetic.normalized(whole_columns(x, columns, self.axis), self.eps)
        values = self.weight.ready().to(x.dtype) * y[:, columns.start : columns.stop]
        return Normalized(values, x.new_empty(0))


def whole_columns(x: Tensor, columns: Span, tp: Axis) -> Tensor:
    """All columns ``[T, K]`` of what is split over ``tp``, of which this rank has ``[T, k]``."""
    if tp.size == 1:
        return x
    result = x.new_zeros(x.shape[0], columns.size)
    result[:, columns.start : columns.stop] = x
    return all_reduce(result, tp, purpose="activations")  # all others have zeros


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: ShardedParameter | None,
        norm: RMSNorm,
        forward_pass: ForwardPass,
    ) -> tuple[Tensor, Tensor]:
        values, absmax, rstd = _normalized(x, gain, norm, forward_pass)
        ctx.save_for_backward(x, rstd)
        ctx.gain, ctx.norm = gain, norm
        ctx.mark_non_differentiable(absmax)
        return values, absmax

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd = ctx.saved_tensors
        gain: ShardedParameter | None = ctx.gain
        columns = ctx.norm.columns
        normalized = x.to(rstd.dtype) * rstd
        grad = grads[0].to(rstd.dtype)
        d_gain = None
        if gain is None:
            d_normalized = grad.clone()  # written to below
        else:
            d_gain = gain.give_gradient(ctx.norm.sum_over_tokens(grad * normalized))
            d_normalized = grad * gain.detach().to(rstd.dtype)
        blocks = reduce_blocks(
            d_normalized * normalized, columns.block_widths, lambda block: block.sum(-1)
        )
        projection = sum_blocks(blocks, ctx.norm.axis).unsqueeze(-1) / columns.size
        dx = d_normalized.sub_(normalized.mul_(projection)).mul_(rstd)
        return dx.to(x.dtype), d_gain, None, None


def _normalized(
    x: Tensor, gain: Tensor | None, norm: RMSNorm, forward_pass: ForwardPass
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, their absmax, and 1/rms of each token."""
    dtype = numerics.stats_dtype(x.dtype)
    columns = norm.columns
    wide = x.to(dtype)
    scaled = wide if gain is None else wide * gain.to(dtype)

    def block_squares() -> Tensor:
        """``[T, b]``: Σx² of each of this rank's blocks."""
        return reduce_blocks(wide.square(), columns.block_widths, lambda block: block.sum(-1))

    def statistics() -> Tensor:
        """``[2, T, blocks]`` over all ranks: Σx² and max|x·g|."""
        widths = columns.block_widths
        largest = reduce_blocks(scaled.abs(), widths, lambda block: block.amax(-1))
        return gather_blocks(torch.stack([block_squares(), largest]), norm.axis)

    if norm.axis.size > 1:
        squares, of_blocks = forward_pass.statistics(statistics)
        largest = of_blocks.amax(-1, keepdim=True)
    else:
        squares, largest = block_squares(), scaled.abs().amax(-1, keepdim=True)
    if squares.shape[-1] > 1:
        squares = squares.sum(-1, keepdim=True)
    rstd = (squares / columns.size).add_(norm.eps).rsqrt_()
    absmax = largest * rstd
    values = scaled * rstd if gain is None else scaled.mul_(rstd)  # ``wide`` may be ``x``
    return values.to(x.dtype), absmax, rstd


def hidden_norm(model: ModelConfig, context: LayerContext, has_gain: bool = True) -> RMSNorm:
    """A norm of what goes from layer to layer, ``[t, H]``."""
    columns = whole(model.hidden_size, owned=context.tp.rank == 0)
    return rms_norm(columns, model.rms_norm_eps, context, has_gain)


def rms_norm(columns: Span, eps: float, context: LayerContext, has_gain: bool = True) -> RMSNorm:
    """With the roundings that ``context`` asks for."""
    norm_type = RMSNorm if context.huggingface is None else HuggingFaceRMSNorm
    return norm_type(columns, eps, context, has_gain)
