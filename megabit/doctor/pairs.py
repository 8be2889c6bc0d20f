"""Latency and rate between every pair of hosts, and of the ranks of a host.

Pairs play a *tournament*: in each round everybody has another partner, so that pairs of a round
share no end and do not disturb each other, and after n − 1 rounds (n even) all have met. One of two
leads: it tells the other what comes next, so that it alone decides when there is no time left.

    ping   a few bytes there and back: α, the latency, is half of the shortest time. Others are
           longer by what the processes had to wait for a core, which says nothing of the link
    there  n bytes, and an answer: they took 2α + n/β
    back   the same the other way round

with n growing until the time is up; β, the rate, is that of the largest n, the best of a few.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megabit.doctor.ranks import Ranks

STOP, PING, THERE, BACK = range(4)
PINGS = 20
SMALLEST = 2**18
"""Bytes. Less would pass in a burst where a link is limited by a token bucket, as in clouds."""
GROWTH = 4
REPEATS = 3
"""Of the largest size."""


@dataclass(frozen=True)
class Pair:
    """Two ranks and what is between them."""

    first: int
    second: int
    latency_s: float
    """Of a few bytes, one way; the shortest of a few."""
    rate_there: float
    """Bytes a second from ``first`` to ``second``."""
    rate_back: float

    def better(self, other: "Pair") -> "Pair":
        """The best of two measurements of the same pair."""
        return Pair(
            self.first,
            self.second,
            min(self.latency_s, other.latency_s),
            max(self.rate_there, other.rate_there),
            max(self.rate_back, other.rate_back),
        )


@dataclass(frozen=True)
class Effort:
    """How much is spent on pairs."""

    seconds: float
    """On each."""
    largest: int
    """Bytes of a message."""


def rounds_of(count: int) -> list[list[tuple[int, int]]]:
    """The tournament of ``count`` players: rounds of pairs that share no player.

    The first player stays and the others go round (the circle method); with an odd number, the
    partner of the one that is missing has a break.
    """
    players: list[int | None] = [*range(count), *[None] * (count % 2)]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        meeting = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(a, b) for a, b in meeting if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def measure(
    ranks: Ranks,
    clubs: Sequence[Sequence[int]],
    effort: Effort,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Pair]:
    """All pairs within each club; clubs share no ranks and play at the same time. Collective.

    Args:
        clubs: ranks.
        progress: is told which share is done.
    """
    tournaments = [(club, rounds_of(len(club))) for club in clubs if len(club) > 1]
    count = max((len(rounds) for _, rounds in tournaments), default=0)
    led: list[Pair] = []
    for number in range(count):
        progress(number / count)
        meetings = [
            (club[a], club[b])
            for club, rounds in tournaments
            for a, b in (rounds[number] if number < len(rounds) else ())
        ]
        led += _meet(ranks, meetings, effort)
        ranks.wait()
    return _gathered(ranks, led)


def measure_again(ranks: Ranks, pairs: Sequence[Pair], effort: Effort) -> list[Pair]:
    """Each of ``pairs``, the same on all ranks, once more with nobody else at work, as the better
    of both measurements. Collective."""
    led: list[Pair] = []
    for pair in pairs:
        led += _meet(ranks, [(pair.first, pair.second)], effort)
        ranks.wait()
    again = {(pair.first, pair.second): pair for pair in _gathered(ranks, led)}
    return [pair.better(again[pair.first, pair.second]) for pair in pairs]


def _gathered(ranks: Ranks, led: Sequence[Pair]) -> list[Pair]:
    found = ranks.gather([asdict(pair) for pair in led])
    return [Pair(**pair) for pairs in found for pair in pairs]


def _meet(ranks: Ranks, meetings: Sequence[tuple[int, int]], effort: Effort) -> list[Pair]:
    """This rank's meeting; what it has found, if it leads."""
    for first, second in meetings:
        if ranks.rank == first:
            return [_Leader(ranks, second, effort).measure()]
        if ranks.rank == second:
            _follow(ranks, first, effort)
    return []


class _Leader:
    """The end of a pair that decides what is sent."""

    def __init__(self, ranks: Ranks, peer: int, effort: Effort) -> None:
        self._ranks, self._peer, self._effort = ranks, peer, effort
        self._deadline = time.perf_counter() + effort.seconds
        self._buffer = _buffer(ranks, effort)
        self._latency_s = 0.0

    def measure(self) -> Pair:
        self._ping()  # whatever the first message sets up
        times = [self._ping()]
        quarter = self._deadline - 0.75 * self._effort.seconds
        while len(times) < PINGS and time.perf_counter() < quarter:
            times.append(self._ping())
        self._latency_s = min(times) / 2
        size, there, back = SMALLEST, self._there(SMALLEST), self._back(SMALLEST)
        repeats = 1
        while True:
            took = size / there + size / back
            left = self._deadline - time.perf_counter()
            if size < self._effort.largest and GROWTH * took < left:
                size *= GROWTH
                there, back, repeats = self._there(size), self._back(size), 1
            elif repeats < REPEATS and took < left:
                there, back = max(there, self._there(size)), max(back, self._back(size))
                repeats += 1
            else:
                break
        self._say(STOP)
        return Pair(self._ranks.rank, self._peer, self._latency_s, there, back)

    def _say(self, what: int, size: int = 0) -> None:
        self._ranks.send(torch.tensor([what, size], device=self._ranks.device), self._peer)

    def _ping(self) -> float:
        started = time.perf_counter()
        self._say(PING)
        self._ranks.receive(_header(self._ranks), self._peer)
        return time.perf_counter() - started

    def _there(self, size: int) -> float:
        self._say(THERE, size)
        started = time.perf_counter()
        self._ranks.send(self._buffer[:size], self._peer)
        self._ranks.receive(_header(self._ranks), self._peer)
        return self._rate(size, time.perf_counter() - started)

    def _back(self, size: int) -> float:
        started = time.perf_counter()
        self._say(BACK, size)
        self._ranks.receive(self._buffer[:size], self._peer)
        return self._rate(size, time.perf_counter() - started)

    def _rate(self, size: int, seconds: float) -> float:
        # Where latency is nearly all of it, it varies by more than what is left.
        return size / max(seconds - 2 * self._latency_s, seconds / 2, 1e-9)


def _follow(ranks: Ranks, leader: int, effort: Effort) -> None:
    buffer, header = _buffer(ranks, effort), _header(ranks)
    while True:
        what, size = ranks.receive(header, leader).tolist()
        if what == STOP:
            return
        if not 0 <= size <= len(buffer):
            raise ValueError(f"a message of {size} bytes was announced")
        if what == THERE:
            ranks.receive(buffer[:size], leader)
        ranks.send(buffer[:size] if what == BACK else header, leader)


def _header(ranks: Ranks) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=ranks.device)


def _buffer(ranks: Ranks, effort: Effort) -> Tensor:
    return torch.zeros(max(effort.largest, SMALLEST), dtype=torch.uint8, device=ranks.device)
