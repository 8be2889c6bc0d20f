"""Non-negative least squares: what a unit of each term takes, from measured totals.

Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23: unknowns join the set that
is solved for one at a time, the one whose growth helps most first, and leave it when they would
become negative.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 1e-10
ROUNDS = 10
"""For each unknown; in practice two are enough."""


def non_negative(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """x ≥ 0 for which ``matrix`` · x is nearest to ``target``, relative to it.

    Args:
        matrix: a row for each measurement, a column for each unknown.
        target: what was measured, above 0.
    """
    wanted = torch.tensor(target, dtype=torch.float64)
    a = torch.tensor(matrix, dtype=torch.float64) / wanted.unsqueeze(1)
    sizes = a.norm(dim=0)
    a = a / sizes.clamp_min(torch.finfo(torch.float64).tiny)
    x = _solve(a, torch.ones_like(wanted))
    return [float(v) for v in torch.where(sizes > 0, x / sizes, 0.0)]


def relative_error(
    matrix: Sequence[Sequence[float]], x: Sequence[float], target: Sequence[float]
) -> float:
    """Root of the mean squared relative difference of ``matrix`` · x from ``target``."""
    wanted = torch.tensor(target, dtype=torch.float64)
    found = torch.tensor(matrix, dtype=torch.float64) @ torch.tensor(x, dtype=torch.float64)
    return float((found / wanted - 1).square().mean().sqrt())


def _solve(a: Tensor, b: Tensor) -> Tensor:
    count = a.shape[1]
    x = a.new_zeros(count)
    chosen = torch.zeros(count, dtype=torch.bool)
    for _ in range(ROUNDS * count):
        slope = a.T @ (b - a @ x)
        slope[chosen] = -torch.inf
        best = int(slope.argmax())
        if slope[best] <= TOLERANCE:
            break
        chosen[best] = True
        while True:
            trial = a.new_zeros(count)
            trial[chosen] = torch.linalg.lstsq(a[:, chosen], b, driver="gelsd").solution
            falling = chosen & (trial <= 0)
            if not falling.any():
                x = trial
                break
            # As far towards it as all stay positive; who is zero then leaves.
            steps = x[falling] / (x[falling] - trial[falling])
            x = x + steps.min() * (trial - x)
            chosen &= x > TOLERANCE
            x[~chosen] = 0.0
    return x
