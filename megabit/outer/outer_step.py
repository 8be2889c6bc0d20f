"""The outer optimizer: SGD with Nesterov momentum on what islands have changed together.

With anchor w (what all islands began the round with) and mean m̄ (of what they have after it), the
outer gradient is Δ = w − m̄, and (DiLoCo, arXiv 2311.08105, algorithm 1)

    b ← μ·b + Δ,    w ← w − η·(Δ + μ·b)

Written as w ← m̄ + (1 − η)·Δ − η·μ·b, so that η = 1 and μ = 0 give the mean itself, bit by bit:
plain averaging, and with one island no change at all.
"""

import torch
from torch import Tensor


@torch.no_grad()
def outer_step(
    anchor: Tensor, mean: Tensor, momentum: Tensor, lr: float, momentum_factor: float
) -> None:
    """One outer step, in place of ``anchor`` and ``momentum``; elementwise, so that it does not
    matter how weights are cut.

    Args:
        anchor: fp32, what the round began with; afterwards what the next one begins with.
        mean: fp32, of all islands' weights after the round.
        momentum: fp32, b; zeros before the first round.
        lr: η.
        momentum_factor: μ.
    """
    # Single operations: a fused multiply-add in the middle of a tensor, and none in its last few
    # elements, would make the result depend on where it is cut.
    change = anchor - mean
    momentum.mul_(momentum_factor).add_(change)
    anchor.copy_(mean)
    anchor.add_(change.mul_(1 - lr))
    anchor.sub_(momentum * (lr * momentum_factor))
