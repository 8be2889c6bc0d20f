"""The numerics of BitNet b1.58, once, in plain torch: what every layer, kernel and test refers to.

Sources: "The Era of 1-bit LLMs" (arXiv 2402.17764), section 2, and Microsoft's Training Tips. A
*code* is −1, 0 or +1; a weight's *scale* is γ; an activation's *scale* is s, one per token.

- weight: γ = max(mean|W|, 1e-5) over the whole logical tensor; q = clamp(round(W/γ), −1, 1)
- activation: s = max(max|x|, 1e-5)/127 over the whole hidden dimension;
  x_q = clamp(round(x/s), −128, 127)
- product: acc = Σ_k x_q · q in int32, exact; y = acc · (s·γ), rounded once
- backward (straight-through): dX = dY · (γ·q); dW = dYᵀ · (x_q·s); nothing flows to γ or s

``round`` is to nearest, ties to even. Statistics are taken in fp32, or fp64 where the run is fp64.

A token that holds NaN or ±Inf has s = NaN or Inf, codes of which x/s = NaN become 0 (so all are 0),
and a product row of NaN. Other tokens are not touched by it.
"""

import torch
from torch import Tensor

MIN_SCALE = 1e-5
MAX_EXACT_K = 131_072
"""Widest input for which 128 · K ≤ 2^24, the last integer up to which fp32 counts exactly."""


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of ``dtype`` values are taken: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def weight_scale(sum_abs: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """γ of a logical weight.

    Args:
        sum_abs: fp64 scalar, Σ|W| over the logical tensor.
        numel: number of elements of the logical tensor.
        dtype: of the master weight; γ is rounded to it once.
    """
    return _divided(sum_abs, numel).to(dtype).clamp_min(MIN_SCALE)


def ternarize(weight: Tensor, scale: Tensor) -> Tensor:
    """int8 codes of ``weight`` (any shape) under scale γ; the quotient has the dtype of γ."""
    return torch.div(weight.to(scale.dtype), scale).round_().clamp_(-1, 1).to(torch.int8)


def absmax(x: Tensor) -> Tensor:
    """``[T, 1]``: max|x| of each token of ``x [T, K]``, in the dtype of statistics."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1), dtype=stats_dtype(x.dtype))
    return x.abs().amax(-1, keepdim=True).to(stats_dtype(x.dtype))


def activation_scale(absmax: Tensor) -> Tensor:
    """s of each token from its largest magnitude over the whole hidden dimension."""
    return _divided(absmax.clamp_min(MIN_SCALE), 127)


def _divided(x: Tensor, divisor: int) -> Tensor:
    """``x / divisor``, which torch on CUDA would turn into a product with 1 / divisor."""
    return x / x.new_full((), divisor)


def quantize_activation(x: Tensor, scale: Tensor) -> Tensor:
    """int8 ``[T, K]`` of ``x [T, K]`` under one ``scale [T, 1]`` per token."""
    return torch.div(x, scale).round_().clamp_(-128, 127).nan_to_num_(0.0).to(torch.int8)


def dequantize_product(acc: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``acc [T, N]`` int32 → ``acc · (s·γ)`` in ``dtype``, with ``x_scale [T, 1]``."""
    return acc.to(x_scale.dtype).mul_(x_scale * w_scale).to(dtype)


def absmean_scale(weight: Tensor) -> Tensor:
    """γ of an unsharded weight: the reference for the sharded computation."""
    sum_abs = weight.abs().sum(dtype=torch.float64)
    return weight_scale(sum_abs, max(weight.numel(), 1), stats_dtype(weight.dtype))


def absmean_ternarize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and γ of an unsharded weight."""
    scale = absmean_scale(weight)
    return ternarize(weight, scale), scale


def fake_quantized_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The textbook BitLinear, quantize-dequantize with a straight-through estimator.

    The reference for values and gradients: ``x [T, K]``, ``weight [N, K]`` → ``[T, N]``. Its sums
    are floating-point, so it agrees with the integer path to rounding only.
    """
    codes, w_scale = absmean_ternarize(weight.detach())
    x_scale = activation_scale(x.detach().abs().amax(-1, keepdim=True))
    x_hat = quantize_activation(x.detach(), x_scale).to(x.dtype) * x_scale
    w_hat = codes.to(weight.dtype) * w_scale
    return torch.nn.functional.linear(x + (x_hat - x).detach(), weight + (w_hat - weight).detach())


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, as ``(x · g) · rstd``.

    The order matters: rounding is monotonic, so the largest magnitude of the result is exactly
    ``max|x·g| · rstd``. A norm whose dimension spans ranks thus learns its absmax from the same
    exchange that gives it Σx², and quantizes with the very bits that the unsharded norm has.
    """
    dtype = stats_dtype(x.dtype)
    rstd = torch.rsqrt(x.to(dtype).square().mean(-1, keepdim=True) + eps)
    return ((x.to(dtype) * gain.to(dtype)) * rstd).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^−x) of single IEEE operations.

    ``torch.sigmoid`` computes the last few elements of a tensor by other code than the rest, so its
    bits depend on how a tensor is split over ranks.
    """
    return x.neg().exp_().add_(1).reciprocal_()


def gated_linear_unit(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) · up``, with ReLU² (``relu2``) or SiLU (``silu``)."""
    if activation == "relu2":
        return gate.relu().square_().mul_(up)
    return sigmoid(gate).mul_(gate).mul_(up)
