"""Sizes, rates and times as people read them, and the units that settings and metrics are in.

Measurements have two digits: more is more than they are good for. What a file has is exact.
"""

MB = 1e6
MIB = 2**20

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")


def rate_text(bytes_per_s: float) -> str:
    """Of a network: 94 Mbit/s, 9.4 Gbit/s."""
    return _stepped(8 * bytes_per_s, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def speed_text(bytes_per_s: float) -> str:
    """Of a disk: 940 MB/s, 1.2 GB/s."""
    return _stepped(bytes_per_s, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def size_text(num_bytes: float) -> str:
    """Of what is measured: 8 B, 64 kB, 1.2 GB."""
    return _stepped(num_bytes, _SIZES)


def file_size_text(num_bytes: int) -> str:
    """Of a file: 999 B, 1.5 kB, 12.3 MB."""
    value, unit = float(num_bytes), 0
    while value >= 999.95 and unit < len(_SIZES) - 1:
        value /= 1000
        unit += 1
    return f"{value:.1f} {_SIZES[unit]}" if unit else f"{num_bytes} B"


def flops_text(flops: float) -> str:
    """Of arithmetic: 94 GFLOP/s."""
    return _stepped(flops, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def time_text(seconds: float) -> str:
    """12 µs, 1.5 ms, 20 s, 3 min, 2.5 h."""
    if seconds < 1:
        return _stepped(seconds * 1e9, ("ns", "µs", "ms"))
    if seconds < 120:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds / 60)} min" if seconds < 7200 else f"{_digits(seconds / 3600)} h"


def counted(number: int, noun: str, ending: str = "s") -> str:
    """1 rank, 2 ranks."""
    return f"{number} {noun}{ending if number != 1 else ''}"


def _stepped(value: float, names: tuple[str, ...]) -> str:
    power = 0
    while value >= 999.5 and power < len(names) - 1:
        value /= 1000
        power += 1
    return f"{_digits(value)} {names[power]}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 or value == round(value) else f"{value:.2g}"
