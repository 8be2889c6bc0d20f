"""What an update does to ternary weights, counted where the master weights are.

Each element is counted by one rank, so that counts of all ranks can be added. While a λ ramp lasts,
the codes are those that the weights would have at λ = 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megabit.data_parallel.masters import Master
from megabit_kernels import TernaryWeight


@dataclass
class WeightCounts:
    """Of the elements of one ternary weight that this rank owns."""

    codes: int = 0
    flips: int = 0
    """Codes that the update changed."""
    zeros: int = 0
    """After it."""
    distance: float = 0.0
    """Sum of | |w|/γ − 1/2 | after it: how far the weights are from where rounding changes."""


Codes = dict[str, list[TernaryWeight]]
"""2 bits an element, by the name of the weight: of each part that this rank counts."""


@torch.no_grad()
def own_codes(masters: Sequence[Master], scales: Mapping[str, Tensor], dp_rank: int) -> Codes:
    """Of the masters as they are, with γ by name of weight."""
    codes: Codes = {name: [] for name in scales}
    for name, rows in _owned(masters, dp_rank):
        codes[name].append(TernaryWeight.from_latent(rows, scales[name], "packed"))
    return codes


@torch.no_grad()
def count_changes(
    masters: Sequence[Master], scales: Mapping[str, Tensor], dp_rank: int, before: Codes
) -> dict[str, WeightCounts]:
    """By name of weight, 0 where this rank owns none of it.

    Args:
        masters: after the update.
        scales: γ after the update.
        before: ``own_codes`` before it.
    """
    waiting = {name: iter(codes) for name, codes in before.items()}
    names, numbers, sums = [], [], []
    for name, rows in _owned(masters, dp_rank):
        gamma = scales[name]
        codes = TernaryWeight.from_latent(rows, gamma, "packed").codes()
        flips = (codes != next(waiting[name]).codes()).sum()
        distance = (rows.to(gamma.dtype).abs() / gamma).sub_(0.5).abs_().sum(dtype=torch.float64)
        names.append((name, rows.numel()))
        numbers.append(torch.stack([flips, (codes == 0).sum()]))
        sums.append(distance)
    counts = {name: WeightCounts() for name in scales}
    if not names:
        return counts
    # One look at all of them, so that a GPU is waited for once.
    by_part = zip(names, torch.stack(numbers).tolist(), torch.stack(sums).tolist(), strict=True)
    for (name, numel), (flipped, zeros), far in by_part:
        count = counts[name]
        count.codes += numel
        count.flips += flipped
        count.zeros += zeros
        count.distance += far
    return counts


def _owned(masters: Sequence[Master], dp_rank: int) -> Iterator[tuple[str, Tensor]]:
    """Rows of ternary weights, by part: those that this rank counts, and of replicas over DP those
    that would be its own."""
    own = range(dp_rank, dp_rank + 1)
    for master in masters:
        if master.bucket.layout.kind == "ternary":
            for slot in master.bucket.layout.slots:
                for _, rows in master.held(slot, master.weights.detach(), True, own):
                    yield slot.name, rows
