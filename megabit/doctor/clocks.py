"""How far hosts' clocks are apart, by ping-pong.

A host is asked for its time; with t0 and t3 the asker's clock before and after, and t1 the answer,

    offset = t1 − (t0 + t3)/2,  known to ±(t3 − t0)/2

as NTP has it (RFC 5905, section 8), with no time between receiving and sending. Of several rounds
the quickest counts. Training does not depend on clocks; logs, file times and certificates do.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megabit.doctor.finding import Finding
from megabit.doctor.places import Cluster
from megabit.doctor.ranks import Ranks
from megabit.units import time_text

ROUNDS = 10
LIMIT_S = 1.0


@dataclass(frozen=True)
class Clock:
    """Of one host, against that of the first."""

    rank: int
    offset_s: float
    """Positive: ahead."""
    uncertainty_s: float


def measure(ranks: Ranks) -> list[Clock]:
    """One host after the other; collective."""
    first, *others = [host.speaker for host in ranks.cluster.hosts]
    clocks = []
    for other in others:
        if ranks.rank == first:
            clocks.append(_ask(ranks, other))
        elif ranks.rank == other:
            for _ in range(ROUNDS):
                ranks.receive(torch.zeros(1, dtype=torch.int64, device=ranks.device), first)
                ranks.send(torch.tensor([time.time_ns()], device=ranks.device), first)
    found = ranks.gather([[clock.rank, clock.offset_s, clock.uncertainty_s] for clock in clocks])
    return [Clock(*clock) for clock in found[first]]


def _ask(ranks: Ranks, other: int) -> Clock:
    rounds = []
    for _ in range(ROUNDS):
        question = torch.zeros(1, dtype=torch.int64, device=ranks.device)
        asked = time.time_ns()
        ranks.send(question, other)
        answer = int(ranks.receive(torch.zeros_like(question), other))
        answered = time.time_ns()
        rounds.append(estimate(asked, answer, answered))
    offset, uncertainty = min(rounds, key=lambda found: found[1])
    return Clock(other, offset, uncertainty)


def estimate(asked_ns: int, answer_ns: int, answered_ns: int) -> tuple[float, float]:
    """(offset of the other clock, uncertainty), in seconds."""
    middle, half = (asked_ns + answered_ns) / 2, (answered_ns - asked_ns) / 2
    return (answer_ns - middle) / 1e9, half / 1e9


def judge(clocks: Sequence[Clock], cluster: Cluster) -> Iterator[Finding]:
    """Clocks that are certainly too far off."""
    first = cluster.hosts[0].name
    for clock in clocks:
        if abs(clock.offset_s) - clock.uncertainty_s > LIMIT_S:
            side = "ahead of" if clock.offset_s > 0 else "behind"
            yield Finding(
                "warning",
                "clocks",
                f"{cluster.host_of(clock.rank).name}: its clock is "
                f"{time_text(abs(clock.offset_s))} {side} that of {first}",
                "run NTP (chrony) on all hosts; logs and the times of files will mislead",
            )


def figures(clocks: Sequence[Clock], cluster: Cluster) -> Iterator[tuple[str, str]]:
    """The worst of them."""
    if clocks:
        worst = max(clocks, key=lambda clock: abs(clock.offset_s))
        yield (
            "clocks",
            f"at most {time_text(abs(worst.offset_s))} ± {time_text(worst.uncertainty_s)} apart "
            f"({cluster.host_of(worst.rank).name})",
        )
