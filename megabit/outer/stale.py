"""Stale-synchronous training: islands are jobs of their own, and a process owns the outer weights.

Each island has a world, a ``run.dir`` and checkpoints of its own; its ranks connect to the owner
(``owner``), which holds the *anchor*, the outer weights after so many closed rounds, and the outer
momentum, both as whole logical tensors: islands may have different layouts. A round r of an island:

    from the anchor → H steps → bring the rows that this rank counts → wait until round
    r + 1 − staleness is closed → take the newest anchor, less what the island itself has done in
    rounds that are not closed yet: anchor − Σ changes → masters → γ and codes, made anew

A round is closed once every island that takes part has brought it; then the owner makes DiLoCo's
outer step (``outer_step``) of the mean. With staleness 0 an island brings its weights as they are,
nothing is ever ahead, and training is DiLoCo's *bit by bit* (``diloco``). With more, it brings the
change since its round began, and a fast island may be so many rounds ahead of the slowest.

Who is late or dead does not stop the others: after ``outer.patience_s``, or when the connection of
one of its ranks ends, its island is dropped, and rounds close without it. When it brings a round
after all, that is too late: it gets the newest anchor and goes on from there, with the moments that
it has. So does an island that is started again, if it is not in the round that is open.

If the owner is lost, the ranks of an island try together to find it again, ``faults.retries`` times
``faults.retry_pause_s`` apart, and go on where they were; then they end. With staleness 0 an island
that resumes from a checkpoint within the round that is open, or whose owner was started again from
its file, goes on with the same bits. Other restarts cost up to what the island has done since it
last had an anchor; exactness is not promised then.

A rank keeps, for staleness above 0, 4 bytes for each weight that it updates for where its round
began, and 4 for each of its rounds that are not closed; and 4 while it takes an anchor.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from megabit.config import Config
from megabit.data_parallel import Piece, ZeroOptimizer
from megabit.errors import RunError, UserError
from megabit.outer.frames import FrameError
from megabit.outer.hello import Hello, Region, agreed_settings
from megabit.outer.owner_link import Delivery, Go, OwnerLink, OwnerRefused
from megabit.outer.tensors import outer_tensors, publish
from megabit.reduce import any_rank, broadcast, first_problem

logger = logging.getLogger("megabit.outer")

T = TypeVar("T")

TOKEN_BYTES = 16


@dataclass(frozen=True)
class Meeting:
    """What the island wants of the owner."""

    brings: bool
    """Whether it brings its round, or only wants to know how those before have ended."""
    is_whole: bool
    """Whether the round has all of its steps."""
    version: int
    """Rounds that must be closed for it to go on."""


class Stale:
    """A rank's part in a stale-synchronous run; see ``opening.Outer``.

    Args:
        say: told what happens between this island and the owner, a line at a time; default: the
            log of ``megabit.outer``, on the main rank.
    """

    def __init__(
        self, config: Config, optimizer: ZeroOptimizer, say: Callable[[str], None] | None = None
    ) -> None:
        self._config, self._optimizer, self._mesh = config, optimizer, optimizer.mesh
        self._say = say or (logger.warning if self._mesh.is_main else logger.debug)
        self._tensors = outer_tensors(optimizer)
        self._address = str(config.outer.owner)
        self._link: OwnerLink | None = None
        self._round = 0
        self._base, self._base_id = 0, ""
        """The anchor that the round began with, or was the newest then."""
        self._is_fresh = True
        """Whether the masters were those that all islands begin with, when it was to join."""
        self._start: list[Tensor] = []
        """Masters when the round began, for a staleness above 0."""
        self._changes: dict[int, list[Tensor]] = {}
        """What this island has done in rounds that are not in that anchor."""
        self._delivered: set[int] = set()
        """Those of them that have been brought on this connection."""

    def begin(self) -> None:
        """Join the run with the present masters, which all islands begin with; see
        ``opening.Outer``. An island that comes late gets the newest anchor.

        Raises:
            UserError: the owner has other settings, or will not have the island.
            RunError: there is no owner.
        """
        self._let_go()
        self._round, self._base, self._base_id = 0, 0, ""
        self._changes.clear()
        self._is_fresh = True
        self._connect()

    def resume(self, state: Mapping[str, Any]) -> bool:
        """Join it again, after a checkpoint with that ``state`` has been loaded; whether masters
        have changed and are published: so it is if the others have gone on.

        Raises:
            UserError: as ``begin``.
            RunError: as ``begin``.
        """
        self._let_go()
        self._round, self._base = int(state.get("round", 0)), int(state.get("base", 0))
        # Ahead of the anchor, masters are nothing without the changes that were not kept.
        is_at_anchor = self._base == self._round and self._config.outer.staleness == 0
        self._base_id = str(state.get("base_id", "")) if is_at_anchor else ""
        self._changes.clear()
        self._is_fresh = False
        return self._connect()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for ``resume``."""
        return {"round": self._round, "base": self._base, "base_id": self._base_id}

    def after_step(self, step: int) -> bool:
        """See ``opening.Outer``; with the owner, and collective over the island only. ``begin`` or
        ``resume`` comes before the first step.

        Raises:
            RunError: the owner is lost, or will not have the island any more.
        """
        if step % self._config.outer.inner_steps:
            return False
        behind = self._round + 1 - self._config.outer.staleness
        return self._meet(Meeting(True, True, max(behind, 0)))

    def conclude(self, step: int) -> bool:
        """See ``opening.Outer``: bring what is left, wait for what was brought, and say goodbye.

        Islands that have done as many rounds have the same weights then. The newest are the
        owner's.
        """
        brings = step % self._config.outer.inner_steps != 0
        has_changed = False
        if brings or self._changes:
            has_changed = self._meet(Meeting(brings, False, self._round + brings))
        problem = self._first_problem(self._try(self._say_goodbye)[1])
        if problem is not None:
            self._say(f"the owner at {self._address} was not told that this was the end: {problem}")
        self._let_go()
        return has_changed

    def close(self) -> None:
        """Leave without a goodbye, as a run does that is to go on later."""
        self._let_go()

    def pieces(self, owned: bool = False) -> Iterator[Piece]:
        """See ``opening.Outer``: the owner has everything."""
        return iter(())

    def expected_bytes(self, step: int, is_last: bool = False) -> float:
        """See ``opening.Outer``."""
        is_due = step % self._config.outer.inner_steps == 0
        return self._owned_bytes() if is_due or is_last else 0

    def meeting(self) -> str:
        """See ``opening.Outer``: the owner says it."""
        return ""

    def _owned_bytes(self) -> int:
        return sum(values.nbytes for values in self._owned(self._masters()))

    def _connect(self) -> bool:
        """Join; whether the island had to take the newest anchor."""
        go = self._talk(None)
        if go.is_reset:
            self._say(
                f"island {self._config.outer.island} goes on from the weights of the owner at "
                f"{self._address} after {go.version} rounds"
            )
            return self._take(go)
        self._base, self._base_id = go.version, go.id
        self._begin_round(go.round)
        return False

    @torch.no_grad()
    def _meet(self, meeting: Meeting) -> bool:
        """Bring a round and take the newest anchor; whether there was one."""
        if meeting.brings and self._config.outer.staleness:
            self._changes[self._round] = [
                start.sub_(weights)
                for start, weights in zip(self._start, self._masters(), strict=True)
            ]
        return self._take(self._talk(meeting))

    @torch.no_grad()
    def _take(self, go: Go) -> bool:
        """Go on with what the owner says; whether masters have changed, and are published."""
        kept = {} if go.is_reset else self._changes
        self._changes = {number: kept[number] for number in sorted(kept) if number >= go.version}
        self._delivered &= self._changes.keys()
        if go.values is not None:
            self._optimizer.publisher.settle()  # what still travels may be the masters' own memory
            for number, (weights, anchor) in enumerate(
                zip(self._masters(), go.values, strict=True)
            ):
                weights.copy_(anchor.view_as(weights))
                for change in self._changes.values():
                    weights.sub_(change[number])
            publish(self._optimizer, self._tensors)
        self._base, self._base_id = go.version, go.id
        self._begin_round(go.round)
        return go.values is not None

    def _begin_round(self, number: int) -> None:
        self._round = number
        if self._config.outer.staleness:
            self._start = [weights.clone() for weights in self._masters()]

    # With the owner.

    def _talk(self, meeting: Meeting | None) -> Go:
        """Meet, or only join, on all ranks of the island; again if the owner gets lost.

        So ranks go on with the same answer, or none of them does.
        """
        faults, tries = self._config.faults, 0
        while True:
            # All ranks have a connection, or none has.
            token = self._token() if self._link is None else ""
            with self._mesh.outer.waiting():
                go, own_problem, is_final = self._try(partial(self._exchange, token, meeting))
            problem = self._first_problem(own_problem)
            if problem is None:
                assert go is not None
                return go
            self._let_go()
            if any_rank(is_final, self._mesh.island, self._mesh.device):
                island = self._config.outer.island
                reason = f"outer.owner: {self._address} refuses island {island}: {problem}"
                raise UserError(reason) if meeting is None else RunError(reason)
            if tries == faults.retries:
                raise RunError(f"outer.owner: {self._address} is lost: {problem}")
            tries += 1
            self._say(
                f"the owner of the outer weights at {self._address}: {problem}; "
                f"try {tries} of {faults.retries} in {faults.retry_pause_s:g} s"
            )
            time.sleep(faults.retry_pause_s)

    def _exchange(self, token: str, meeting: Meeting | None) -> Go:
        """This rank's part of it."""
        if self._link is None:
            self._delivered.clear()
            self._link = OwnerLink(self._address, self._hello(token))
            go = self._link.join(self._owned(self._masters()))
            if meeting is None or go.is_reset:
                return go
        assert meeting is not None
        for delivery in self._deliveries(meeting):
            self._link.deliver(delivery)
            self._delivered.add(delivery.round)
            self._mesh.outer.count(sum(x.nbytes for x in delivery.values), "outer")
        return self._link.go_on(self._round + meeting.brings, meeting.version, self._base)

    def _deliveries(self, meeting: Meeting) -> Iterator[Delivery]:
        """What has not been brought on this connection."""
        for number, change in self._changes.items():
            if number not in self._delivered and number != self._round:
                yield Delivery(number, True, True, self._owned(change))
        if meeting.brings:
            is_change = self._base != self._round
            values = self._changes[self._round] if is_change else self._masters()
            yield Delivery(self._round, is_change, meeting.is_whole, self._owned(values))

    def _hello(self, token: str) -> Hello:
        island, outer = self._mesh.island, self._config.outer
        pieces = [tensor.piece({}, owned=True) for tensor in self._tensors if tensor.owned]
        return Hello(
            settings=agreed_settings(self._config),
            island=outer.island,
            rank=island.rank,
            ranks=island.size,
            token=token,
            gives=tuple(Region.of(piece.name, piece.index) for piece in pieces),
            takes=tuple(Region.of(t.name, t.piece({}).index) for t in self._tensors),
            round=self._round,
            base=self._base,
            base_id=self._base_id,
            is_fresh=self._is_fresh and not self._base_id,
        )

    def _say_goodbye(self) -> None:
        if self._link is None:
            raise ConnectionError("there is no connection")
        self._link.finish()

    def _try(self, talk: Callable[[], T]) -> tuple[T | None, str | None, bool]:
        """What ``talk`` returns, or what went wrong and whether that is final."""
        try:
            return talk(), None, False
        except OwnerRefused as refusal:
            return None, str(refusal), refusal.is_final
        except (FrameError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return None, reason or type(error).__name__, False

    def _first_problem(self, problem: str | None) -> str | None:
        return first_problem(problem, self._mesh.island, self._mesh.device)

    def _token(self) -> str:
        """Of a try to connect: random, and the same on all ranks of the island."""
        own = torch.tensor(list(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
        return bytes(broadcast(own.to(self._mesh.device), 0, self._mesh.island).tolist()).hex()

    def _let_go(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _masters(self) -> list[Tensor]:
        """``[rows, k]`` of each tensor that this rank updates; views."""
        return [tensor.weights for tensor in self._tensors]

    def _owned(self, values: list[Tensor]) -> list[Tensor]:
        """Of ``values [rows, k]`` of each tensor, the rows that this rank counts."""
        return [
            tensor.owned_of(x)
            for tensor, x in zip(self._tensors, values, strict=True)
            if tensor.owned
        ]
