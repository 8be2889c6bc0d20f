"""Numbers as people read them. ``assets/report.js`` has the same rules for what it shows."""

import math
from collections.abc import Sequence
from typing import Literal

Unit = Literal["number", "share", "seconds", "MB", "MiB", "count", "TFLOP/s", "W", "°C"]

SI = ("", "k", "M", "G", "T", "P")


def text_of(value: float, unit: Unit) -> str:
    """``0.0005`` as a share is ``0.05 %``; ``0.0123`` seconds are ``12.3 ms``."""
    match unit:
        case "share":
            return f"{digits(value * 100)} %"
        case "seconds":
            return f"{digits(value * 1000)} ms" if 0 < abs(value) < 1 else f"{digits(value)} s"
        case "MB":
            return _stepped(value, 1000, ("MB", "GB", "TB"))
        case "MiB":
            return _stepped(value, 1024, ("MiB", "GiB", "TiB"))
        case "count":
            return _stepped(value, 1000, SI) if abs(value) >= 10_000 else f"{value:,.5g}"
        case "TFLOP/s":  # on a CPU there are few of them
            return _stepped(value * 1e12, 1000, tuple(f"{prefix}FLOP/s" for prefix in SI))
        case "W" | "°C":
            return f"{digits(value)} {unit}"
    return digits(value)


def axis_text(value: float, unit: Unit) -> str:
    """Beside an axis, where there is little room, and 0 needs no unit."""
    return "0" if value == 0 else text_of(value, unit).removesuffix("FLOP/s")


def largest_unit(high: float, unit: Unit) -> float:
    """What numbers up to ``high`` should be round in: binary units have no round numbers else."""
    return 1024.0 ** min(2, int(math.log(max(high, 1), 1024))) if unit == "MiB" else 1.0


def digits(value: float) -> str:
    """Four significant digits, with an exponent where there would be many zeros."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e6:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _stepped(value: float, base: int, names: Sequence[str]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value /= base
        power += 1
    return f"{value:.4g}{' ' if names[0] else ''}{names[power]}"
