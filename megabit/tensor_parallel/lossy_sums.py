"""Sums over TP that are rounded to int8 on the way, for inference: half the bytes of bf16.

In two shots, so that each number is rounded twice, whatever the TP degree (cf. ZeRO++, arXiv
2306.10209; Flash Communication, arXiv 2412.04964). Rank r adds up the r-th part of the tokens:

1. terms travel to it as int8 codes, with one fp32 scale for each group of 128 numbers of a token
   (all-to-all), and are added in fp32, in the order of ranks;
2. the sum travels back in the same way (all-gather), and every rank, the one that added it
   included, takes what travelled. So all ranks have the same bits.

Groups do not span tokens: what is rounded in one token does not depend on the others of the batch.

A sum is sent exactly instead (``row_sums``) if it is small, which all ranks know by its shape, or
if some group is one that rounding would hurt: of a high crest factor, or not finite. Only some rank
knows that, so it says so *in the message* that it sends to every other rank anyway, as with the
overflow of ``exact16``: all know before anyone acts on it, and none waits in another collective.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.mesh import Axis
from megabit.reduce import all_gather, start_all_to_all
from megabit_kernels import numerics

Reason: TypeAlias = Literal["size", "crest", "nonfinite", "guard"]

GROUP = 128
"""Numbers with one scale."""
LARGEST = 127
"""Of the codes."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""By a smaller one a number could not be divided without overflow."""
FLAGS: tuple[Reason | None, ...] = (None, "crest", "nonfinite")
"""What a message says of itself, by number; of several, the largest counts."""
HEADER = 4
"""Bytes of a message before its scales: a flag, as int32."""


@dataclass
class LossySums:
    """How sums are rounded on one rank, and how often they were not.

    All ranks of the axis must have the same settings at the same time; so ``enabled`` is changed
    only between forward passes, by something that all of them were told.
    """

    min_bytes: float
    """A smaller message, as its numbers are in the output's dtype, is sent exactly."""
    max_crest: float
    """absmax over root mean square of a group, above which a message is sent exactly. That of n
    numbers is at most √n, 11.3 of a group."""
    enabled: bool = True
    rounded: int = 0
    """Sums that were rounded so far."""
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    """Sums that were not, by reason; the same on every rank."""

    def sum_products(
        self, acc: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, tp: Axis
    ) -> Tensor | None:
        """``Σ_ranks acc · (s·γ)`` about: int32 ``[T, N]``, s ``[T, 1]`` → ``[T, N]`` in ``dtype``;
        None if all ranks are to send this sum exactly. ``acc`` stays as it is."""
        result = self._known_reason(acc.numel() * dtype.itemsize) or self._rounded_sum(
            numerics.dequantize_product(acc, x_scale, w_scale, torch.float32), dtype, tp
        )
        if isinstance(result, Tensor):
            self.rounded += 1
            return result
        self.fallbacks[result] += 1
        return None

    def _known_reason(self, num_bytes: int) -> Reason | None:
        """Against rounding a sum of this size, from what all ranks know."""
        if num_bytes == 0 or num_bytes < self.min_bytes:
            return "size"
        return None if self.enabled else "guard"

    def _rounded_sum(self, term: Tensor, dtype: torch.dtype, tp: Axis) -> Tensor | Reason:
        """Of ``term [T, N]`` of each rank, fp32; or what speaks against it, on every rank."""
        tokens, width = term.shape
        with tp.coded("int8"):
            # As bytes: codes and scales in one message, which any back end can send.
            message = _encoded(_padded(term, (0, 0, 0, -tokens % tp.size)), tp.size, self.max_crest)
            received = start_all_to_all(message, tp, "activations").wait()
            # Every rank has every rank's flag. (A GPU's host waits for it here.)
            if reason := _worst_flag(received):
                return reason
            total, *others = _decoded(received, width)
            for other in others:
                total = total + other
            received = all_gather(_encoded(total, 1, self.max_crest), tp, "activations")
            # Terms may cancel out in all numbers of a group but one, or add up to infinity.
            if reason := _worst_flag(received):
                return reason
        return _decoded(received, width).flatten(0, 1)[:tokens].to(dtype)


def _encoded(x: Tensor, parts: int, max_crest: float) -> Tensor:
    """fp32 ``[parts · n, N]`` → uint8 ``[parts, bytes]``: a flag, the scales, the codes of each of
    the parts. The flag is that of all of ``x``."""
    rows, width = x.shape
    groups = _padded(x, (0, -width % GROUP)).view(rows, -1, GROUP)
    # NaN comes through both. A norm of order infinity would take 20 times as long.
    absmax = torch.maximum(groups.amax(-1, keepdim=True), -groups.amin(-1, keepdim=True))
    scale = (absmax / LARGEST).clamp_min_(SMALLEST_SCALE)
    multiples = groups / scale
    # Of multiples of the scale: squares of the numbers themselves could overflow, or vanish.
    norm = torch.linalg.vector_norm(multiples, dim=-1)
    peak = (absmax / scale).squeeze(-1)
    is_high = peak * _group_sizes(x).sqrt_() > max_crest * norm  # of zeros only: 0 > 0
    flag = torch.maximum(is_high.any() * 1, ~absmax.isfinite().all() * 2).to(torch.int32)
    codes = multiples.round_().to(torch.int8).view(rows, -1)[:, :width]
    fields = (flag.repeat(parts, 1), scale.view(parts, -1), codes.reshape(parts, -1))
    return torch.cat([f.view(torch.uint8) for f in fields], 1)


def _decoded(messages: Tensor, width: int) -> Tensor:
    """uint8 ``[parts, bytes]`` → fp32 ``[parts, n, N]``, with N = ``width``."""
    parts, num_groups = len(messages), -(-width // GROUP)
    rows = (messages.shape[1] - HEADER) // (width + 4 * num_groups)
    scales, codes = messages[:, HEADER:].split([4 * rows * num_groups, rows * width], 1)
    multiples = codes.reshape(parts * rows, width).view(torch.int8).float()
    groups = _padded(multiples, (0, -width % GROUP)).view(parts, rows, num_groups, GROUP)
    groups *= scales.contiguous().view(torch.float32).view(parts, rows, num_groups, 1)
    return groups.view(parts, rows, -1)[..., :width]


def _padded(x: Tensor, missing: tuple[int, ...]) -> Tensor:
    """``F.pad``, which copies even if nothing is missing."""
    return F.pad(x, missing) if any(missing) else x


def _worst_flag(messages: Tensor) -> Reason | None:
    return FLAGS[int(messages[:, :HEADER].contiguous().view(torch.int32).max())]


def _group_sizes(x: Tensor) -> Tensor:
    """How many numbers each group of a row ``[N]`` has, fp32: the last one may be shorter."""
    width = x.shape[1]
    sizes = x.new_full((-(-width // GROUP),), GROUP)
    if width % GROUP:
        sizes[-1] = width % GROUP
    return sizes
