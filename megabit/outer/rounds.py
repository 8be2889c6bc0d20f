"""Which islands a round waits for, and which islands wait for a round; the rules alone.

Round t of an island is what it does between its t-th meeting and the next. ``version`` rounds are
closed; the next one, number ``version``, is open. It closes when every island that takes part has
delivered it. An island that has delivered round r may go on when ``version >= r + 1 - staleness``;
else it waits, and then those it waits for are on the clock: who keeps others waiting longer than
``patience_s`` is dropped, and the round closes without it. So is who leaves. What it had delivered
before still counts. A dropped island that comes again takes part from the open round on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar, get_args

Term = TypeVar("Term")
State = Literal["expected", "live", "dropped", "finished"]
"""Not here yet, but waited for; taking part; not waited for; at its end."""
STATES: tuple[State, ...] = get_args(State)


@dataclass
class Island(Generic[Term]):
    """What is known of an island."""

    state: State
    since: float
    """When the others began to expect something of it, in seconds."""
    delivered: dict[int, Term] = field(default_factory=dict)
    """What it has brought to rounds that are not closed yet, by round."""
    awaits: int | None = None
    """The version that it waits for, if it does."""
    too_late: int = 0
    """Rounds that it has brought after they were closed."""

    @property
    def takes_part(self) -> bool:
        """Whether rounds wait for it."""
        return self.state in ("expected", "live")


class Rounds(Generic[Term]):
    """The islands of a run and the round that is open. Times are of a clock that never goes back.

    Args:
        version: rounds closed before.
        states: of the islands then. All that had not finished are expected again, dropped ones,
            too: who was stopped together with the owner comes back when it does.
    """

    def __init__(
        self,
        islands: int,
        staleness: int,
        patience_s: float,
        now: float,
        version: int = 0,
        states: Iterable[State] = (),
    ) -> None:
        before = [*states] or ["expected"] * islands
        self.islands: list[Island[Term]] = [
            Island("finished" if state == "finished" else "expected", now) for state in before
        ]
        self.staleness, self.patience_s = staleness, patience_s
        self.version = version
        self._blocked_since: float | None = None

    def join(self, number: int, round_: int, is_known: bool, now: float) -> bool:
        """An island is here, in round ``round_``; whether it may go on with that.

        If not, it has to begin the open round with the newest weights.

        Args:
            is_known: whether what it began with is a state of this run that is not newer.
        """
        island = self.islands[number]
        keeps = is_known and self.version <= round_ <= self.version + self.staleness
        if not keeps:
            island.delivered.clear()
        island.state, island.since, island.awaits = "live", now, None
        return keeps

    def deliver(self, number: int, round_: int, term: Term) -> bool:
        """An island has brought what a round needs of it; False if it is too late.

        Raises:
            ValueError: it cannot be that far.
        """
        island = self.islands[number]
        if round_ > self.version + self.staleness:
            raise ValueError(f"round {round_} is not to be delivered yet")
        if island.state != "live" or round_ < self.version:
            island.too_late += 1
            return False
        island.delivered[round_] = term
        return True

    def ask(self, number: int, version: int, now: float) -> None:
        """An island wants to go on, once so many rounds are closed; ``granted`` says when."""
        self.islands[number].awaits = version
        self._note_blocked(now)

    def leave(self, number: int, now: float, is_finished: bool = False) -> None:
        """No round waits for an island any more."""
        island = self.islands[number]
        island.state = "finished" if is_finished else "dropped"
        island.awaits = None
        self._note_blocked(now)

    def ready(self) -> Mapping[int, Term] | None:
        """What the open round is made of, by island in order, if it can be closed."""
        taking_part = [island for island in self.islands if island.takes_part]
        if not taking_part or any(self.version not in i.delivered for i in taking_part):
            return None
        return {
            number: island.delivered[self.version]
            for number, island in enumerate(self.islands)
            if self.version in island.delivered
        }

    def advance(self, now: float) -> None:
        """The open round is closed."""
        for island in self.islands:
            island.delivered.pop(self.version, None)
        self.version += 1
        self._blocked_since = None
        self._note_blocked(now)

    def granted(self) -> list[int]:
        """Islands that need not wait any more, each told once. One of them that is ``dropped`` is
        to begin the open round (``join``)."""
        islands = [
            number
            for number, island in enumerate(self.islands)
            if island.awaits is not None
            and (island.awaits <= self.version or island.state == "dropped")
        ]
        for number in islands:
            self.islands[number].awaits = None
        return islands

    def overdue(self, now: float) -> list[int]:
        """Islands that have kept others waiting for too long; to be dropped (``leave``)."""
        if self._blocked_since is None:
            return []
        return [
            number
            for number, island in enumerate(self.islands)
            if island.takes_part
            and self.version not in island.delivered
            and now - max(self._blocked_since, island.since) > self.patience_s
        ]

    @property
    def is_over(self) -> bool:
        """Whether all islands are at their end."""
        return all(island.state == "finished" for island in self.islands)

    def _note_blocked(self, now: float) -> None:
        is_blocked = any(i.awaits is not None and i.awaits > self.version for i in self.islands)
        if not is_blocked:
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now
