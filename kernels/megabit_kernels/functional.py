"""The operations for people: what they compute, of what shapes, on any device.

The way of a token through a ternary layer: ``quantize_activation`` (or a norm that quantizes) makes
int8 values and one scale; ``ternary_linear`` multiplies them with the codes in int32 and scales
once. A layer split over ranks by input features takes ``ternary_matmul`` instead, sums the integers
over ranks, and scales then. ``bit_linear`` is the whole layer.

``bit_linear`` and ``cross_entropy`` have gradients (once); what the others give is cut off from the
graph. An ``implementation`` is a name from ``implementations(operation, device)``; None is the best
one. Operands of another shape, dtype or device than stated raise ValueError or TypeError.
"""

from collections.abc import Sequence

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
    m, _ = _matrix("x", x)
    if absmax is not None:
        _expect("absmax", absmax, (m, 1), like=x)
        absmax = absmax.detach()
    return ops.quantize_activation(x.detach(), absmax, implementation)


def rms_norm_quantize(
    x: Tensor, gain: Tensor, eps: float, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """``quantize_activation(rms_norm(x))`` in one pass: ``x [M, K]``, ``gain [K]``."""
    _, k = _matrix("x", x)
    _expect("gain", gain, (k,), like=x)
    return ops.rms_norm_quantize(x.detach(), gain.detach(), eps, implementation)


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
        raise ValueError(f"activation {activation!r}: relu2 or silu is wanted")
    m, k = _matrix("gate", gate)
    _expect("up", up, (m, k), like=gate)
    _expect("gain", gain, (k,), like=gate)
    operands = gate.detach(), up.detach(), gain.detach()
    return ops.glu_rms_norm_quantize(*operands, eps, activation, implementation)


def ternary_matmul(x_q: Tensor, weight: TernaryWeight, implementation: str | None = None) -> Tensor:
    """int8 ``[M, K]`` → int32 ``[M, N]``: ``Σ_k x_q[m, k] · code[n, k]``, exact."""
    _check_product(x_q, weight)
    return ops.ternary_matmul(x_q, weight.data, weight.layout, weight.shape[0], implementation)


def ternary_linear(
    x_q: Tensor,
    x_scale: Tensor,
    weight: TernaryWeight,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> Tensor:
    """int8 ``[M, K]`` and s ``[M, 1]`` → ``acc · (s·γ)``, ``[M, N]`` in ``dtype``."""
    _check_scaled(x_q, x_scale, weight, dtype)
    data, scale, layout, (n, _) = weight.data, weight.scale, weight.layout, weight.shape
    return ops.ternary_linear(x_q, x_scale, data, scale, layout, n, dtype, implementation)


def int8_linear(
    x_q: Tensor,
    x_scale: Tensor,
    weight: Int8Weight,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> Tensor:
    """int8 ``[M, K]`` and s ``[M, 1]`` → ``acc · (s · scale[n])``, ``[M, N]`` in ``dtype``."""
    _check_scaled(x_q, x_scale, weight, dtype)
    data, scale, layout, (n, _) = weight.data, weight.scale, weight.layout, weight.shape
    return ops.int8_linear(x_q, x_scale, data, scale, layout, n, dtype, implementation)


def input_gradient(
    grad: Tensor, weight: TernaryWeight, dtype: torch.dtype, implementation: str | None = None
) -> Tensor:
    """dX = (dY · code) · γ: ``[M, N]`` → ``[M, K]``, at least fp32.

    Args:
        dtype: of the operands of the product; it holds the codes exactly.
    """
    m, _ = _matrix("grad", grad)
    (n, k), data, layout = weight.shape, weight.data, weight.layout
    _expect("grad", grad, (m, n), like=data)
    return ops.input_gradient(grad, data, weight.scale, layout, k, dtype, implementation)


def weight_gradients(
    grads: Sequence[Tensor],
    x_q: Tensor,
    x_scale: Tensor,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> list[Tensor]:
    """dW = (dY · s)ᵀ · x_q of weights with the same input, operands and result in ``dtype``.

    The scale of a token lies on the dimension that is summed, so it cannot be taken out of the
    product; int8 values are exact in bf16.

    Args:
        grads: dY ``[M, N]`` for each weight.
        x_q: int8 ``[M, K]``.
        x_scale: s, ``[M, 1]``.

    Returns:
        ``[N, K]`` for each weight.
    """
    m, _ = _matrix("x_q", x_q)
    _expect("x_scale", x_scale, (m, 1), like=x_q)
    for grad in grads:
        _expect("grad", grad, (m, grad.shape[-1]), like=x_q)
    if x_q.device.type == "cpu":
        x_q = x_q.to(dtype)  # once for all; on a GPU the kernel does it in registers
    return [ops.weight_gradient(grad, x_q, x_scale, dtype, implementation) for grad in grads]


def int8_input_gradient(
    grad: Tensor, weight: TernaryWeight, seed: int, implementation: str | None = None
) -> Tensor:
    """dX = (dY · code) · γ with dY in int8: ``[M, N]`` → ``[M, K]``, at least fp32.

    Each token of dY has a scale, its largest magnitude / 127, and is rounded to a step of it
    stochastically: the expectation over seeds is the exact dX. To nearest, what is small beside the
    largest of its token would be zero in every step of training.

    Args:
        grad: dY. A token that holds NaN or ±Inf gets a row of NaN.
        seed: of the rounding, 0 to 2^63 − 1: another one for each layer and step.
    """
    m, _ = _matrix("grad", grad)
    (n, k), data, layout = weight.shape, weight.data, weight.layout
    _expect("grad", grad, (m, n), like=data)
    _check_width(n, "N")
    _check_seed(seed)
    scale = weight.scale
    return ops.int8_input_gradient(grad.detach(), data, scale, layout, k, seed, implementation)


def int8_weight_gradients(
    grads: Sequence[Tensor],
    x_q: Tensor,
    x_scale: Tensor,
    seed: int,
    implementation: str | None = None,
) -> list[Tensor]:
    """dW = (dY · s)ᵀ · x_q of weights with the same input, with dY · s in int8; at least fp32.

    The scale of a token lies on the dimension that is summed. So dY · s is what is rounded, with a
    scale for each of its columns, which are rows of dW: stochastically, as in
    ``int8_input_gradient``, and for each dY independently.

    Args:
        grads: dY ``[M, N]`` for each weight. A column in which dY · s holds NaN or ±Inf gives a row
            of NaN.
        x_q: int8 ``[M, K]``, values −127 to 127, as ``quantize_activation`` gives.
        x_scale: s, ``[M, 1]``.
        seed: as for ``int8_input_gradient``, which may have the same.

    Returns:
        ``[N, K]`` for each weight.
    """
    m, _ = _matrix("x_q", x_q)
    if x_q.dtype != torch.int8:
        raise TypeError(f"x_q is {x_q.dtype}: torch.int8 is wanted")
    _expect("x_scale", x_scale, (m, 1), like=x_q)
    for grad in grads:
        _expect("grad", grad, (m, grad.shape[-1]), like=x_q)
    _check_width(m, "M")
    _check_seed(seed)
    detached = [grad.detach() for grad in grads]
    return ops.int8_weight_gradients(detached, x_q, x_scale, seed, implementation)


def abs_sum(weight: Tensor, numel: int, implementation: str | None = None) -> Tensor:
    """Σ|w| of a piece of a weight, of which γ is made: int64 ``[2]``.

    Such sums are added over the pieces, in any order; ``numerics.weight_scale`` gives γ.

    Args:
        weight: of any shape, maybe empty.
        numel: elements of the whole logical tensor.
    """
    _check_piece("weight", weight, numel)
    return ops.abs_sum(weight.detach(), numel, implementation)


def square_sum(x: Tensor, largest: float, numel: int, implementation: str | None = None) -> Tensor:
    """Σx² of a piece of a tensor: int64, 0-dimensional.

    Such sums are added over the pieces, in any order; ``numerics.norm_from_fixed_point`` gives the
    norm.

    Args:
        x: of any shape, maybe empty.
        largest: max|x| over all pieces.
        numel: elements of all pieces.
    """
    _check_piece("x", x, numel)
    return ops.square_sum(x.detach(), largest, numel, implementation)


def cross_entropy(logits: Tensor, targets: Tensor, implementation: str | None = None) -> Tensor:
    """``logits [T, V]``, int64 ``targets [T]`` → loss of each token ``[T]``, at least fp32."""
    t, _ = _matrix("logits", logits)
    _expect("targets", targets, (t,), like=logits)
    return ops.cross_entropy(logits, targets, implementation)[0]


def bit_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A BitLinear layer: ``x […, K]``, latent ``weight [N, K]`` → ``[…, N]``, with gradients.

    Straight-through: dX = dY · (γ·code), dW = dYᵀ · (x_q·s); nothing flows to γ or s. The weight is
    ternarized on each call; a layer that is called more often than it is updated keeps a
    ``TernaryWeight``.
    """
    n, k = _matrix("weight", weight)
    _expect("x", x, (*x.shape[:-1], k), like=weight)
    _check_width(k)
    y, *_ = ops.bit_linear(x.reshape(x.shape[:-1].numel(), k), weight)
    return y.view(*x.shape[:-1], n)


def _matrix(name: str, x: Tensor) -> tuple[int, int]:
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: 2 dimensions are wanted")
    return x.shape[0], x.shape[1]


def _expect(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: {list(shape)} is wanted")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}: {like.device} is wanted")


def _check_piece(name: str, x: Tensor, numel: int) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} is {x.dtype}: floating point is wanted")
    if x.numel() > numel:
        raise ValueError(f"{name} has {x.numel()} elements: a piece of {numel} is wanted")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}: 0 to 2^63 - 1 is wanted")


def _check_width(k: int, name: str = "K") -> None:
    if k > numerics.MAX_EXACT_K:
        raise ValueError(f"{name} = {k}: at most {numerics.MAX_EXACT_K} products add up exactly")


def _check_product(x_q: Tensor, weight: TernaryWeight | Int8Weight) -> None:
    if x_q.dtype != torch.int8:
        raise TypeError(f"x_q is {x_q.dtype}: torch.int8 is wanted")
    k = weight.shape[1]
    if x_q.dim() != 2 or x_q.shape[1] != k:
        raise ValueError(f"x_q has shape {tuple(x_q.shape)}: [M, {k}] is wanted")
    if x_q.device != weight.data.device:
        raise ValueError(f"weight is on {weight.data.device}: {x_q.device} is wanted")
    _check_width(k)


def _check_scaled(
    x_q: Tensor, x_scale: Tensor, weight: TernaryWeight | Int8Weight, dtype: torch.dtype
) -> None:
    _check_product(x_q, weight)
    _expect("x_scale", x_scale, (x_q.shape[0], 1), like=x_q)
    if not (dtype.is_floating_point and x_scale.is_floating_point()):
        raise TypeError(f"dtype is {dtype}, x_scale {x_scale.dtype}: floating point is wanted")
