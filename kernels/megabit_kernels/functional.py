"""The operations for people: what they compute, of what shapes, on any device.

The way of a token through a ternary layer: ``quantize_activation`` (or a norm that quantizes) makes
int8 values and one scale; ``ternary_linear`` multiplies them with the codes in int32 and scales
once. A layer split over ranks by input features takes ``ternary_matmul`` instead, sums the integers
over ranks, and scales then. ``bit_linear`` is the whole layer with its gradients.

An ``implementation`` is a name from ``implementations(operation, device)``; None is the best one.
"""

import torch
from torch import Tensor

from megabit_kernels import numerics, ops
from megabit_kernels.weight import Int8Weight, TernaryWeight


def quantize_activation(
    x: Tensor, absmax: Tensor | None = None, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """``x [M, K]`` → int8 ``[M, K]`` and scale s ``[M, 1]`` in the dtype of statistics.

    Args:
        absmax: ``[M, 1]``, max|x| of each token where the caller knows it: of a token that spans
            ranks, or from the norm before.
    """
    _check("x", x, 2)
    return ops.quantize_activation(x, absmax, implementation)


def rms_norm_quantize(
    x: Tensor, gain: Tensor, eps: float, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """``quantize_activation(rms_norm(x))`` in one pass: ``x [M, K]``, ``gain [K]``."""
    _check("x", x, 2)
    return ops.rms_norm_quantize(x, gain, eps, implementation)


def glu_rms_norm_quantize(
    gate: Tensor,
    up: Tensor,
    gain: Tensor,
    eps: float,
    activation: str,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``rms_norm_quantize(act(gate) · up)``, ``act`` being ``relu2`` or ``silu``; ``[M, K]``."""
    if activation not in ("relu2", "silu"):
        raise ValueError(f"activation {activation!r}: relu2 or silu")
    _check("gate", gate, 2)
    if gate.shape != up.shape:
        raise ValueError(f"up {tuple(up.shape)}: must have the shape of gate {tuple(gate.shape)}")
    return ops.glu_rms_norm_quantize(gate, up, gain, eps, activation, implementation)


def ternary_matmul(x_q: Tensor, weight: TernaryWeight, implementation: str | None = None) -> Tensor:
    """int8 ``[M, K]`` → int32 ``[M, N]``: ``Σ_k x_q[m, k] · code[n, k]``, exact."""
    _check_product(x_q, weight.shape)
    return ops.ternary_matmul(x_q, weight.data, weight.layout, weight.shape[0], implementation)


def ternary_linear(
    x_q: Tensor,
    x_scale: Tensor,
    weight: TernaryWeight,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> Tensor:
    """int8 ``[M, K]`` and s ``[M, 1]`` → ``acc · (s·γ)``, ``[M, N]`` in ``dtype``."""
    _check_product(x_q, weight.shape)
    return ops.ternary_linear(
        x_q,
        x_scale,
        weight.data,
        weight.scale,
        weight.layout,
        weight.shape[0],
        dtype,
        implementation,
    )


def input_gradient(
    grad: Tensor, weight: TernaryWeight, dtype: torch.dtype, implementation: str | None = None
) -> Tensor:
    """dX = (dY · code) · γ: ``[M, N]`` → ``[M, K]``, at least fp32.

    Args:
        dtype: of the operands of the product; it holds the codes exactly.
        implementation: ``triton_int8``, on a GPU, rounds dY to int8: faster, and approximate.
    """
    return ops.input_gradient(
        grad, weight.data, weight.scale, weight.layout, weight.shape[1], dtype
    )


def weight_gradient(grad: Tensor, x_q: Tensor, x_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """dW = (dY · s)ᵀ · x_q: ``[M, N]``, int8 ``[M, K]`` → ``[N, K]`` in ``dtype``.

    The scale of a token lies on the dimension that is summed, so this product cannot be an integer
    one; int8 values are exact in bf16. ``x_q`` may be given in ``dtype`` already, by a caller who
    uses it for several weights.
    """
    return ops.weight_gradient(grad, x_q, x_scale, dtype)


def int8_linear(
    x_q: Tensor,
    x_scale: Tensor,
    weight: Int8Weight,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> Tensor:
    """int8 ``[M, K]`` and s ``[M, 1]`` → ``acc · (s · scale[n])``, ``[M, N]`` in ``dtype``."""
    _check_product(x_q, weight.shape)
    return ops.int8_linear(
        x_q,
        x_scale,
        weight.data,
        weight.scale,
        weight.layout,
        weight.shape[0],
        dtype,
        implementation,
    )


def cross_entropy(logits: Tensor, targets: Tensor, implementation: str | None = None) -> Tensor:
    """``logits [T, V]``, int64 ``targets [T]`` → loss of each token ``[T]``, at least fp32."""
    _check("logits", logits, 2)
    return ops.cross_entropy(logits, targets)[0]


def bit_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A BitLinear layer: ``x […, K]``, latent ``weight [N, K]`` → ``[…, N]``, with gradients.

    Straight-through: dX = dY · (γ·code), dW = dYᵀ · (x_q·s); nothing flows to γ or s. The weight is
    ternarized on each call; a layer that is called more often than it is updated keeps a
    ``TernaryWeight``.
    """
    y, *_ = ops.bit_linear(x.reshape(-1, x.shape[-1]), weight)
    return y.view(*x.shape[:-1], weight.shape[0])


def _check(name: str, x: Tensor, dims: int) -> None:
    if x.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: {dims} dimensions are wanted")


def _check_product(x_q: Tensor, shape: tuple[int, int]) -> None:
    if x_q.dtype != torch.int8:
        raise TypeError(f"x_q is {x_q.dtype}: torch.int8 is wanted")
    if x_q.dim() != 2 or x_q.shape[1] != shape[1]:
        raise ValueError(f"x_q has shape {tuple(x_q.shape)}: [M, {shape[1]}] is wanted")
    if shape[1] > numerics.MAX_EXACT_K:
        raise ValueError(f"K = {shape[1]}: at most {numerics.MAX_EXACT_K} products add up exactly")
