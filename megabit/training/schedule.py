"""Learning rate, weight decay and the share of quantization, as functions of the tokens consumed.

A run of N tokens is warm-up, then a curve down to ``min_lr`` at N. *Progress* is 0 at the end of
the warm-up and 1 at N.

=================  =================================================================  ============
schedule           learning rate after warm-up                                        weight decay
=================  =================================================================  ============
linear             from the peak to ``min_lr`` in a straight line                     constant
cosine             from the peak to ``min_lr`` along half a cosine                    constant
constant           the peak                                                           constant
wsd                the peak, then down to ``min_lr`` over the last ``decay_fraction`` constant
two_stage_linear   two lines over the *whole* run, each from its peak                 per stage
two_stage_cosine   two half cosines over the whole run                                the same curve
=================  =================================================================  ============

At the switch, the rate of a two-stage schedule drops from the first curve to the second, and weight
decay changes with it (BitNet Training Tips, section 3 and table 2). So the second peak is virtual:
it is never the rate itself, unless the switch is at the start. In ``two_stage_cosine`` the weight
decay of a stage goes down along the same cosine, to 0 (BitNet b1.58 2B4T, section 2.2).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from megabit.config import OptimConfig
from megabit.data.step_plan import StepPlan


@dataclass(frozen=True)
class Hyperparameters:
    """What the optimizer uses in one step."""

    lr: float
    weight_decay: float


def hyperparameters(
    optim: OptimConfig, consumed: int, total: int, warmup: int, batch: int
) -> Hyperparameters:
    """Those of one step.

    Args:
        consumed: tokens of all steps before.
        total: tokens of the run.
        warmup: tokens over which the rate rises (``warmup_tokens``).
        batch: tokens of this step. They count in the warm-up, or its first step would do nothing.
    """
    stage = _stage(optim, consumed, total)
    peak, weight_decay = _of_stage(optim.lr, stage), _of_stage(optim.weight_decay, stage)
    progress = max(consumed - warmup, 0) / max(total - warmup, 1)
    if optim.schedule == "two_stage_cosine":
        weight_decay *= _cosine(progress)
    if consumed < warmup:
        return Hyperparameters(peak * min((consumed + batch) / warmup, 1.0), weight_decay)
    if optim.schedule == "wsd":
        share = _wsd(optim, consumed, total, warmup)
    elif optim.schedule == "constant":
        return Hyperparameters(peak, weight_decay)
    elif optim.schedule in ("cosine", "two_stage_cosine"):
        share = _cosine(progress)
    else:
        share = 1 - progress
    return Hyperparameters(optim.min_lr + (peak - optim.min_lr) * share, weight_decay)


def warmup_tokens(optim: OptimConfig, plan: StepPlan) -> int:
    """How many tokens the warm-up takes: those of ``warmup_steps``, or ``warmup_fraction``."""
    if optim.warmup_fraction is not None:
        return tokens_of_share(optim.warmup_fraction, plan.total_tokens)
    return plan.tokens_before(optim.warmup_steps)


def quantization_share(ramp: float, consumed: int, total: int) -> float:
    """λ of a step: how far quantization has been faded in.

    From 0 before the first token in a straight line; exactly 1 once the share ``ramp`` of all
    tokens is consumed.
    """
    end = tokens_of_share(ramp, total)
    return 1.0 if consumed >= end else consumed / end


def tokens_of_share(share: float, total: int) -> int:
    """The tokens that a share of the run is, rounded up. The share is taken for the decimal number
    that was written: 0.1 of 30 tokens are 3, which ``ceil(0.1 * 30)`` is not."""
    return math.ceil(Fraction(str(share)) * total)


def _stage(optim: OptimConfig, consumed: int, total: int) -> int:
    if not optim.schedule.startswith("two_stage"):
        return 0
    return int(consumed >= tokens_of_share(optim.switch, total))


def _of_stage(values: list[float], stage: int) -> float:
    """One number is that of both stages."""
    return values[min(stage, len(values) - 1)]


def _cosine(progress: float) -> float:
    """Half a cosine, from 1 to 0."""
    return (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def _wsd(optim: OptimConfig, consumed: int, total: int, warmup: int) -> float:
    """Warm-up, stable, decay: 1, then down to 0 at the end of the run."""
    start = max(total - tokens_of_share(optim.decay_fraction, total), warmup)
    if consumed <= start:
        return 1.0
    progress = min((consumed - start) / max(total - start, 1), 1.0)
    match optim.decay_shape:
        case "linear":
            return 1 - progress
        case "cosine":
            return _cosine(progress)
        case "sqrt":
            return 1 - math.sqrt(progress)
