"""The numerics of BitNet b1.58, once, in plain torch: what every layer, kernel and test refers to.

Sources: "The Era of 1-bit LLMs" (arXiv 2402.17764), section 2, and Microsoft's Training Tips. A
*code* is −1, 0 or +1; a weight's *scale* is γ; an activation's *scale* is s, one per token.

- weight: γ = max(mean|W|, 1e-5) over the whole logical tensor; q = clamp(round(W/γ), −1, 1).
  Σ|W| is taken in integers (``fixed_point_abs_sum``), so that no order or split changes γ
- options: a multiple of that γ, or of max(median|W|, 1e-5), the lower median; a λ ramp that fades
  quantization in: W + λ(γ·q − W), and x + λ(x_q·s − x), in floating point
- activation: s = max(max|x|, 1e-5)/127 over the whole hidden dimension;
  x_q = clamp(round(x/s), −128, 127)
- product: acc = Σ_k x_q · q in int32, exact; y = acc · (s·γ), rounded once
- backward (straight-through): dX = dY · (γ·q); dW = dYᵀ · (x_q·s); nothing flows to γ or s

``round`` is to nearest, ties to even. Statistics are taken in fp32, or fp64 where the run is fp64.

A token that holds NaN or ±Inf has s = NaN or Inf, codes of which x/s = NaN become 0 (so all are 0),
and a product row of NaN. Other tokens are not touched by it.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

MIN_SCALE = 1e-5
MAX_EXACT_K = 131_072
"""Widest input for which 128 · K ≤ 2^24, the last integer up to which fp32 counts exactly."""
MAX_COUNTED = 2.0**16
"""A weight as large as this is none: γ is infinite then."""
NOT_COUNTED = 1 << 49
"""Lane 1 of a piece with a weight that is not counted: all that are counted make 2^48 at most."""
BLOCK = 1 << 16
"""Elements that are summed at a time, so that what is computed of them stays in cache."""


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of ``dtype`` values are taken: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def fixed_point_abs_sum(weight: Tensor, numel: int) -> Tensor:
    """Σ|w| in two integers, which are added over the pieces of a weight in any order and grouping.

    Each element is rounded to a unit that depends on ``numel`` alone. Lane 0 counts those below 1,
    in units of 2^-(62-b) with b = ceil(log2(numel)); lane 1 those from 1 up to 2^16, in units of
    2^-(32-b). So lane 0 is 2^62 at most, lane 1 2^48. Few weights are as large as 1, if any: their
    coarser unit hardly shows in γ.

    A piece that holds NaN, ±Inf or a magnitude from 2^16 on has lanes 0 and 2^49 instead. Of such
    pieces 32,767 may be added before the sum wraps to what might be one; γ of it is infinite.

    Args:
        weight: a piece, of any shape, maybe empty; fp32, bf16 or fp64.
        numel: elements of the whole logical tensor.

    Returns:
        int64 ``[2]``.
    """
    lanes = torch.zeros(2, dtype=torch.int64, device=weight.device)
    is_counted = torch.ones((), dtype=torch.bool, device=weight.device)
    for block in blocks(weight):
        magnitude = block.abs().to(stats_dtype(weight.dtype))
        small, large = magnitude < 1, (magnitude >= 1) & (magnitude < MAX_COUNTED)
        by_lane = ((small, small_units(numel)), (large, large_units(numel)))
        for lane, (inside, units) in enumerate(by_lane):
            counted = torch.where(inside, magnitude, 0) * units
            lanes[lane] += counted.round_().to(torch.int64).sum()
        is_counted &= (small | large).all()
    return torch.where(is_counted, lanes, lanes.new_tensor([0, NOT_COUNTED]))


def weight_scale(
    sum_abs: Tensor, numel: int, dtype: torch.dtype, multiplier: float = 1.0
) -> Tensor:
    """γ of a logical weight.

    Args:
        sum_abs: int64 ``[2]``, ``fixed_point_abs_sum`` of all its pieces, added.
        numel: number of elements of the logical tensor.
        dtype: of the master weight; γ is taken in fp64 and rounded to it once.
        multiplier: γ is so many times max(mean|W|, 1e-5).
    """
    small, large = sum_abs.to(torch.float64).unbind()
    total = small / small_units(numel) + large / large_units(numel)
    mean = _divided(total, max(numel, 1)).clamp_min(MIN_SCALE) * multiplier
    is_counted = (sum_abs[1] >= 0) & (sum_abs[1] < NOT_COUNTED)
    return torch.where(is_counted, mean, math.inf).to(dtype)


def median_scale(median: Tensor, dtype: torch.dtype, multiplier: float = 1.0) -> Tensor:
    """γ of a logical weight from the median of |W|, as ``weight_scale`` from the mean.

    Args:
        median: fp32, 0-dimensional; inf where an element is not finite, or 2^16 or more.
    """
    return (median.to(torch.float64).clamp_min(MIN_SCALE) * multiplier).to(dtype)


def fixed_point_square_sum(x: Tensor, largest: float, numel: int) -> Tensor:
    """Σx² in one integer, which is added over the pieces of a tensor in any order and grouping.

    With e the least exponent for which ``largest < 2^e``, each (x · 2^-e)² is rounded to a multiple
    of 2^-(62-b), b = ceil(log2(numel)), so all of them make 2^62 at most. ``norm_from_fixed_point``
    is the inverse.

    Args:
        x: a piece, of any shape, maybe empty; fp32, bf16 or fp64.
        largest: no |x| of any piece is larger; the same for all. 0 and what is not finite give 0.
        numel: elements of the whole logical tensor.

    Returns:
        int64, 0-dimensional.
    """
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    if largest == 0 or not math.isfinite(largest):
        return total
    for block in blocks(x):
        squares = (block.to(torch.float64) * shrink(largest)).square_()
        total += squares.mul_(small_units(numel)).round_().to(torch.int64).sum()
    return total


def norm_from_fixed_point(total: Tensor, largest: float, numel: int) -> float:
    """√Σx² from ``fixed_point_square_sum`` of all pieces, added; ``largest`` if not finite."""
    if largest == 0 or not math.isfinite(largest):
        return largest
    exponent = _exponent(largest)
    half = exponent // 2  # in two steps: a norm beyond fp64 becomes infinite and is no error
    norm = math.sqrt(int(total) / small_units(numel))
    return norm * math.ldexp(1.0, half) * math.ldexp(1.0, exponent - half)


def blocks(x: Tensor) -> Iterator[Tensor]:
    """``x``, of any shape, in flat pieces of ``BLOCK`` elements at most."""
    return iter(x.reshape(-1).split(BLOCK)) if x.numel() else iter(())


def small_units(numel: int) -> float:
    """Units to one of which ``numel`` times one make 2^62 at most: 2^(62 - ceil(log2(numel)))."""
    return math.ldexp(1.0, 62 - (max(numel, 1) - 1).bit_length())


def large_units(numel: int) -> float:
    """The same for numbers up to 2^16, in 2^48: so many times fewer that sums tell them apart."""
    return math.ldexp(small_units(numel), -30)


def shrink(largest: float) -> float:
    """The power of two by which numbers up to ``largest`` are brought below one."""
    return math.ldexp(1.0, -_exponent(largest))


def _exponent(largest: float) -> int:
    """e with ``largest < 2^e``, and 2^-e a number: what lies far below 2^-1000 counts as zero."""
    return max(math.frexp(largest)[1], -1000)


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


def absmean_scale(weight: Tensor, multiplier: float = 1.0) -> Tensor:
    """γ of an unsharded weight: the reference for the sharded computation."""
    numel, dtype = weight.numel(), stats_dtype(weight.dtype)
    return weight_scale(fixed_point_abs_sum(weight, numel), numel, dtype, multiplier)


def absmedian_scale(weight: Tensor, multiplier: float = 1.0) -> Tensor:
    """The same of the lower median of |W|, in fp32: the reference for the sharded one."""
    magnitude = weight.abs().float().flatten()
    median = torch.where((magnitude < MAX_COUNTED).all(), magnitude.median(), math.inf)
    return median_scale(median, stats_dtype(weight.dtype), multiplier)


def absmean_ternarize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and γ of an unsharded weight."""
    scale = absmean_scale(weight)
    return ternarize(weight, scale), scale


def blended(x: Tensor, quantized: Tensor, share: float) -> Tensor:
    """``x + λ(x̂ − x)`` with λ = ``share``, in the dtype of ``x``; at λ = 0 the bits of ``x``."""
    dtype = stats_dtype(x.dtype)
    wide = x.to(dtype)
    return (wide + share * (quantized.to(dtype) - wide)).to(x.dtype)


def mixed_weight(weight: Tensor, scale: Tensor, share: float) -> Tensor:
    """W̃ = W + λ(γ·code − W) in the dtype of ``weight``: what a λ ramp computes with."""
    return blended(weight, ternarize(weight, scale).to(scale.dtype) * scale, share)


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
