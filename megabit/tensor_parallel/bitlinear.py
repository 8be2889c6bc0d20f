"""Ternary (BitNet b1.58) linear layers, alone or split over tensor-parallel ranks.

Data's way forward: activations are quantized per token → int8 and one scale per token are gathered
(column, under sequence parallelism) → integer product → integers are summed over TP (row) → one
rounding to the output dtype. Every statistic belongs to the logical tensor and integer sums are
exact, so the TP degree does not change a bit. Backward is straight-through (``ternary_backward``);
dX of a column layer is summed over TP while dW is computed, or put off (``weight_gradients``).

With full-precision activations, or while a λ ramp fades quantization in, there are no integers to
add. Then a layer computes x̃ · W̃ᵀ as a dense one does, in the compute dtype, forward and backward
(dX = dY · W̃, dW = dYᵀ · x̃, straight-through; ``precision.ternary_backward`` does not apply), with x̃
= x + λ(x_q·s − x) or x itself, and W̃ = W + λ(γ·code − W). A row layer then adds floats over TP: TP
degrees agree to their rounding, as those of dense layers do, and not bit by bit.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megabit.mesh import Axis
from megabit.reduce import all_gather
from megabit.tensor_parallel.context import LayerContext
from megabit.tensor_parallel.forward_pass import PLAIN, ForwardPass
from megabit.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    enter_column_parallel,
)
from megabit.tensor_parallel.parameter import ShardedParameter
from megabit.tensor_parallel.partition import whole
from megabit.tensor_parallel.row_sums import sum_products
from megabit.tensor_parallel.ternary_backward import Parts, TernaryBackward
from megabit.tensor_parallel.ternary_layer import TernaryLayer
from megabit.tensor_parallel.weight_gradients import (
    WeightGradientQueue,
    weight_gradient,
    weight_gradients,
)
from megabit.tensor_parallel.weight_scale import WeightScale
from megabit_kernels import TernaryWeight, ternary_linear, ternary_matmul


class ColumnParallelBitLinear(TernaryLayer, ColumnParallelLinear):
    """A ternary ``ColumnParallelLinear``."""

    @staticmethod
    def forward_together(
        layers: Sequence[ColumnParallelLinear],
        x: Tensor,
        absmax: Tensor | None = None,
        forward_pass: ForwardPass = PLAIN,
    ) -> tuple[Tensor, ...]:
        """``x [t, K]`` → ``y [T, n]`` for each layer; ``x`` is quantized (and gathered) once.

        Args:
            absmax: ``[t, 1]``, max|x| of each token where the caller knows it (a norm does).
        """
        together = [_as_ternary(layer) for layer in layers]
        first, context = together[0], layers[0].context
        if any(layer.quantizer != first.quantizer for layer in together):
            raise ValueError("layers with one input quantize it in different ways")
        undivided = Axis.single("tp")  # each rank has all columns of a token
        if not first.adds_integers(forward_pass):
            x = first.blended(x, absmax, undivided, forward_pass)
            x = enter_column_parallel(x, context)
            share = forward_pass.quantization.share
            return tuple(y.dense_product(x, forward_pass, y.values(share)) for y in together)
        x_q, scale = first.quantized(x, absmax, undivided, forward_pass)
        if context.sequence_parallel:
            # Half the bytes of bf16, and the same bits. Both stay for the weight gradient.
            x_q = all_gather(x_q, context.tp, "activations")
            scale = all_gather(scale, context.tp, "activations")
        ternary = [layer.ternary() for layer in together]
        if not torch.is_grad_enabled():
            return tuple(ternary_linear(x_q, scale, weight, x.dtype) for weight in ternary)
        rows = [Parts.of(layer.weight.shard.span, context) for layer in layers]
        backward = TernaryBackward(context, ternary, rows, _seed(first, forward_pass))
        weights = [layer.weight for layer in together]
        queue = forward_pass.weight_gradients
        return _ColumnParallelTernary.apply(x, x_q, scale, backward, queue, *weights)


class RowParallelBitLinear(TernaryLayer, RowParallelLinear):
    """A ternary ``RowParallelLinear``."""

    def forward(
        self, x: Tensor, absmax: Tensor | None = None, forward_pass: ForwardPass = PLAIN
    ) -> Tensor:
        """``x [T, k]`` → ``y [t, N]``.

        Args:
            absmax: ``[T, 1]``, max|x| of each token over **all** K columns, where the caller knows
                it (the norm before the layer does); else it is reduced over TP here.
        """
        tp = self.context.tp
        if not self.adds_integers(forward_pass):
            x = self.blended(x, absmax, tp, forward_pass)
            values = self.values(forward_pass.quantization.share)
            return self.dense_product(x, forward_pass, values)
        ternary = self.ternary()
        x_q, scale = self.quantized(x, absmax, tp, forward_pass)
        if not torch.is_grad_enabled():
            return _row_product(x_q, scale, ternary, x.dtype, self.context, forward_pass)
        columns = Parts.of(self.weight.shard.span, self.context)
        backward = TernaryBackward(self.context, [ternary], [columns], _seed(self, forward_pass))
        return _RowParallelTernary.apply(x, x_q, scale, forward_pass, backward, self.weight)


class BitLinear(ColumnParallelBitLinear):
    """A ternary linear layer of one process, for use in any model with any torch optimizer.

    ``x […, in_features]`` → ``[…, out_features]``. No bias, as in BitNet. While its weight requires
    a gradient, every forward pass derives the codes anew: fused optimizers change a weight without
    counting a version. A frozen layer keeps them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype = torch.float32,
        weight_scale: WeightScale = WeightScale(),  # noqa: B008  (it is frozen)
    ) -> None:
        context = replace(LayerContext.single(dtype), weight_scale=weight_scale)
        super().__init__(in_features, whole(out_features, owned=True), context)
        nn.init.normal_(self.weight, std=0.02)

    def forward(
        self, x: Tensor, absmax: Tensor | None = None, forward_pass: ForwardPass = PLAIN
    ) -> Tensor:
        """``x […, in_features]`` → ``[…, out_features]``, in ``dtype``.

        Args:
            absmax: ``[…, 1]``, max|x| of each token, where the caller knows it already.
            forward_pass: what microbatches of a trainer carry along; nothing in other programs.
        """
        flat_absmax = None if absmax is None else absmax.reshape(-1, 1)
        y = super().forward(x.reshape(-1, x.shape[-1]), flat_absmax, forward_pass)
        return y.view(*x.shape[:-1], y.shape[-1])

    def ternary(self) -> TernaryWeight:
        """Codes and scale of the weight as it is now."""
        if self.weight.requires_grad:
            self._ternary_source = None
        return super().ternary()


def _row_product(
    x_q: Tensor,
    scale: Tensor,
    ternary: TernaryWeight,
    dtype: torch.dtype,
    context: LayerContext,
    forward_pass: ForwardPass,
) -> Tensor:
    """int8 ``[T, k]`` → ``[t, N]``, summed over TP."""

    def product() -> Tensor:
        if context.tp.size == 1:
            return ternary_linear(x_q, scale, ternary, dtype)
        acc = ternary_matmul(x_q, ternary)
        return sum_products(acc, scale, ternary.scale, dtype, context)

    return forward_pass.product(product)


def _as_ternary(layer: nn.Module) -> ColumnParallelBitLinear:
    if not isinstance(layer, ColumnParallelBitLinear):
        raise TypeError(f"{type(layer).__name__} among ternary layers")
    return layer


def _seed(layer: TernaryLayer, forward_pass: ForwardPass) -> int:
    """Only a backward pass that rounds stochastically needs one."""
    is_int8 = layer.context.ternary_backward_dtype == torch.int8
    return forward_pass.seed_of(layer.name) if is_int8 else 0


class _ColumnParallelTernary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_q: Tensor,
        scale: Tensor,
        backward: TernaryBackward,
        queue: WeightGradientQueue | None,
        *weights: ShardedParameter,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_q, scale)
        ctx.products, ctx.weights, ctx.queue, ctx.dtype = backward, weights, queue, x.dtype
        return tuple(ternary_linear(x_q, scale, w, x.dtype) for w in backward.ternary)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        products: TernaryBackward = ctx.products
        x_q, scale = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            term = products.input_gradient_of_columns(grads)
            if products.context.tree_blocks is None:
                term = term.to(ctx.dtype)  # what travels; a tree adds terms before any rounding
            dx = products.context.start_sum_of_tokens(term)
        wanted = ctx.needs_input_grad[5:]
        dws: list[Tensor | None] = [None] * len(grads)
        if any(wanted):
            # dY of a frozen weight is not kept for later.
            used = [g if wanted[i] else g.new_empty(0) for i, g in enumerate(grads)]
            compute = partial(products.weight_gradients_of_columns, used, x_q, scale, wanted)
            dws = weight_gradients(ctx.weights, compute, ctx.queue)
        return None if dx is None else dx.wait().to(ctx.dtype), None, None, None, None, *dws


class _RowParallelTernary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_q: Tensor,
        scale: Tensor,
        forward_pass: ForwardPass,
        backward: TernaryBackward,
        weight: ShardedParameter,
    ) -> Tensor:
        ctx.save_for_backward(x_q, scale)
        ctx.products, ctx.weight, ctx.dtype = backward, weight, x.dtype
        ctx.queue = forward_pass.weight_gradients
        (ternary,) = backward.ternary
        return _row_product(x_q, scale, ternary, x.dtype, backward.context, forward_pass)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        products: TernaryBackward = ctx.products
        x_q, scale = ctx.saved_tensors
        tp, grad = products.context.tp, grads[0]
        if products.context.sequence_parallel:
            grad = all_gather(grad, tp, "activation gradients")
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = products.input_gradient_of_rows(grad).to(ctx.dtype)
        if ctx.needs_input_grad[5]:
            compute = partial(products.weight_gradient_of_rows, grad, x_q, scale)
            dw = weight_gradient(ctx.weight, compute, ctx.queue)
        return dx, None, None, None, None, dw
