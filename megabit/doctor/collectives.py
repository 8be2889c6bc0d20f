"""Collectives over all ranks: whether they are right, and as fast as the pairs let expect.

A ring of p ranks with latency α and rate β between neighbours takes, for n bytes on each rank,

    all-reduce                2(p − 1)·α + 2(p − 1)/p · n/β
    all-gather, all-to-all     (p − 1)·α +  (p − 1)/p · n/β     (n: what is gathered, or swapped)

α is the longest latency and β the slowest rate of those that were measured, between hosts where
there are several: a ring is as slow as its slowest link. As in NVIDIA's nccl-tests, *algbw* is n
divided by the time, and *busbw* what went over each link: algbw times the factor of n/β.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megabit.doctor.finding import Finding
from megabit.doctor.links import Links
from megabit.doctor.places import Cluster
from megabit.doctor.ranks import Ranks
from megabit.reduce import all_gather, all_reduce, start_all_to_all
from megabit.units import rate_text, size_text, time_text

Kind = Literal["all-reduce", "all-gather", "all-to-all"]
SIZES = (8, 2**16, 2**20, 2**24)
"""Bytes."""
REPEATS = 3
MAX_S = 3.0
"""Sizes that one operation is expected to take longer for are left out."""
SLOW, SLOW_S = 3.0, 10e-3
"""Three times what is expected, and at least so much more: a ring of processes that share cores
waits for each of them to be given one."""


NO_USE = 1 / 3
"""Below this share of what was expected, a slow collective would not be seen."""


@dataclass(frozen=True)
class Timing:
    """Of one collective."""

    kind: Kind
    num_bytes: int
    seconds: float
    """Of the slowest rank, the best of a few."""
    expected_s: float | None
    """None where no pair was measured."""
    busbw: float
    """Bytes a second."""
    wrong_on: list[int]
    """Ranks that got a wrong result."""

    @property
    def ratio(self) -> float | None:
        """Time against what was expected."""
        return None if self.expected_s is None else self.seconds / self.expected_s

    @property
    def can_be_judged(self) -> bool:
        """Whether what was expected is of use."""
        return self.ratio is not None and self.ratio >= NO_USE


def expected_s(kind: Kind, p: int, num_bytes: float, alpha: float, beta: float) -> float:
    """Time of a ring.

    Args:
        p: ranks.
        alpha: seconds.
        beta: bytes a second.
    """
    trips = 2 if kind == "all-reduce" else 1
    return trips * ((p - 1) * alpha + (p - 1) / p * num_bytes / beta)


def measure(ranks: Ranks, links: Links | None, largest: int) -> list[Timing]:
    """All kinds and sizes up to ``largest`` bytes; collective."""
    p, timings = ranks.world.size, []
    if p == 1:
        return []
    cases: list[tuple[Kind, int]] = [("all-reduce", n) for n in SIZES if n <= largest]
    cases += [("all-gather", min(2**20, largest)), ("all-to-all", min(2**20, largest))]
    for kind, size in cases:
        # All ranks have the same links, so they leave out the same.
        expected = (
            None
            if links is None
            else expected_s(kind, p, size, links.longest_latency_s, links.slowest_rate)
        )
        if expected is None or expected < MAX_S:
            timings.append(_timed(ranks, kind, size, expected))
    return timings


def _timed(ranks: Ranks, kind: Kind, size: int, expected: float | None) -> Timing:
    p = ranks.world.size
    run = {"all-reduce": _all_reduce, "all-gather": _all_gather, "all-to-all": _all_to_all}[kind]
    times, is_right = [], True
    for _ in range(1 + REPEATS):
        call, right = run(ranks, size)
        ranks.wait()
        started = time.perf_counter()
        result = call()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        own = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=ranks.device)
        times.append(float(all_reduce(own, ranks.world, "max")))
        is_right &= torch.equal(result, right)
    seconds = min(times[1:])
    share = (2 if kind == "all-reduce" else 1) * (p - 1) / p
    wrong_on = [rank for rank, right in enumerate(ranks.gather(is_right)) if not right]
    return Timing(kind, size, seconds, expected, share * size / seconds, wrong_on)


Case = tuple[Callable[[], Tensor], Tensor]
"""The call, and what it must give."""


def _all_reduce(ranks: Ranks, size: int) -> Case:
    """fp32, of integers whose sum it holds exactly in any order, for up to 4,000 ranks."""
    p = ranks.world.size
    values = torch.arange(size // 4, dtype=torch.float32, device=ranks.device) % 1000
    own = values + ranks.rank
    return (lambda: all_reduce(own, ranks.world)), p * values + p * (p - 1) // 2


def _all_gather(ranks: Ranks, size: int) -> Case:
    """uint8, as codes travel."""
    p = ranks.world.size
    rows = _rows(ranks, size)
    own = rows[ranks.rank : ranks.rank + 1]
    return (lambda: all_gather(own, ranks.world)), rows[:p]


def _all_to_all(ranks: Ranks, size: int) -> Case:
    """uint8, as compressed gradients travel: row ``2s + r`` of all goes from rank s to rank r."""
    p = ranks.world.size
    rows = _rows(ranks, size)
    own = rows[2 * ranks.rank : 2 * ranks.rank + p].contiguous()
    right = rows[ranks.rank : ranks.rank + 2 * p : 2]
    return (lambda: start_all_to_all(own, ranks.world).wait()), right


def _rows(ranks: Ranks, size: int) -> Tensor:
    """uint8 ``[3p, size/p]``, neighbours of which differ."""
    p = ranks.world.size
    columns = torch.arange(max(size // p, 1), device=ranks.device)
    return ((columns + 7 * torch.arange(3 * p, device=ranks.device)[:, None]) % 251).byte()


def judge(timings: Sequence[Timing], cluster: Cluster) -> Iterator[Finding]:
    """Wrong results, and what takes much longer than the links let expect."""
    for timing in timings:
        if timing.wrong_on:
            yield Finding(
                "wrong",
                "collectives",
                f"{cluster.names(timing.wrong_on)}: wrong result of an {timing.kind} of "
                f"{size_text(timing.num_bytes)}",
                "do not train here: test memory, GPU and network of these; update NCCL",
            )
    slow = [
        timing
        for timing in timings
        if timing.expected_s is not None
        and timing.seconds > max(SLOW * timing.expected_s, timing.expected_s + SLOW_S)
    ]
    if slow:
        worst = max(slow, key=lambda timing: timing.ratio or 0)
        yield Finding(
            "warning",
            "collectives",
            f"{worst.kind} of {size_text(worst.num_bytes)} takes {time_text(worst.seconds)}, "
            f"{worst.ratio:.1f} times as long as the links let expect "
            f"({time_text(worst.expected_s or 0)})",
            "look for links that are slow only when all are busy, for too few cores, and for NCCL "
            "settings that force an algorithm or a transport (NCCL_ALGO, NCCL_P2P_DISABLE, …)",
        )
    fast = [t for t in timings if t.expected_s is not None and not t.can_be_judged]
    if fast:
        least = min(fast, key=lambda timing: timing.ratio or 0)
        yield Finding(
            "note",
            "collectives",
            f"{least.kind} of {size_text(least.num_bytes)} takes {time_text(least.seconds)}, far "
            f"below the {time_text(least.expected_s or 0)} that the links let expect: whether it "
            f"is slow cannot be told{f', nor of {len(fast) - 1} more' if len(fast) > 1 else ''}",
            "measure again while nothing else runs here",
        )


def rows(timings: Sequence[Timing]) -> Iterator[tuple[str, ...]]:
    """Operation, bytes, time, expected time, ratio (``?``: of no use), algbw, busbw: for a
    table."""
    for timing in timings:
        yield (
            timing.kind,
            size_text(timing.num_bytes),
            time_text(timing.seconds),
            "" if timing.expected_s is None else time_text(timing.expected_s),
            ""
            if timing.ratio is None
            else f"{timing.ratio:.1f}" + "?" * (not timing.can_be_judged),
            rate_text(timing.num_bytes / timing.seconds),
            rate_text(timing.busbw),
        )
