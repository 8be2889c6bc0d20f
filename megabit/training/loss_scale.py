"""Dynamic loss scaling for fp16 (arXiv 1710.03740, section 3.2).

Gradients of activations in fp16 fall below its smallest numbers; a factor on the loss lifts them,
and the update takes it out again. All ranks know of an overflow by the agreed gradient norm
(infinite), so all have the same factor. It is a power of two: it rounds nothing by itself.
"""

from dataclasses import dataclass

from megabit.config import PrecisionConfig

SMALLEST = 1.0
LARGEST = 2.0**24


@dataclass
class LossScale:
    """The factor, and the steps since it last changed."""

    value: float
    interval: int | None
    """Steps without an overflow after which it is doubled; None: it stays as it is."""
    good_steps: int = 0

    @staticmethod
    def of(precision: PrecisionConfig) -> "LossScale":
        """As configured; 1 for all but fp16."""
        if precision.compute != "float16":
            return LossScale(1.0, None)
        return LossScale(precision.loss_scale, precision.loss_scale_interval)

    @property
    def may_shrink(self) -> bool:
        """Whether an overflow may be due to the factor."""
        return self.interval is not None and self.value > SMALLEST

    def after_step(self, overflowed: bool) -> None:
        """Halve it after an overflow; double it when there has been none for long."""
        if self.interval is None:
            return
        if overflowed:
            self.value, self.good_steps = max(self.value / 2, SMALLEST), 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value, self.good_steps = min(self.value * 2, LARGEST), 0
