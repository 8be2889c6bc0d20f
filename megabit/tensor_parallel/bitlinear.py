"""Ternary (BitNet b1.58) linear layers, alone or split over tensor-parallel ranks.

Data's way forward: activations are quantized per token → int8 and one scale per token are gathered
(column, under sequence parallelism) → integer product → integers are summed over TP (row) → one
rounding to the output dtype. Every statistic belongs to the logical tensor and integer sums are
exact, so the TP degree does not change a bit. Backward is straight-through (``numerics``): both
products take dequantized operands, and only dX of a column layer is summed over TP in floating
point.

A layer keeps its latent weight as a parameter and, beside it, the codes and scale derived from it.
They are derived again when the parameter has changed: by the trainer for all layers at once
(``ternarize_layers``), else by ``forward`` on first use. No microbatch of a trainer quantizes a
weight again.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megabit.mesh import Axis
from megabit.reduce import all_gather, all_reduce, own_rows, reduce_scatter
from megabit.tensor_parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear
from megabit.tensor_parallel.parameter import ShardedParameter
from megabit.tensor_parallel.partition import Span, reduce_blocks, whole
from megabit_kernels import (
    TernaryWeight,
    input_gradient,
    numerics,
    quantize_activation,
    ternary_linear,
    ternary_matmul,
    weight_gradients,
)


class TernaryLayer(nn.Module):
    """The part that column and row layers share: the cached codes of ``self.weight``."""

    context: LayerContext
    weight: ShardedParameter
    _ternary: TernaryWeight | None = None
    _ternary_source: tuple[int, int] | None = None

    def ternary(self) -> TernaryWeight:
        """Codes and scale of the weight as it is now. Collective over TP after a change."""
        if self._ternary is None or self._ternary_source != _version(self.weight):
            ternarize_layers([self], self.context.tp)
        assert self._ternary is not None
        return self._ternary


class ColumnParallelBitLinear(TernaryLayer, ColumnParallelLinear):
    """A ternary ``ColumnParallelLinear``."""

    @staticmethod
    def forward_together(
        layers: Sequence[ColumnParallelLinear], x: Tensor, absmax: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """``x [t, K]`` → ``y [T, n]`` for each layer; ``x`` is quantized (and gathered) once.

        Args:
            absmax: ``[t, 1]``, max|x| of each token where the caller knows it (a norm does).
        """
        if absmax is None:
            absmax = numerics.absmax(x.detach())
        return _ColumnParallelTernary.apply(
            x,
            absmax,
            layers[0].context,
            [_as_ternary(layer).ternary() for layer in layers],
            *(layer.weight for layer in layers),
        )


class RowParallelBitLinear(TernaryLayer, RowParallelLinear):
    """A ternary ``RowParallelLinear``."""

    def forward(self, x: Tensor, absmax: Tensor | None = None) -> Tensor:
        """``x [T, k]`` → ``y [t, N]``.

        Args:
            absmax: ``[T, 1]``, max|x| of each token over **all** K columns, where the caller knows
                it (the norm before the layer does); else it is reduced over TP here.
        """
        if absmax is None:
            absmax = all_reduce(numerics.absmax(x.detach()), self.context.tp, "max")
        return _RowParallelTernary.apply(x, absmax, self.context, self.ternary(), self.weight)


class BitLinear(ColumnParallelBitLinear):
    """A ternary linear layer of one process, for use in any model with any torch optimizer.

    ``x […, in_features]`` → ``[…, out_features]``. No bias, as in BitNet. While its weight requires
    a gradient, every forward pass derives the codes anew: fused optimizers change a weight without
    counting a version. A frozen layer keeps them.
    """

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(in_features, whole(out_features, owned=True), LayerContext.single(dtype))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, absmax: Tensor | None = None) -> Tensor:
        y = super().forward(
            x.reshape(-1, x.shape[-1]), None if absmax is None else absmax.reshape(-1, 1)
        )
        return y.view(*x.shape[:-1], y.shape[-1])

    def ternary(self) -> TernaryWeight:
        if self.weight.requires_grad:
            self._ternary_source = None
        return super().ternary()


@torch.no_grad()
def ternarize_layers(layers: Sequence[TernaryLayer], tp: Axis) -> None:
    """Derive codes and scales of ``layers`` from their weights, with one exchange over TP.

    Σ|W| is taken in fp64 for each block of the split dimension and added in block order, so γ has
    the same bits at every TP. Each block is counted by the one rank that owns it.
    """
    if not layers:
        return
    shards = [layer.weight.shard for layer in layers]
    num_blocks = max(shard.span.num_blocks for shard in shards)
    table = torch.zeros(
        len(layers), num_blocks, dtype=torch.float64, device=layers[0].weight.device
    )
    for row, (layer, shard) in enumerate(zip(layers, shards, strict=True)):
        sums = _block_sums(layer.weight, shard.dim, shard.span)
        table[row, shard.span.first_block : shard.span.first_block + len(sums)] = sums
    all_reduce(table, tp)  # adds zeros to each block's one value: exact in any order
    total = torch.zeros_like(table[:, 0])
    # One after the other: the zeros that pad a tensor of fewer blocks then change nothing.
    for block in range(num_blocks):
        total += table[:, block]
    for layer, shard, sum_abs in zip(layers, shards, total, strict=True):
        scale = numerics.weight_scale(sum_abs, shard.numel, layer.weight.dtype)
        layer._ternary = TernaryWeight.from_latent(layer.weight.detach(), scale)
        layer._ternary_source = _version(layer.weight)


def ternary_layers(module: nn.Module) -> Iterator[TernaryLayer]:
    """The ternary layers in ``module``, in the order of its definition."""
    return (layer for layer in module.modules() if isinstance(layer, TernaryLayer))


def _as_ternary(layer: nn.Module) -> TernaryLayer:
    if not isinstance(layer, TernaryLayer):
        raise TypeError(f"{type(layer).__name__} among ternary layers")
    return layer


def _version(weight: Tensor) -> tuple[int, int]:
    """Changes when the values do: in-place writes count versions, ``.to()`` moves the storage."""
    return weight._version, weight.data_ptr()


def _block_sums(weight: Tensor, dim: int, span: Span) -> Tensor:
    """Σ|W| of each block of ``dim``, fp64 ``[blocks]``; zero where another rank owns the block."""
    magnitude = weight.abs()
    if dim == 0:
        rows = magnitude.sum(1, dtype=torch.float64)  # [n]
        sums = reduce_blocks(rows, span.block_widths, lambda block: block.sum(-1))
    else:
        by_row = reduce_blocks(
            magnitude, span.block_widths, lambda block: block.sum(-1, dtype=torch.float64)
        )
        sums = by_row.t().contiguous().sum(-1)
    starts = accumulate(span.block_widths[:-1], initial=span.start)
    owned = [span.owned_start <= start < span.owned_stop for start in starts]
    return sums * torch.tensor(owned, device=sums.device)


class _ColumnParallelTernary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        absmax: Tensor,
        context: LayerContext,
        ternary: list[TernaryWeight],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        x_q, scale = quantize_activation(x, absmax)
        if context.sequence_parallel:
            x_q, scale = all_gather(x_q, context.tp), all_gather(scale, context.tp)
        ctx.save_for_backward(x_q, scale)
        ctx.context, ctx.ternary, ctx.dtype = context, ternary, x.dtype
        return tuple(ternary_linear(x_q, scale, w, x.dtype) for w in ternary)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        context: LayerContext = ctx.context
        x_q, scale = ctx.saved_tensors
        dtype = context.ternary_backward_dtype
        dx = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(grads[0], ctx.ternary[0], dtype)
            for grad, w in zip(grads[1:], ctx.ternary[1:], strict=True):
                dx += input_gradient(grad, w, dtype)
            reduce = reduce_scatter if context.sequence_parallel else all_reduce
            dx = reduce(dx, context.tp).to(ctx.dtype)
        wanted = ctx.needs_input_grad[4:]
        dws = iter(weight_gradients([*compress(grads, wanted)], x_q, scale, dtype))
        dw = [next(dws).to(context.master_dtype) if needed else None for needed in wanted]
        return dx, None, None, None, *dw


class _RowParallelTernary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        absmax: Tensor,
        context: LayerContext,
        ternary: TernaryWeight,
        weight: Tensor,
    ) -> Tensor:
        x_q, scale = quantize_activation(x, absmax)
        ctx.save_for_backward(x_q, scale)
        ctx.context, ctx.ternary, ctx.dtype = context, ternary, x.dtype
        if context.tp.size == 1:
            return ternary_linear(x_q, scale, ternary, x.dtype)
        acc = ternary_matmul(x_q, ternary)
        if context.sequence_parallel:
            acc, scale = reduce_scatter(acc, context.tp), own_rows(scale, context.tp)
        else:
            acc = all_reduce(acc, context.tp)
        return numerics.dequantize_product(acc, scale, ternary.scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        context: LayerContext = ctx.context
        x_q, scale = ctx.saved_tensors
        dtype = context.ternary_backward_dtype
        grad = all_gather(grads[0], context.tp) if context.sequence_parallel else grads[0]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(grad, ctx.ternary, dtype).to(ctx.dtype)
        if ctx.needs_input_grad[4]:
            (dw,) = weight_gradients([grad], x_q, scale, dtype)
            dw = dw.to(context.master_dtype)
        return dx, None, None, None, dw
