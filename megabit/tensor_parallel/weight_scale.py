"""γ of ternary weights: mean or median of |W| over whole logical tensors, whatever ranks hold them.

Each rank brings the elements that it owns, and integers are added over ranks, so that no layout
changes a bit of γ:

- ``absmean``: Σ|W| in integer units (``numerics.fixed_point_abs_sum``), one all-reduce;
- ``absmedian``: the lower median, exactly, as ``torch.median`` has it. Floats that are not negative
  are in the order of their bits, so it is found a byte at a time, from the top: each of four rounds
  counts the candidates by their next byte, and the sums over ranks say in which of the 256 bins the
  median lies. One all-reduce of 2 KiB a tensor and round, for all tensors together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megabit.config import ModelConfig
from megabit.mesh import Axis
from megabit.reduce import all_reduce
from megabit_kernels import abs_sum, numerics

BINS = 256
ROUND_SHIFTS = (24, 16, 8, 0)
"""Which byte of fp32's bits each round looks at."""


@dataclass(frozen=True)
class OwnedElements:
    """What a rank owns of a logical tensor: over all ranks each element once."""

    parts: Iterable[Tensor]
    """Of any shape, maybe empty; maybe none. Gone through once, for a median four times."""
    numel: int
    """Of the whole logical tensor."""


@dataclass(frozen=True)
class WeightScale:
    """What γ is: ``multiplier`` · max(statistic of |W|, 1e-5)."""

    statistic: Literal["absmean", "absmedian"] = "absmean"
    multiplier: float = 1.0

    @staticmethod
    def of(model: ModelConfig) -> "WeightScale":
        """As configured."""
        return WeightScale(model.weight_scale, model.scale_mult)

    @torch.no_grad()
    def of_tensors(
        self,
        tensors: Sequence[OwnedElements],
        axis: Axis,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Tensor]:
        """γ of each of ``tensors``, 0-dimensional in ``dtype``; collective over ``axis``.

        It is infinite where the tensor holds NaN, ±Inf or a magnitude from 2^16 on.

        Args:
            axis: whose ranks together own all elements.
            dtype: of the master weights. The median of fp64 masters is that of their values in
                fp32.
        """
        if not tensors:
            return []
        if self.statistic == "absmedian":
            medians = _medians(tensors, axis, device)
            return [numerics.median_scale(m, dtype, self.multiplier) for m in medians.unbind()]
        sums = torch.stack([_abs_sum(tensor, device) for tensor in tensors])
        totals = all_reduce(sums, axis, purpose="scales").unbind()
        return [
            numerics.weight_scale(total, tensor.numel, dtype, self.multiplier)
            for total, tensor in zip(totals, tensors, strict=True)
        ]


def bytes_of_sums(statistic: Literal["absmean", "absmedian"]) -> int:
    """Of what is added over ranks for one tensor."""
    int64 = 8
    return int64 * (len(ROUND_SHIFTS) * BINS if statistic == "absmedian" else 2)


def _abs_sum(tensor: OwnedElements, device: torch.device) -> Tensor:
    total = torch.zeros(2, dtype=torch.int64, device=device)
    for part in tensor.parts:
        total += abs_sum(part, tensor.numel)
    return total


def _medians(tensors: Sequence[OwnedElements], axis: Axis, device: torch.device) -> Tensor:
    """fp32 ``[n]``: of each tensor; inf where an element is not counted."""
    # What is known of the medians' bits, and how many of the candidates lie below the median.
    prefixes = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    below = torch.tensor([max(tensor.numel - 1, 0) // 2 for tensor in tensors], device=device)
    is_counted = torch.ones(len(tensors), dtype=torch.bool, device=device)
    for shift in ROUND_SHIFTS:
        counts = torch.stack(
            [_histogram(t, p, shift) for t, p in zip(tensors, prefixes.unbind(), strict=True)]
        )
        counts = all_reduce(counts, axis, purpose="scales")
        if shift == ROUND_SHIFTS[0]:
            is_counted = counts[:, -1] == 0
        up_to = counts.cumsum(1)
        bins = (up_to <= below[:, None]).sum(1, keepdim=True).clamp_max(BINS - 1)
        below = below - (up_to - counts).gather(1, bins)[:, 0]
        prefixes = prefixes * BINS + bins[:, 0]
    medians = prefixes.to(torch.int32).view(torch.float32)
    return medians.where(is_counted, torch.inf)


def _histogram(tensor: OwnedElements, prefix: Tensor, shift: int) -> Tensor:
    """int64 ``[256]``: the owned elements whose bits above the byte at ``shift`` are ``prefix``, by
    that byte.

    In the first round, whose byte has no sign, the last bin has what is not counted at all.
    """
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=prefix.device)
    for part in tensor.parts:
        for block in numerics.blocks(part):
            magnitude = block.abs().to(torch.float32)
            bits = magnitude.view(torch.int32)
            byte = (bits >> shift) & (BINS - 1)
            # What is no candidate goes to one bin more, so that nothing waits for a GPU to say how
            # many there are.
            if shift == ROUND_SHIFTS[0]:
                byte = byte.where(magnitude < numerics.MAX_COUNTED, BINS - 1)
            else:
                byte = byte.where((bits >> (shift + 8)) == prefix, BINS)
            counts += torch.bincount(byte, minlength=BINS + 1)
    return counts[:BINS]
