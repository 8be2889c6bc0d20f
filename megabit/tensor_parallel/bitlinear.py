"""Ternary (BitNet b1.58) linear layers, alone or split over tensor-parallel ranks.

Data's way forward: activations are quantized per token → int8 and one scale per token are gathered
(column, under sequence parallelism) → integer product → integers are summed over TP (row) → one
rounding to the output dtype. Every statistic belongs to the logical tensor and integer sums are
exact, so the TP degree does not change a bit. Backward is straight-through (``ternary_backward``);
dX of a column layer is summed over TP while dW is computed, or put off (``weight_gradients``).

In training a layer holds codes and γ only (``receive``): the optimizer has the latent weight, and
the parameter is a shape without storage. A layer used alone keeps its latent weight as a parameter
and, beside it, the codes and scale derived from it. They are derived again when the parameter has
changed: for all layers at once (``ternarize_layers``), else by ``forward`` on first use.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megabit.mesh import Axis
from megabit.reduce import all_gather, all_reduce
from megabit.tensor_parallel.context import LayerContext
from megabit.tensor_parallel.forward_pass import PLAIN, ForwardPass
from megabit.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megabit.tensor_parallel.parameter import ShardedParameter
from megabit.tensor_parallel.partition import whole
from megabit.tensor_parallel.row_sums import sum_products
from megabit.tensor_parallel.ternary_backward import Parts, TernaryBackward
from megabit.tensor_parallel.weight_gradients import (
    WeightGradientQueue,
    weight_gradient,
    weight_gradients,
)
from megabit_kernels import (
    TernaryWeight,
    abs_sum,
    numerics,
    quantize_activation,
    ternary_linear,
    ternary_matmul,
)


class TernaryLayer(nn.Module):
    """The part that column and row layers share: the codes of ``self.weight``."""

    context: LayerContext
    weight: ShardedParameter
    name: str = ""
    """Of the weight in the model; random numbers depend on it."""
    _ternary: TernaryWeight | None = None
    _ternary_source: tuple[int, int] | None = None

    def ternary(self) -> TernaryWeight:
        """Codes and scale of the weight as it is now.

        Waits for codes that are on their way; collective over TP where a latent weight of the
        layer's own has changed.
        """
        self.weight.ready()
        if not self.weight.is_meta and self._ternary_source != _version(self.weight):
            ternarize_layers([self], self.context.tp)
        assert self._ternary is not None
        return self._ternary

    def receive(self, ternary: TernaryWeight) -> None:
        """Compute with ``ternary`` from now on."""
        self._ternary = ternary

    def give_up_latent(self) -> None:
        """Keep the shape of the weight only: from now on codes are received."""
        self.weight = ShardedParameter(self.weight.shard, self.weight.dtype, "meta")
        self._ternary = self._ternary_source = None


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
        if absmax is None:
            absmax = numerics.absmax(x.detach())
        together = [_as_ternary(layer) for layer in layers]
        context = layers[0].context
        rows = [Parts.of(layer.weight.shard.span, context) for layer in layers]
        backward = TernaryBackward(
            context, [layer.ternary() for layer in together], rows, _seed(together[0], forward_pass)
        )
        weights = [layer.weight for layer in together]
        queue = forward_pass.weight_gradients
        return _ColumnParallelTernary.apply(x, absmax, backward, queue, *weights)


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
        if absmax is None:
            absmax = numerics.absmax(x.detach())
            absmax = all_reduce(absmax, self.context.tp, "max", "statistics")
        columns = Parts.of(self.weight.shard.span, self.context)
        backward = TernaryBackward(
            self.context, [self.ternary()], [columns], _seed(self, forward_pass)
        )
        return _RowParallelTernary.apply(x, absmax, forward_pass, backward, self.weight)


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

    def forward(
        self, x: Tensor, absmax: Tensor | None = None, forward_pass: ForwardPass = PLAIN
    ) -> Tensor:
        flat_absmax = None if absmax is None else absmax.reshape(-1, 1)
        y = super().forward(x.reshape(-1, x.shape[-1]), flat_absmax, forward_pass)
        return y.view(*x.shape[:-1], y.shape[-1])

    def ternary(self) -> TernaryWeight:
        if self.weight.requires_grad:
            self._ternary_source = None
        return super().ternary()


@torch.no_grad()
def ternarize_layers(layers: Sequence[TernaryLayer], tp: Axis) -> None:
    """Derive codes and scales of ``layers`` from their latent weights, with one exchange over TP.

    Σ|W| is a sum of integers (``numerics.fixed_point_abs_sum``), of parts that ranks own, so γ has
    the same bits at every TP.
    """
    if not layers:
        return
    shards = [layer.weight.shard for layer in layers]
    sums = [
        abs_sum(shard.owned(layer.weight), shard.numel)
        for layer, shard in zip(layers, shards, strict=True)
    ]
    totals = all_reduce(torch.stack(sums), tp, purpose="scales")
    for layer, shard, total in zip(layers, shards, totals, strict=True):
        scale = numerics.weight_scale(total, shard.numel, layer.weight.dtype)
        layer.receive(TernaryWeight.from_latent(layer.weight.detach(), scale))
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


def _seed(layer: TernaryLayer, forward_pass: ForwardPass) -> int:
    """Only a backward pass that rounds stochastically needs one."""
    is_int8 = layer.context.ternary_backward_dtype == torch.int8
    return forward_pass.seed_of(layer.name) if is_int8 else 0


class _ColumnParallelTernary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        absmax: Tensor,
        backward: TernaryBackward,
        queue: WeightGradientQueue | None,
        *weights: ShardedParameter,
    ) -> tuple[Tensor, ...]:
        context = backward.context
        x_q, scale = quantize_activation(x, absmax)
        if context.sequence_parallel:
            # Half the bytes of bf16, and the same bits. Both stay for the weight gradient.
            x_q = all_gather(x_q, context.tp, "activations")
            scale = all_gather(scale, context.tp, "activations")
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
        wanted = ctx.needs_input_grad[4:]
        dws: list[Tensor | None] = [None] * len(grads)
        if any(wanted):
            # dY of a frozen weight is not kept for later.
            used = [g if wanted[i] else g.new_empty(0) for i, g in enumerate(grads)]
            compute = partial(products.weight_gradients_of_columns, used, x_q, scale, wanted)
            dws = weight_gradients(ctx.weights, compute, ctx.queue)
        return None if dx is None else dx.wait().to(ctx.dtype), None, None, None, *dws


class _RowParallelTernary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        absmax: Tensor,
        forward_pass: ForwardPass,
        backward: TernaryBackward,
        weight: ShardedParameter,
    ) -> Tensor:
        context, (ternary,) = backward.context, backward.ternary
        x_q, scale = quantize_activation(x, absmax)
        ctx.save_for_backward(x_q, scale)
        ctx.products, ctx.weight, ctx.dtype = backward, weight, x.dtype
        ctx.queue = forward_pass.weight_gradients

        def product() -> Tensor:
            if context.tp.size == 1:
                return ternary_linear(x_q, scale, ternary, x.dtype)
            acc = ternary_matmul(x_q, ternary)
            return sum_products(acc, scale, ternary.scale, x.dtype, context)

        return forward_pass.product(product)

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
        if ctx.needs_input_grad[4]:
            compute = partial(products.weight_gradient_of_rows, grad, x_q, scale)
            dw = weight_gradient(ctx.weight, compute, ctx.queue)
        return dx, None, None, None, dw
