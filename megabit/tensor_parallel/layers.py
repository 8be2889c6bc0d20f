"""Linear layers split over tensor-parallel ranks, by output features or by input features.

A *column*-parallel layer takes what every rank has (under sequence parallelism: its own tokens) and
gives each rank some of the output features; a *row*-parallel layer takes those and gives every rank
the sum. Names follow Megatron, where the weight matrix is thought of as transposed.

Shapes: ``T`` tokens of a microbatch, ``t`` tokens this rank holds outside the layers (T, or T/tp
under sequence parallelism), ``K``/``N`` logical in/out features, ``k``/``n`` this rank's part of
them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megabit.tensor_parallel.context import LayerContext
from megabit.tensor_parallel.forward_pass import PLAIN, ForwardPass
from megabit.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megabit.tensor_parallel.parameter import Shard, ShardedParameter
from megabit.tensor_parallel.partition import Span
from megabit.tensor_parallel.weight_gradients import WeightGradientQueue, weight_gradient

Values = Callable[[torch.dtype], Tensor]
"""Gives the values ``[n, k]`` of a weight in a dtype, the same each time."""


class ColumnParallelLinear(nn.Module):
    """``y = x Wᵀ`` with this rank's rows of ``W [N, K]``: ``x [t, K]`` → ``y [T, n]``."""

    def __init__(self, in_features: int, rows: Span, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        shard = Shard((rows.size, in_features), 0, rows)
        self.weight = ShardedParameter(shard, context.master_dtype, context.device)

    def extra_repr(self) -> str:
        return f"{self.weight.shard.shape}, rows {self.weight.shard.span}"

    def forward(
        self, x: Tensor, absmax: Tensor | None = None, forward_pass: ForwardPass = PLAIN
    ) -> Tensor:
        """``absmax`` is for ternary layers (``ColumnParallelBitLinear``)."""
        (y,) = self.forward_together([self], x, absmax, forward_pass)
        return y

    @staticmethod
    def forward_together(
        layers: Sequence["ColumnParallelLinear"],
        x: Tensor,
        absmax: Tensor | None = None,
        forward_pass: ForwardPass = PLAIN,
    ) -> tuple[Tensor, ...]:
        """The outputs of several layers with the same input, at the communication of one.

        Forward all-gathers ``x`` under sequence parallelism and sends nothing otherwise; backward
        sums dX over TP once.
        """
        x = enter_column_parallel(x, layers[0].context)
        return tuple(layer.dense_product(x, forward_pass) for layer in layers)

    def dense_product(
        self, x: Tensor, forward_pass: ForwardPass = PLAIN, values: Values | None = None
    ) -> Tensor:
        """``x [T, K]``, on every rank → ``[T, n]``.

        Args:
            values: what stands for the weight; see ``_DenseProduct``.
        """
        span, terms = self.weight.shard.span, slice(None)
        if span.is_shared:
            # The gradient of rows that several ranks hold is whole on each of them, and dX is
            # summed over ranks: it gets the terms of a row from the one that owns it.
            terms = slice(span.owned_start - span.start, span.owned_stop - span.start)
        queue = forward_pass.weight_gradients
        return _DenseProduct.apply(x, self.weight.ready(), values, terms, queue)


class RowParallelLinear(nn.Module):
    """``y = Σ_ranks x Wᵀ`` with this rank's columns of ``W [N, K]``: ``[T, k]`` → ``[t, N]``."""

    def __init__(self, columns: Span, out_features: int, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        shard = Shard((out_features, columns.size), 1, columns)
        self.weight = ShardedParameter(shard, context.master_dtype, context.device)

    def extra_repr(self) -> str:
        return f"{self.weight.shard.shape}, columns {self.weight.shard.span}"

    def forward(
        self, x: Tensor, absmax: Tensor | None = None, forward_pass: ForwardPass = PLAIN
    ) -> Tensor:
        """Forward sums ``y`` over TP (a reduce-scatter under sequence parallelism); ``absmax`` is
        for ternary layers."""
        return self.dense_product(x, forward_pass)

    def dense_product(
        self, x: Tensor, forward_pass: ForwardPass = PLAIN, values: Values | None = None
    ) -> Tensor:
        """``x [T, k]`` → ``[t, N]``, summed over TP in floating point.

        Args:
            values: what stands for the weight; see ``_DenseProduct``.
        """
        queue = forward_pass.weight_gradients
        y = _DenseProduct.apply(x, self.weight.ready(), values, slice(None), queue)
        if self.context.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(y, self.context)
        return reduce_from_tensor_model_parallel_region(y, self.context)


def enter_column_parallel(x: Tensor, context: LayerContext) -> Tensor:
    """``[t, K]`` → ``[T, K]`` on every rank, whose gradient is summed over TP on the way back."""
    if context.sequence_parallel:
        return gather_from_sequence_parallel_region(x, context)
    return copy_to_tensor_model_parallel_region(x, context)


class _DenseProduct(Function):
    """``x Wᵀ`` in the dtype of ``x``, with ``x [T, k]`` and this rank's ``W [n, k]``.

    Args:
        weight: whose gradient dW is, and by default W itself.
        values: W where that is something else, made of the weight; asked for by forward and by
            backward, so that what can be made again is not kept in between.
        terms: the rows of ``W`` that dX is summed over. dW has all rows.
        queue: where the product of dW is put off.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ShardedParameter,
        values: Values | None,
        terms: slice,
        queue: WeightGradientQueue | None,
    ) -> Tensor:
        # Saved so that torch sees a weight that was changed meanwhile.
        ctx.save_for_backward(x, weight if values is None else None)
        ctx.weight, ctx.values, ctx.terms, ctx.queue = weight, values, terms, queue
        return F.linear(x, weight.to(x.dtype) if values is None else values(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x = x.detach()  # holds no graph
        grad = grads[0]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            values = weight.detach() if ctx.values is None else ctx.values(x.dtype)
            dx = torch.mm(grad[:, ctx.terms], values[ctx.terms].to(x.dtype))
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(ctx.weight, lambda: torch.mm(grad.t(), x), ctx.queue)
        return dx, dw, None, None, None
