"""How the input of a ternary layer becomes int8 codes and one scale per token.

- ``int8``: s = max|x|/127 (``numerics``), what BitNet b1.58 has everywhere
- ``int4`` (BitNet a4.8, arXiv 2411.04965, section 2.2): s = mean|x|/√7, codes −8 to 7
- ``top_half`` (the same): as ``int8``; then each token keeps the half of its codes with the largest
  magnitude. As codes are integers, a histogram of 128 levels says which these are, and the sum of
  histograms over ranks is exact: the same codes at every TP degree. Where the threshold's level has
  more codes than are wanted, all of them stay, since no rank could choose between them alone.
- ``none``: activations stay as they are (W1.58A16); nothing is quantized here

Backward is straight-through in each case: dX as if nothing had been rounded or left out.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megabit.mesh import Axis
from megabit.reduce import all_reduce
from megabit.tensor_parallel.forward_pass import PLAIN, ForwardPass
from megabit_kernels import numerics, quantize_activation

ActivationKind = Literal["int8", "int4", "top_half", "none"]

LEVELS = 128
"""Magnitudes of int8 codes, 0 to 127."""
CHUNK_ELEMENTS = 1 << 20
"""Codes that are counted at a time: counting takes 8 bytes for each."""


@dataclass(frozen=True)
class ActivationQuantizer:
    """One of the kinds above."""

    kind: ActivationKind = "int8"

    def quantize(
        self, x: Tensor, absmax: Tensor | None, tp: Axis, forward_pass: ForwardPass = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """int8 codes ``[T, k]`` of ``x [T, k]`` and their scales ``[T, 1]``, at least fp32.

        Args:
            absmax: ``[T, 1]``, max|x| of each token over **all** columns, where it is known;
                ``int4`` has no use for it.
            tp: what the columns of ``x`` are split over; ``Axis.single`` where each rank has all of
                a token (``int4`` needs that). Without ``absmax`` a maximum is sent over it, for
                ``top_half`` also 128 counts, int32, per token.
            forward_pass: a recomputation takes over what was sent in the first pass.
        """
        match self.kind:
            case "none":
                raise ValueError("full-precision activations are not quantized")
            case "int4":
                if tp.size > 1:
                    raise ValueError("int4 takes the mean of a whole token, not of a rank's part")
                return _int4(x)
        if absmax is None:
            absmax = token_absmax(x, tp, forward_pass)
        x_q, scale = quantize_activation(x, absmax)
        if self.kind == "top_half":
            x_q = _top_half(x_q, tp, forward_pass)
        return x_q, scale


def token_absmax(x: Tensor, tp: Axis, forward_pass: ForwardPass = PLAIN) -> Tensor:
    """``[T, 1]``: max|x| of each token of ``x [T, k]``, whose columns are split over ``tp``."""
    own = numerics.absmax(x.detach())
    if tp.size == 1:
        return own
    return forward_pass.statistics(lambda: all_reduce(own, tp, "max", "statistics"))


def _int4(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.to(numerics.stats_dtype(x.dtype))
    mean = wide.abs().mean(-1, keepdim=True).clamp_min(numerics.MIN_SCALE)
    scale = mean / mean.new_full((), math.sqrt(7))  # CUDA would turn a number into a product
    codes = torch.div(wide, scale).round_().clamp_(-8, 7).nan_to_num_(0.0)
    return codes.to(torch.int8), scale


def _top_half(x_q: Tensor, tp: Axis, forward_pass: ForwardPass) -> Tensor:
    """``x_q [T, k]`` with zeros in place of the smaller half of each token's codes."""
    # abs of int8 would leave −128 as it is.
    level = x_q.to(torch.int16).abs_().clamp_max_(LEVELS - 1)

    def threshold() -> Tensor:
        """``[T, 1]``: the largest level with at least half of a token's codes at or above it."""
        counts = all_reduce(_histogram(level), tp, purpose="statistics")
        at_or_above = counts.flip(-1).cumsum(-1).flip(-1)
        is_enough = 2 * at_or_above >= at_or_above[:, :1]  # level 0 has all
        return (is_enough.sum(-1, keepdim=True) - 1).to(torch.int16)  # enough at 0, …, threshold

    least = forward_pass.statistics(threshold) if tp.size > 1 else threshold()
    return torch.where(level >= least, x_q, 0)


def _histogram(level: Tensor) -> Tensor:
    """int32 ``[T, 128]``: how many of ``level [T, k]`` each token has at each level."""
    counts = torch.zeros(level.shape[0], LEVELS, dtype=torch.int32, device=level.device)
    rows = max(1, CHUNK_ELEMENTS // max(1, level.shape[1]))
    for start in range(0, level.shape[0], rows):
        chunk = level[start : start + rows].to(torch.int64)
        one = counts.new_ones(()).expand(chunk.shape)
        counts[start : start + rows].scatter_add_(1, chunk, one)
    return counts
