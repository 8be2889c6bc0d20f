"""What the machine can do at best, measured: operations per second and bytes per second.

A product is bounded by two roofs. Its operations cannot be done faster than the peak of the unit
that its operands are for, and its weights cannot be read faster than a buffer of the same size is
read (Williams, Waterman, Patterson, "Roofline", CACM 2009). The percentage of the roofline is the
longer of these two times divided by the time that was taken. It leaves out activations and results,
so it errs against the contestant.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from megabit_kernels import huge_pages, native
from megabit_kernels.benchmark.clock import Call, seconds_of_one, stopwatch
from megabit_kernels.benchmark.machine import Machine

Operands = Literal["int8", "bfloat16", "float32"]
OPERANDS: tuple[Operands, ...] = ("int8", "bfloat16", "float32")

CACHES = 4
"""What is so many times larger than the last-level cache comes from memory."""
SMALLEST_BUFFER = 64 * 2**10
LARGEST_BUFFER = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
TRIALS, READ_TRIALS = 5, 20
PEAK_SECONDS = 0.2


@dataclass(frozen=True)
class Bound:
    """The shortest time that the roofs allow."""

    seconds: float
    roof: str
    """Which roof that is: ``memory``, ``cache`` or the operands' peak"""

    def percent(self, seconds: float) -> float:
        """How much of the roofline a product that took ``seconds`` reached."""
        return 100 * self.seconds / seconds


@dataclass(frozen=True)
class Roofline:
    """The measured roofs of one machine at one number of threads."""

    peaks: dict[Operands, float]
    """Operations per second"""
    bandwidths: dict[int, float]
    """Bytes read per second from a buffer of so many bytes, again and again; ascending"""
    cache_bytes: int
    source: str
    """What measured them: ``native`` or ``torch``"""

    @property
    def memory_bandwidth(self) -> float:
        """Of a buffer that no cache holds."""
        return self._bandwidth(max(self.bandwidths))

    @property
    def cache_bandwidth(self) -> float:
        """Of the largest buffer that fits the last-level cache with room to spare."""
        return self._bandwidth(self._size_for(self.cache_bytes // 2))

    def bound(
        self, operands: Operands, operations: int, weight_bytes: int, rotated_bytes: int
    ) -> Bound:
        """The roofline's bound for a product.

        Args:
            weight_bytes: of one weight.
            rotated_bytes: of all the weights that calls go through before one comes again.
        """
        size = self._size_for(rotated_bytes)
        reading = weight_bytes / self._bandwidth(size)
        computing = operations / self.peaks[operands]
        if computing >= reading:
            return Bound(computing, operands)
        return Bound(reading, "cache" if size <= self.cache_bytes else "memory")

    def at_best(self, other: "Roofline") -> "Roofline":
        """The higher of each roof as two measurements found it."""
        return Roofline(
            {name: max(peak, other.peaks[name]) for name, peak in self.peaks.items()},
            {size: max(rate, other.bandwidths[size]) for size, rate in self.bandwidths.items()},
            self.cache_bytes,
            self.source,
        )

    def _size_for(self, size: int) -> int:
        """The measured buffer that stands for one of ``size`` bytes: the next smaller one."""
        if size >= CACHES * self.cache_bytes:
            return max(self.bandwidths)
        smaller = [known for known in self.bandwidths if known <= size]
        return max(smaller, default=min(self.bandwidths))

    def _bandwidth(self, size: int) -> float:
        """Of a buffer of ``size`` bytes: no larger one can be read faster."""
        return max(rate for known, rate in self.bandwidths.items() if known >= size)


def measure_roofline(machine: Machine, device: torch.device) -> Roofline:
    """Measure all roofs, which takes a few seconds."""
    uses_native = _has_native(device)
    read = _read_natively if uses_native else _read_with_torch
    return Roofline(
        peaks={operands: _peak(operands, device) for operands in OPERANDS},
        bandwidths={size: read(size, device) for size in buffer_sizes(machine.cache_bytes, device)},
        cache_bytes=machine.cache_bytes,
        source="native" if uses_native else "torch",
    )


def buffer_sizes(cache_bytes: int, device: torch.device) -> list[int]:
    """From what the nearest cache holds to what none holds; dense where the last one ends."""
    sizes = [size for power in range(16) if (size := SMALLEST_BUFFER * 4**power) < cache_bytes // 4]
    sizes += [cache_bytes // 4, cache_bytes // 2, cache_bytes, 2 * cache_bytes]
    return [*sizes, max(CACHES * cache_bytes, LARGEST_BUFFER[device.type])]


def _peak(operands: Operands, device: torch.device) -> float:
    """Operations per second of the unit itself, or of the fastest product of large matrices."""
    if operands == "int8" and _has_native(device):
        return 1e9 * native.require().measure_dot_peak(PEAK_SECONDS)
    sizes = (4096, 8192) if device.type == "cuda" else (1024, 1536)
    return max(
        2 * size**3 / _least_s(_square_product(operands, size, device), device) for size in sizes
    )


def _square_product(operands: Operands, size: int, device: torch.device) -> Call:
    if operands == "int8":
        codes = torch.randint(-1, 2, (size, size), dtype=torch.int8, device=device)
        return lambda: torch._int_mm(codes, codes.t())
    values = torch.randn(size, size, dtype=getattr(torch, operands), device=device)
    return lambda: torch.mm(values, values.t())


def _has_native(device: torch.device) -> bool:
    return device.type == "cpu" and native.library() is not None


def _read_natively(size: int, device: torch.device) -> float:
    """Bytes per second that vector loads read from a buffer in huge pages."""
    buffer = huge_pages.empty([size], torch.uint8).fill_(1)
    repetitions = max(READ_TRIALS, min(1000, 2**28 // size))
    return 1e9 * native.require().measure_read_bandwidth(buffer, repetitions)


def _read_with_torch(size: int, device: torch.device) -> float:
    """Bytes per second of a sum or of a copy of one half to the other, whichever is faster."""
    buffer = torch.zeros(size // 4, device=device)
    half = len(buffer) // 2
    source, target = buffer[:half], buffer[half : 2 * half]
    return size / min(_least_s(buffer.sum, device), _least_s(lambda: target.copy_(source), device))


def _least_s(call: Call, device: torch.device) -> float:
    """Shortest time of one call among many."""
    call()
    runs = max(TRIALS, min(1000, round(0.02 / seconds_of_one(call, device))))
    return min(stopwatch([call], device, cache_bytes=0, count=runs).seconds(runs))
