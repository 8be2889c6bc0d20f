"""How long calls take: wall time on a CPU, time of the device itself on a card."""

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Protocol

import torch

Call = Callable[[], object]

GRAPH_CALLS = 32
"""Calls in one CUDA graph: enough for the time between its two events to be that of the calls."""


class Stopwatch(Protocol):
    """Times a contestant's calls, which go through its distinct weights in turn."""

    def seconds(self, count: int) -> list[float]:
        """Durations of about ``count`` more calls."""


class HostStopwatch:
    """Wall time of each call."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = cycle(calls)

    def seconds(self, count: int) -> list[float]:
        durations = []
        for call in islice(self._calls, count):
            started = time.perf_counter()
            call()
            durations.append(time.perf_counter() - started)
        return durations


class CardStopwatch:
    """Device time of calls that one CUDA graph holds: launches, slower than small kernels, are out.

    A duration is that of the graph divided by the number of its calls. Before a graph with several
    weights the L2 cache is overwritten, so that each weight comes from memory.
    """

    def __init__(
        self, calls: Sequence[Call], device: torch.device, cache_bytes: int, count: int
    ) -> None:
        self._calls = min(count, GRAPH_CALLS)
        self._replay = _record(list(islice(cycle(calls), self._calls)))
        is_cold = len(calls) > 1
        self._flush = (
            torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device) if is_cold else None
        )

    def seconds(self, count: int) -> list[float]:
        return [self._time_one() for _ in range(-(-count // self._calls))]

    def _time_one(self) -> float:
        started = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        if self._flush is not None:
            self._flush.zero_()
        started.record()
        self._replay()
        ended.record()
        ended.synchronize()
        return started.elapsed_time(ended) / 1000 / self._calls


def stopwatch(
    calls: Sequence[Call], device: torch.device, cache_bytes: int, count: int
) -> Stopwatch:
    """The stopwatch for a device.

    Args:
        calls: one for each distinct weight; more than one mean cold caches.
        cache_bytes: of the last-level cache.
        count: of calls that will be timed at once.
    """
    if device.type == "cuda":
        return CardStopwatch(calls, device, cache_bytes, count)
    return HostStopwatch(calls)


def seconds_of_one(call: Call, device: torch.device) -> float:
    """Wall time of a single call until its result is there."""
    _synchronize(device)
    started = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(calls: Sequence[Call]) -> Call:
    """``calls`` as one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay
