"""Contestants measured against each other, and what their times say.

They take turns, so that whatever slows the machine down for a while slows all of them down. In a
turn a contestant runs many times in a row; the first of these runs, which still finds the caches,
the branch predictors and the threads as another contestant left them, does not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megabit_kernels.benchmark.clock import Call, Stopwatch, seconds_of_one, stopwatch

TURNS = 5
LONG_TURNS = 3
"""Of a call that takes a second or more"""
MAX_RUNS = 400
"""In one turn"""


@dataclass(frozen=True)
class Timing:
    """Seconds of a call over all its runs."""

    median_s: float
    min_s: float
    p90_s: float
    runs: int

    @staticmethod
    def of(seconds: Sequence[float]) -> "Timing":
        ranks = torch.tensor([0.5, 0.9], dtype=torch.float64)
        median, p90 = torch.tensor(seconds, dtype=torch.float64).quantile(ranks).tolist()
        return Timing(median_s=median, min_s=min(seconds), p90_s=p90, runs=len(seconds))


def turns_of(call_s: float) -> int:
    """How often a contestant whose call takes ``call_s`` seconds has its turn."""
    return TURNS if call_s < 1 else LONG_TURNS


def runs_of(call_s: float, budget_s: float) -> int:
    """Runs in one turn, so that all turns together take about ``budget_s``."""
    return max(1, min(MAX_RUNS, round(budget_s / turns_of(call_s) / call_s)))


def time_in_turns(
    contestants: Mapping[str, Sequence[Call]],
    device: torch.device,
    cache_bytes: int,
    budget_s: float,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time every contestant, in turns.

    Args:
        contestants: the calls of each, one for each of its distinct weights; one only: hot caches.
        cache_bytes: of the last-level cache.
        budget_s: for each contestant, if its call is not longer than a part of that.

    Returns:
        The times, and, for a contestant that cannot do this product, why not.
    """
    watches: dict[str, Stopwatch] = {}
    runs: dict[str, int] = {}
    turns: dict[str, int] = {}
    failures: dict[str, str] = {}
    for name, calls in contestants.items():
        try:
            calls[0]()  # what is compiled, tuned or allocated at a first call is not the product
            call_s = seconds_of_one(calls[-1], device)
            runs[name], turns[name] = runs_of(call_s, budget_s), turns_of(call_s)
            watches[name] = stopwatch(calls, device, cache_bytes, runs[name])
        except Exception as error:  # one library's refusal must not cost the others' results
            failures[name] = first_line(error)
    seconds: dict[str, list[float]] = {name: [] for name in watches}
    for turn in range(TURNS):
        for name, watch in watches.items():
            if turn < turns[name]:
                durations = watch.seconds(runs[name])
                seconds[name] += durations[1:] or durations
    return {name: Timing.of(durations) for name, durations in seconds.items()}, failures


def first_line(error: Exception) -> str:
    """Of what an error says; its name if that is nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
