"""Gradients to int8 by stochastic rounding, in plain torch: the definition of the int8 backward.

A gradient is rounded up or down at random, such that its expectation is itself. To nearest, all
that is below half a step, 1/254 of the largest that shares its scale, would become zero in every
step of training; gradients are spread over orders of magnitude, and these small ones are the many.

What is drawn is a hash of (seed, stream, row, column): no kernel needs a state, and all of them
round alike.

- s = max(max|x|, 1e-30)/127 over a row of x, or over a column
- t = clamp(x/s, −127, 127); x_q = floor(t) + (u < t − floor(t)), u a multiple of 2^-24 below 1

A row (or column) that holds NaN or ±Inf has s = NaN or Inf and codes of 0, so products of NaN.
"""

import torch
from torch import Tensor

from megabit_kernels import numerics

MIN_LARGEST = 1e-30
"""Far below any gradient: s·γ is still a normal number of fp32."""
LIMIT = 127
WORD = 0xFFFFFFFF


def key_of(seed: int, stream: int) -> int:
    """64 bits that select the noise of one tensor; another ``stream`` for each under one seed."""
    return _mixed64(_mixed64(seed) + stream)


def quantize_rows(x: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """``x [M, N]`` → int8 ``[M, N]`` and a scale for each row, ``[M, 1]`` in statistics' dtype."""
    wide = x.to(numerics.stats_dtype(x.dtype))
    scale = _scale(numerics.absmax(wide))
    return _rounded(wide, scale, key), scale


def quantize_columns(x: Tensor, row_scale: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """``z = x · row_scale``, quantized with a scale for each column.

    Args:
        x: ``[M, N]``.
        row_scale: ``[M, 1]``.

    Returns:
        int8 ``[N, M]``, transposed and contiguous, and ``[N, 1]``.
    """
    z = x.to(numerics.stats_dtype(x.dtype)) * row_scale
    scale = _scale(numerics.absmax(z.t()))
    return _rounded(z, scale.t(), key).t().contiguous(), scale


def noise(key: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """int64 ``[rows, columns]``, uniform in 0 … 2^24 − 1.

    Rows are keyed by two words of their own, so that two rows share no run of values.
    """
    low, high = key & WORD, key >> 32
    row = torch.arange(rows, device=device).unsqueeze(1)
    start = _mixed32((row + low) & WORD)
    flip = _mixed32((start + high) & WORD)
    column = torch.arange(columns, device=device)
    return (_mixed32((start + column) & WORD) ^ flip) >> 8


def _scale(largest: Tensor) -> Tensor:
    return largest.clamp_min(MIN_LARGEST) / largest.new_full((), LIMIT)


def _rounded(x: Tensor, scale: Tensor, key: int) -> Tensor:
    quotient = torch.div(x, scale).clamp_(-LIMIT, LIMIT)
    below = quotient.floor()
    draw = noise(key, x.shape[0], x.shape[1], x.device).to(x.dtype) * 2.0**-24
    return (below + (draw < quotient - below)).nan_to_num_(0.0).to(torch.int8)


def _mixed32(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64 (``lowbias32`` by C. Wellons, public domain)."""
    x = x ^ x >> 16
    x = x * 0x7FEB352D & WORD
    x = x ^ x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def _mixed64(x: int) -> int:
    """One step of SplitMix64, of which neighbouring seeds give unrelated words."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31
