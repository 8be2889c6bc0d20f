"""Whose fault it is, in words: from what a stuck rank has heard of the others.

Ranks that give no sign of life come first. Else it is who waits for nobody while all others wait
(a rank that sleeps or loops in its own code), else who has come less far than others.
"""

from dataclasses import dataclass

from megabit.faults.heartbeat import LOST, Listener, Sign

MAX_NAMED = 8
"""Ranks that are named; of more the number is told."""


@dataclass(frozen=True)
class Observer:
    """A rank that looks for the cause."""

    own: Sign
    size: int
    """Ranks of the world."""
    listener: Listener
    silence_s: float
    """After which silence means something: several heartbeats."""
    store_lost: bool = False
    """Whether the store does not answer any more: it lives on rank 0, or its launcher."""

    def missing(self) -> str | None:
        """Who has failed or gives no sign of life, as a clause; None if nobody."""
        listener, own = self.listener, self.own
        others = [rank for rank in range(self.size) if rank != own.rank]
        signs = {**listener.signs, own.rank: own}
        if self.store_lost:
            if 0 in signs and signs[0].ended is not None:
                return None  # it had something to wait for, too, and was done before this rank
            return (
                f"{_name(signs, 0)} or its launcher, or their host, is gone: the store at which "
                "ranks have met does not answer"
            )
        failed = [s for s in signs.values() if s.rank != own.rank and s.ended not in (None, "")]
        failed = [sign for sign in failed if sign.ended != LOST]
        if failed:
            return _list([f"{sign.name} has failed: {sign.ended}" for sign in failed])
        silent = listener.silent(others, self.silence_s)
        if silent:
            return _list(
                [
                    f"{_name(signs, rank)} was last heard {listener.silent_s(rank):.0f} s ago"
                    if rank in listener.heard_at
                    else f"{_name(signs, rank)} has given no sign of life for "
                    f"{listener.silent_s(rank):.0f} s or more"
                    for rank in silent
                ]
            )
        return None

    def cause(self) -> str | None:
        """Who is to blame that nothing moves, as a clause; None if nothing tells."""
        missing = self.missing()
        if missing is not None:
            return missing
        signs = {**self.listener.signs, self.own.rank: self.own}
        alive = [sign for sign in signs.values() if sign.ended is None]
        busy = [sign for sign in alive if not sign.waits]
        if busy and len(busy) < len(alive):
            return _list(
                [
                    f"{sign.name} waits for nobody, at step {sign.step + 1} ({sign.doing}), while "
                    "others wait for it"
                    for sign in busy
                ]
            )
        first = max(alive, key=lambda sign: sign.step, default=self.own).step
        behind = [sign for sign in alive if sign.step < first]
        if behind:
            return _list(
                [
                    f"{sign.name} is at step {sign.step + 1}, others at {first + 1}"
                    for sign in behind
                ]
            )
        return None

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one of its host that tells: the first that is alive."""
        here = [
            sign.rank
            for sign in self.listener.signs.values()
            if sign.host == self.own.host and sign.ended is None
        ]
        alive = set(here) - set(self.listener.silent(here, self.silence_s))
        return self.own.rank == min(alive | {self.own.rank})


def _name(signs: dict[int, Sign], rank: int) -> str:
    return signs[rank].name if rank in signs else f"rank {rank}"


def _list(parts: list[str]) -> str:
    more = len(parts) - MAX_NAMED
    return "; ".join([*parts[:MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])
