"""From values to places in a plot, and the numbers beside its axes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MARGIN = 0.06
"""Share of a scale that is free beyond the data."""


@dataclass(frozen=True)
class Scale:
    """A range of values along an axis; with ``log``, both ends are positive."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``; what is beyond stays at the end."""
        low, high = self.low, self.high
        if self.log:
            if value <= 0:
                return 0.0
            low, high, value = math.log(low), math.log(high), math.log(value)
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self, count: int = 4, unit: float = 1.0) -> list[float]:
        """Numbers within that are round in terms of ``unit``, about ``count`` of them."""
        if not self.log or self.high / self.low < 3:
            return [unit * n for n in round_numbers(self.low / unit, self.high / unit, count)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = last - first
        multiples = (1, 2, 5) if decades <= 2 else (1,)
        every = max(1, decades // count)
        return [
            multiple * 10.0**power
            for power in range(first, last + 1)
            if power % every == 0
            for multiple in multiples
            if self.low <= multiple * 10.0**power <= self.high
        ]


def scale_of(values: Iterable[float], from_zero: bool = False, log: bool = False) -> Scale:
    """One that has room for all ``values``, of which there must be one (if ``log``, a positive
    one)."""
    values = [value for value in values if not log or value > 0]
    low, high = min(values), max(values)
    if log:
        room = max(high / low, 1.2) ** MARGIN
        return Scale(low / room, high * room, log=True)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
        high = high if high > low else 1.0
    span = high - low
    # Of values that are almost all the same, the last digits are no news.
    least = max(abs(low), abs(high)) * 5e-3 or 1.0
    if span < least:
        low, high, span = low - least / 2, high + least / 2, span + least
    return Scale(
        low if from_zero and low == 0 else low - MARGIN * span,
        high if from_zero and high == 0 else high + MARGIN * span,
    )


def round_numbers(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten between ``low`` and ``high``."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # ``+ 0.0`` makes −0 plain 0; the rounding takes off what the product added.
    return [float(f"{index * step:.12g}") + 0.0 for index in range(first, last + 1)]
