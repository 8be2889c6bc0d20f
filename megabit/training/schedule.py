"""The two-stage schedule of learning rate and weight decay (BitNet Training Tips, section 3).

Both stages decay linearly to the same floor along lines over the *whole* run; at the switch the
rate drops from the line of the first peak to that of the second, and weight decay changes with it.
So the second peak is virtual: it is never the rate itself, unless the switch is at the start.
"""

from dataclasses import dataclass

from megabit.config import OptimConfig


@dataclass(frozen=True)
class Hyperparameters:
    """What the optimizer uses in one step."""

    lr: float
    weight_decay: float


def two_stage(optim: OptimConfig, step: int, steps: int) -> Hyperparameters:
    """Hyperparameters of optimizer step ``step`` (0-based) of ``steps``."""
    stage = int(step >= optim.switch * steps)
    peak, weight_decay = optim.lr[stage], optim.weight_decay[stage]
    if step < optim.warmup_steps:
        return Hyperparameters(peak * (step + 1) / optim.warmup_steps, weight_decay)
    rest = 1 - (step - optim.warmup_steps) / max(steps - optim.warmup_steps, 1)
    return Hyperparameters(optim.min_lr + (peak - optim.min_lr) * rest, weight_decay)
