"""The operations as torch custom ops (namespace ``megabit``), which ``torch.compile`` can trace.

An op takes tensors and plain values only. It looks its implementation up in ``dispatch`` when it
runs; beside it stands a fake, which gives the shapes of its results to a tracer, and a backward
formula where a gradient makes sense. ``functional`` has the same operations for people.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megabit_kernels import conversion, numerics
from megabit_kernels.conversion import Layout, data_dtype, data_shape
from megabit_kernels.dispatch import Operation, best_layout, select
from megabit_kernels.epilogue import Epilogue

F = TypeVar("F", bound=Callable[..., Any])


def _operation(fake: Callable[..., Any]) -> Callable[[F], F]:
    """Registers a function as ``megabit::<its name>`` and gives the op in its place.

    Not ``torch.library.custom_op``: its wrapper takes 7 µs a call against 2 µs, and the product of
    a small layer with one token takes 10.
    """

    def register(function: F) -> F:
        name = f"megabit::{function.__name__}"
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "default", function)
        torch.library.register_fake(name, fake)
        return cast(F, getattr(torch.ops.megabit, function.__name__).default)

    return register


def _fake_product(x_q: Tensor, data: Tensor, layout: str, n: int, *rest: object) -> Tensor:
    return x_q.new_empty(x_q.shape[0], n, dtype=torch.int32)


@_operation(_fake_product)
def ternary_matmul(
    x_q: Tensor, data: Tensor, layout: str, n: int, implementation: str | None = None
) -> Tensor:
    return _product("ternary_matmul", x_q, data, layout, n, None, implementation)


def _product(
    operation: Operation,
    x_q: Tensor,
    data: Tensor,
    layout: str,
    n: int,
    epilogue: Epilogue | None,
    implementation: str | None,
) -> Tensor:
    m, k = x_q.shape
    row = select(operation, x_q.device, m, n, k, layout, implementation)
    if row.layout is not None and row.layout != layout:
        data = conversion.convert(data, layout, row.layout, n, k)
    return row.run(x_q, data, n, epilogue)


def _fake_linear(
    x_q: Tensor, x_scale: Tensor, data: Tensor, w_scale: Tensor, layout: str, n: int, *rest: Any
) -> Tensor:
    return x_q.new_empty(x_q.shape[0], n, dtype=rest[0])


@_operation(_fake_linear)
def ternary_linear(
    x_q: Tensor,
    x_scale: Tensor,
    data: Tensor,
    w_scale: Tensor,
    layout: str,
    n: int,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> Tensor:
    epilogue = Epilogue(x_scale, w_scale, dtype)
    return _product("ternary_matmul", x_q, data, layout, n, epilogue, implementation)


@_operation(_fake_linear)
def int8_linear(
    x_q: Tensor,
    x_scale: Tensor,
    data: Tensor,
    w_scale: Tensor,
    layout: str,
    n: int,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> Tensor:
    epilogue = Epilogue(x_scale, w_scale, dtype)
    return _product("int8_linear", x_q, data, layout, n, epilogue, implementation)


def _fake_quantized(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    x_q = x.new_empty(x.shape, dtype=torch.int8)
    return x_q, x.new_empty(x.shape[0], 1, dtype=numerics.stats_dtype(x.dtype))


@_operation(_fake_quantized)
def quantize_activation(
    x: Tensor, absmax: Tensor | None = None, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    row = select("quantize_activation", x.device, m, 1, k, name=implementation)
    return row.run(x, absmax)


@_operation(_fake_quantized)
def rms_norm_quantize(
    x: Tensor, gain: Tensor, eps: float, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    row = select("rms_norm_quantize", x.device, m, 1, k, name=implementation)
    return row.run(x, gain, eps)


@_operation(_fake_quantized)
def glu_rms_norm_quantize(
    gate: Tensor,
    up: Tensor,
    gain: Tensor,
    eps: float,
    activation: str,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    m, k = gate.shape
    row = select("glu_rms_norm_quantize", gate.device, m, 1, k, name=implementation)
    return row.run(gate, up, gain, eps, activation)


def _fake_laid_out(codes: Tensor, layout: str) -> Tensor:
    n, k = codes.shape
    return codes.new_empty(
        data_shape(cast(Layout, layout), n, k), dtype=data_dtype(cast(Layout, layout))
    )


@_operation(_fake_laid_out)
def lay_out(codes: Tensor, layout: str) -> Tensor:
    return _fresh(conversion.lay_out(codes, cast(Layout, layout)), codes)


@_operation(lambda weight, numel, implementation=None: weight.new_empty(2, dtype=torch.int64))
def abs_sum(weight: Tensor, numel: int, implementation: str | None = None) -> Tensor:
    count = weight.numel()
    return select("abs_sum", weight.device, 1, 1, count, name=implementation).run(weight, numel)


@_operation(lambda x, largest, numel, implementation=None: x.new_empty((), dtype=torch.int64))
def square_sum(x: Tensor, largest: float, numel: int, implementation: str | None = None) -> Tensor:
    row = select("square_sum", x.device, 1, 1, x.numel(), name=implementation)
    return row.run(x, largest, numel)


@_operation(
    lambda weight, implementation=None: weight.new_empty(
        (), dtype=numerics.stats_dtype(weight.dtype)
    )
)
def absmean_scale(weight: Tensor, implementation: str | None = None) -> Tensor:
    n, k = weight.shape
    return select("absmean_scale", weight.device, 1, n, k, name=implementation).run(weight)


@_operation(lambda weight, scale, layout, implementation=None: _fake_laid_out(weight, layout))
def ternarize(
    weight: Tensor, scale: Tensor, layout: str, implementation: str | None = None
) -> Tensor:
    conversion.check_layout(layout)
    n, k = weight.shape
    row = select("ternarize", weight.device, 1, n, k, name=implementation)
    return row.run(weight, scale, layout)


@_operation(lambda data, layout, n, k, dtype: data.new_empty(n, k, dtype=dtype))
def unpack(data: Tensor, layout: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    return _fresh(conversion.unpack(data, cast(Layout, layout), n, k, dtype), data)


def _fresh(result: Tensor, argument: Tensor) -> Tensor:
    """``result``, which may be the argument itself: an op must not return that."""
    return result.clone() if result is argument else result


@_operation(
    lambda grad, data, w_scale, layout, k, dtype, implementation=None: grad.new_empty(
        grad.shape[0], k, dtype=numerics.stats_dtype(grad.dtype)
    )
)
def input_gradient(
    grad: Tensor,
    data: Tensor,
    w_scale: Tensor,
    layout: str,
    k: int,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> Tensor:
    m, n = grad.shape
    row = select("input_gradient", grad.device, m, n, k, name=implementation)
    return row.run(grad, data, layout, k, w_scale, dtype)


@_operation(
    lambda grad, x_q, x_scale, dtype, implementation=None: grad.new_empty(
        grad.shape[1], x_q.shape[1], dtype=dtype
    )
)
def weight_gradient(
    grad: Tensor,
    x_q: Tensor,
    x_scale: Tensor,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> Tensor:
    m, n = grad.shape
    row = select("weight_gradient", grad.device, m, n, x_q.shape[1], name=implementation)
    return row.run(grad, x_q, x_scale, dtype)


def _fake_int8_input_gradient(
    grad: Tensor, data: Tensor, w_scale: Tensor, layout: str, k: int, *rest: object
) -> Tensor:
    return grad.new_empty(grad.shape[0], k, dtype=numerics.stats_dtype(grad.dtype))


@_operation(_fake_int8_input_gradient)
def int8_input_gradient(
    grad: Tensor,
    data: Tensor,
    w_scale: Tensor,
    layout: str,
    k: int,
    seed: int,
    implementation: str | None = None,
) -> Tensor:
    m, n = grad.shape
    row = select("int8_input_gradient", grad.device, m, n, k, name=implementation)
    return row.run(grad, data, layout, k, w_scale, seed)


def _fake_int8_weight_gradients(
    grads: Sequence[Tensor], x_q: Tensor, *rest: object
) -> list[Tensor]:
    k = x_q.shape[1]
    return [g.new_empty(g.shape[1], k, dtype=numerics.stats_dtype(g.dtype)) for g in grads]


@_operation(_fake_int8_weight_gradients)
def int8_weight_gradients(
    grads: Sequence[Tensor],
    x_q: Tensor,
    x_scale: Tensor,
    seed: int,
    implementation: str | None = None,
) -> list[Tensor]:
    m, k = x_q.shape
    n = sum(grad.shape[1] for grad in grads)
    row = select("int8_weight_gradients", x_q.device, m, n, k, name=implementation)
    return row.run(grads, x_q, x_scale, seed)


def _fake_bit_linear(x: Tensor, latent: Tensor) -> tuple[Tensor, ...]:
    (m, k), n = x.shape, latent.shape[0]
    stats = numerics.stats_dtype(x.dtype)
    layout = best_layout(x.device)
    return (
        x.new_empty(m, n),
        x.new_empty(m, k, dtype=torch.int8),
        x.new_empty(m, 1, dtype=stats),
        _fake_laid_out(latent, layout),
        latent.new_empty((), dtype=numerics.stats_dtype(latent.dtype)),
    )


@_operation(_fake_bit_linear)
def bit_linear(x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, and what its backward needs: x_q, s, the codes in the best layout, γ."""
    x_q, x_scale = quantize_activation(x)
    w_scale = absmean_scale(latent)
    layout = best_layout(x.device)
    data = ternarize(latent, w_scale, layout)
    y = ternary_linear(x_q, x_scale, data, w_scale, layout, latent.shape[0], x.dtype)
    return y, x_q, x_scale, data, w_scale


def _save_for_bit_linear(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = [tensor.dtype for tensor in inputs]
    ctx.layout = best_layout(inputs[0].device)


def _bit_linear_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_q, x_scale, data, w_scale = ctx.saved_tensors
    x_dtype, w_dtype = ctx.dtypes
    grad, dx, dw = grads[0], None, None
    if ctx.needs_input_grad[0]:
        k = x_q.shape[1]
        dx = input_gradient(grad, data, w_scale, ctx.layout, k, x_dtype).to(x_dtype)
    if ctx.needs_input_grad[1]:
        dw = weight_gradient(grad, x_q, x_scale, x_dtype).to(w_dtype)
    return dx, dw


torch.library.register_autograd(
    "megabit::bit_linear", _bit_linear_backward, setup_context=_save_for_bit_linear
)


def _fake_cross_entropy(
    logits: Tensor, targets: Tensor, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    dtype = numerics.stats_dtype(logits.dtype)
    tokens = logits.shape[0]
    return logits.new_empty(tokens, dtype=dtype), logits.new_empty(tokens, 2, dtype=dtype)


@_operation(_fake_cross_entropy)
def cross_entropy(
    logits: Tensor, targets: Tensor, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and what its gradient needs."""
    t, v = logits.shape
    row = select("cross_entropy", logits.device, t, v, 1, name=implementation)
    return row.run(logits, targets)


@_operation(
    lambda grad, logits, targets, normalizer, implementation=None: logits.new_empty(logits.shape)
)
def cross_entropy_gradient(
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    implementation: str | None = None,
) -> Tensor:
    t, v = logits.shape
    row = select("cross_entropy_gradient", logits.device, t, v, 1, name=implementation)
    return row.run(grad, logits, targets, normalizer)


def _save_for_cross_entropy(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    logits, targets, ctx.implementation = inputs
    ctx.save_for_backward(logits, targets, output[1])


def _cross_entropy_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
    logits, targets, normalizer = ctx.saved_tensors
    grad = grads[0].contiguous()
    gradient = cross_entropy_gradient(grad, logits, targets, normalizer, ctx.implementation)
    return gradient, None, None


torch.library.register_autograd(
    "megabit::cross_entropy", _cross_entropy_backward, setup_context=_save_for_cross_entropy
)
