"""Which pairs are slower than they should be: nobody knows what a network should do, but most of
its links do the same.

*Typical* is the median over ranks of the best that each has with anybody. So one slow link is an
outlier even among three, and of a host that is slow with everybody, the host is named.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megabit.doctor.finding import Finding, Severity
from megabit.doctor.pairs import Pair
from megabit.doctor.places import Cluster
from megabit.units import counted, rate_text, time_text

SLOW = 3.0
"""Below a third of the typical rate."""
LATE, LATE_S = 5.0, 1e-3
"""Five times the typical latency, and a millisecond more."""
MAX_NAMED = 10
"""Links in the words; the rest is in the measurements."""


@dataclass(frozen=True)
class Links:
    """All pairs of some ranks: one of each host, or those of a host."""

    between: str
    """``hosts``, or ``ranks`` of one host."""
    pairs: Sequence[Pair]

    @property
    def members(self) -> list[int]:
        """All ranks, in order."""
        return sorted({rank for pair in self.pairs for rank in (pair.first, pair.second)})

    @property
    def typical_rate(self) -> float:
        """Bytes a second."""
        best: defaultdict[int, float] = defaultdict(float)
        for pair in self.pairs:
            for rank in (pair.first, pair.second):
                best[rank] = max(best[rank], pair.rate_there, pair.rate_back)
        return statistics.median_high(best.values())

    @property
    def typical_latency_s(self) -> float:
        best: dict[int, float] = {}
        for pair in self.pairs:
            for rank in (pair.first, pair.second):
                best[rank] = min(best.get(rank, pair.latency_s), pair.latency_s)
        return statistics.median_low(best.values())

    @property
    def slowest_rate(self) -> float:
        """Of all pairs and directions."""
        return min(min(pair.rate_there, pair.rate_back) for pair in self.pairs)

    @property
    def longest_latency_s(self) -> float:
        return max(pair.latency_s for pair in self.pairs)

    def slow(self) -> list[Pair]:
        """Pairs with a slow direction, the slowest first."""
        limit = self.typical_rate / SLOW
        found = [pair for pair in self.pairs if min(pair.rate_there, pair.rate_back) < limit]
        return sorted(found, key=lambda pair: min(pair.rate_there, pair.rate_back))

    def late(self) -> list[Pair]:
        """Pairs with a long latency, the longest first."""
        typical = self.typical_latency_s
        limit = max(LATE * typical, typical + LATE_S)
        found = [pair for pair in self.pairs if pair.latency_s > limit]
        return sorted(found, key=lambda pair: -pair.latency_s)

    def corrected(self, again: Sequence[Pair]) -> "Links":
        """With pairs that have been measured once more."""
        new = {(pair.first, pair.second): pair for pair in again}
        return replace(
            self, pairs=[new.get((pair.first, pair.second), pair) for pair in self.pairs]
        )


def judge(links: Links, cluster: Cluster) -> Iterator[Finding]:
    """Ends that are slow with everyone, then links that are slow by themselves."""
    severity: Severity = "wrong" if links.between == "hosts" else "warning"
    slow, others = links.slow(), len(links.members) - 1
    typical = rate_text(links.typical_rate)
    ends = [
        rank
        for rank in links.members
        if others > 1 and sum(rank in (pair.first, pair.second) for pair in slow) == others
    ]
    for rank in ends:
        rates = [
            min(pair.rate_there, pair.rate_back)
            for pair in slow
            if rank in (pair.first, pair.second)
        ]
        yield Finding(
            severity,
            "network",
            f"{_name(links, cluster, rank)} is slow with all others: "
            f"{rate_text(statistics.median(rates))}, typical is {typical}",
            _advice(links, "its cable, port, interface and driver"),
        )
    alone = [pair for pair in slow if pair.first not in ends and pair.second not in ends]
    for pair in alone[:MAX_NAMED]:
        yield Finding(
            severity, "network", _slow_text(links, cluster, pair), _advice(links, "what is between")
        )
    if len(alone) > MAX_NAMED:
        yield Finding(severity, "network", f"{len(alone) - MAX_NAMED} more links are slow")
    for pair in links.late()[:MAX_NAMED]:
        yield Finding(
            "warning",
            "network",
            f"{_link(links, cluster, pair, '↔')}: a few bytes take {time_text(pair.latency_s)}, "
            f"typical is {time_text(links.typical_latency_s)}",
            _advice(links, "the way between them"),
        )


def _slow_text(links: Links, cluster: Cluster, pair: Pair) -> str:
    """The slower direction first, if they differ."""
    typical = f"typical is {rate_text(links.typical_rate)}"
    if pair.rate_back < pair.rate_there:
        pair = Pair(pair.second, pair.first, pair.latency_s, pair.rate_back, pair.rate_there)
    if pair.rate_back < SLOW * pair.rate_there:
        return f"{_link(links, cluster, pair, '↔')}: {rate_text(pair.rate_there)}, {typical}"
    return (
        f"{_link(links, cluster, pair, '→')}: {rate_text(pair.rate_there)}, the other way "
        f"{rate_text(pair.rate_back)}, {typical}"
    )


def _link(links: Links, cluster: Cluster, pair: Pair, arrow: str) -> str:
    ends = (_name(links, cluster, rank) for rank in (pair.first, pair.second))
    return f" {arrow} ".join(ends)


def _name(links: Links, cluster: Cluster, rank: int) -> str:
    return cluster.host_of(rank).name if links.between == "hosts" else cluster.name(rank)


def _advice(links: Links, what: str) -> str:
    if links.between == "hosts":
        return f"check {what} (ethtool, ibstat, switch counters), and that it is the fast interface"
    return "see what else runs on this host, and how its GPUs are connected (nvidia-smi topo -m)"


def figures(links: Links) -> Iterator[tuple[str, str]]:
    """Of all links."""
    yield (
        f"between {links.between}",
        f"typical {rate_text(links.typical_rate)}, {time_text(links.typical_latency_s)}; slowest "
        f"of {counted(len(links.pairs), 'pair')} {rate_text(links.slowest_rate)}, "
        f"{time_text(links.longest_latency_s)}",
    )
