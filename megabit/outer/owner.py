"""The process that owns the outer weights of a stale-synchronous run (``megabit owner``).

    a rank connects → hello (``hello``), checked → the last rank of its island: join (``rounds``)
      round: what the island has done, part by part → the last rank's part completes a term
        → every island that takes part has delivered: the next anchor (``anchor``), saved
      next: may the island go on? When it may, all of its ranks are sent the same anchor

Each connection has a thread; what they know together is guarded by one lock, and values travel
outside of it. An island is all of its ranks or nothing: what one of them does, the others must do
within ``TOGETHER_S``, and if one leaves, the island does. Whoever says what makes no sense is told
why and let go; nothing that comes in is believed before it is checked.

Anyone who can connect can take part: there is no authentication. So it listens on a loopback
address unless told otherwise, and then the network must be private.
"""

import math
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from megabit.checkpoint.source import logical_tensors
from megabit.config import Config
from megabit.errors import RunError, UserError
from megabit.outer.anchor import Holds, OuterWeights, Term, empty_weights
from megabit.outer.frames import Channel, Closed, Frame, FrameError
from megabit.outer.hello import MAX_ROUND, Hello, agreed_settings, tiling_problem
from megabit.outer.rounds import Rounds
from megabit.outer.sessions import INITIAL, Answer, Ask, Assembly, Link, Refused, Session

HELLO_S = 10.0
"""How long a new connection may take to say who it is."""
TOGETHER_S = 120.0
"""How long the ranks of an island wait for each other here, while none of them sends anything."""
TICK_S = 0.1
GONE_S = 0.5
"""How soon it is seen that a rank which waits is gone."""
CLOSING_S = 5.0
"""For the last answers to be sent."""
MAX_CONNECTIONS = 4096
REPORT_S = 10.0
"""How often rounds are reported that are like the one before."""


class Owner:
    """Keeps the islands of a run together.

    Args:
        config: of the run; its ``outer`` says how.
        state: where the outer weights are kept; it goes on from there if it exists.
        save_every: rounds from one save to the next. With 1, no island has ever seen what the
            file does not have.
        report: told what happens, a line at a time, by any thread.

    Raises:
        UserError: ``state`` is damaged, belongs to another run, or cannot be written.
    """

    def __init__(
        self,
        config: Config,
        state: Path,
        save_every: int = 1,
        report: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outer = config.outer
        self._settings = agreed_settings(config)
        self._shapes = {name: x.shape for name, x in logical_tensors(config.model).items()}
        self._state, self._save_every = state, save_every
        self._report, self._clock = report, clock
        self._lock = threading.Lock()
        self._connections: set[Channel] = set()
        self._sessions: dict[int, Session] = {}
        self._weights: OuterWeights | None = None
        self._is_closing = False
        self._reported: tuple[float, list[int]] = (-math.inf, [])
        remembered = config.outer.staleness + 1
        outer = config.outer
        version, states = 0, None
        if state.exists():
            self._weights, states = OuterWeights.load(
                state, self._settings, self._shapes, remembered
            )
            version = self._weights.anchor.version
            report(f"goes on after round {version} from {state}")
        elif not os.access(state.parent, os.W_OK):
            raise UserError(f"--state: cannot write to {state.parent}; name another file")
        self._remembered = remembered
        self.rounds: Rounds[Term] = Rounds(
            outer.islands, outer.staleness, outer.patience_s, clock(), version, states or ()
        )

    def serve(self, listener: socket.socket, stop: threading.Event) -> bool:
        """Serve until all islands have finished (True), or ``stop`` is set (False).

        Raises:
            RunError: the weights cannot be written at the end.
        """
        listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not stop.is_set() and not self.rounds.is_over:
                if selector.select(TICK_S):
                    self._accept(listener)
                with self._lock:
                    self._tick(self._clock())
        until = self._clock() + CLOSING_S
        while self.rounds.is_over and self._connections and self._clock() < until:
            time.sleep(TICK_S / 10)
        with self._lock:
            self._is_closing = True  # who loses its connection now has not left
            for channel in self._connections:
                channel.close()
            if self._weights is not None and not self._save(self._weights):
                raise RunError(f"{self._state}: could not be written; it is of an older round")
        return self.rounds.is_over

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError:  # it has gone already, or there are no descriptors left
            time.sleep(TICK_S)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            sock.close()
            return
        channel = Channel(sock)
        with self._lock:
            self._connections.add(channel)
        threading.Thread(target=self._serve, args=(channel, address[0]), daemon=True).start()

    def _serve(self, channel: Channel, address: str) -> None:
        """A connection from its first frame to its end."""
        link: Link | None = None
        why = "its connection has ended"
        refusal: Refused | None = None
        try:
            hello = Hello.parse(channel.receive(HELLO_S), self._settings, self._shapes)
            with self._lock:
                link = self._enter(Link(channel, hello))
            while self._answer(link):
                frame = channel.receive()
                while frame.kind == "round":
                    self._receive(link, frame)
                    frame = channel.receive()
                self._handle(link, frame)
        except Closed:
            pass
        except Refused as error:
            refusal = error
        except FrameError as error:
            refusal = Refused(str(error))
        except OSError as error:
            why = f"its connection is broken ({error.strerror or error})"
        finally:
            if refusal is not None:
                why = f"it was refused: {refusal}"
                with suppress(OSError):
                    reason = str(refusal)[:1000]
                    channel.send("refuse", reason=reason, is_final=refusal.is_final)
            channel.close(is_polite=refusal is not None)
            with self._lock:
                self._connections.discard(channel)
                if link is not None:
                    self._leave(link, why)
                elif refusal is not None:
                    self._report(f"{address}: {why}")

    # What a rank says. Each method is called by its connection's thread.

    def _handle(self, link: Link, frame: Frame) -> None:
        """What a rank wants an answer to."""
        match frame.expect("initial", "next", "finish").kind:
            case "initial":
                self._receive(link, frame)
            case "next":
                ask = Ask("next", *(frame.integer(n, 0, MAX_ROUND) for n in ("round", "version")))
                with self._lock:
                    self._ask(link, ask, frame.integer("has", 0, MAX_ROUND))
            case "finish":
                with self._lock:
                    self._ask(link, Ask("finish", 0, 0), 0)

    def _receive(self, link: Link, frame: Frame) -> None:
        """A part of an island's term, or of its initial weights."""
        holds: Holds = "weights"
        key, is_whole = INITIAL, True
        if frame.kind == "round":
            key = frame.integer("round", 0, MAX_ROUND)
            holds = "change" if frame.flag("is_change") else "weights"
            is_whole = frame.flag("is_whole")
        with self._lock:
            session = self._session_of(link)
            if key not in session.assemblies:
                if not session.is_complete or len(session.assemblies) > self._outer.staleness + 1:
                    raise FrameError(f"{frame.kind}: comes out of turn")
                session.assemblies[key] = Assembly(empty_weights(self._shapes), (holds, is_whole))
            assembly = session.assemblies[key]
            if assembly.about != (holds, is_whole) or link.hello.rank in assembly.ranks:
                raise FrameError(f"{frame.kind}: does not fit what came before")
        gives, broken = link.hello.gives, None
        parts = link.channel.values(frame, [region.shape for region in gives])
        for region, part in zip(gives, parts, strict=True):
            if not part.isfinite().all():
                broken = broken or region.name
            assembly.values[region.name][region.index] = part  # nobody else's elements
            session.since = max(session.since, self._clock())
        if broken is not None:
            raise FrameError(f"{frame.kind}: {broken} has what is not a finite number")
        with self._lock:
            session = self._session_of(link)
            assembly.ranks.add(link.hello.rank)
            if len(assembly.ranks) < session.hello.ranks:
                return
            del session.assemblies[key]
            if frame.kind == "initial":
                self._begin(session, assembly.values)
            else:
                self._deliver(session, key, Term(holds, assembly.values, is_whole))

    def _answer(self, link: Link) -> bool:
        """Send what a rank waits for, once it is there; whether more is to come from it."""
        while True:
            try:
                answer = link.answers.get(timeout=GONE_S)
                break
            except queue.Empty:
                if link.channel.has_ended:
                    raise Closed("the connection has ended") from None
        if isinstance(answer, Refused):
            raise answer
        anchor = answer.anchor
        takes = link.hello.takes if anchor is not None else ()
        weights = {} if anchor is None else anchor.weights
        values = [weights[region.name][region.index] for region in takes]
        link.channel.send(answer.kind, values, **answer.fields)
        return answer.kind != "bye"

    # What follows from it. All below is called with the lock.

    def _session_of(self, link: Link) -> Session:
        session = self._sessions.get(link.hello.island)
        if session is None or session.links.get(link.hello.rank) is not link:
            raise link.refusal or Refused("the island's other ranks have left", is_final=False)
        return session

    def _enter(self, link: Link) -> Link:
        """A rank is here; with the last one, its island is."""
        hello, now = link.hello, self._clock()
        session = self._sessions.get(hello.island)
        if session is not None and session.hello.token != hello.token:
            self._end(session, Refused(f"another job is island {hello.island} now"))
            session = None
        if session is None:
            session = self._sessions[hello.island] = Session(hello, now)
        if session.is_complete or hello.rank in session.links or hello.ranks != session.hello.ranks:
            raise FrameError("hello: does not fit the other ranks' of the island")
        session.links[hello.rank] = link
        if session.is_complete:
            session.since = math.inf
            self._complete(session)
        return link

    def _complete(self, session: Session) -> None:
        """All ranks of an island are here."""
        hellos = [link.hello for link in session.links.values()]
        regions = [region for hello in hellos for region in hello.gives]
        problem = tiling_problem(regions, self._shapes)
        stands = {(h.round, h.base, h.base_id, h.is_fresh) for h in hellos}
        if problem is None and len(stands) > 1:
            problem = "has ranks that are in different rounds"
        if problem is not None:
            self._end(session, Refused(f"island {session.hello.island} {problem}"))
            return
        weights = self._weights
        if session.hello.is_fresh and (weights is None or weights.anchor.version == 0):
            session.since = self._clock()
            self._tell(session, Answer("initial"))
        elif weights is None:
            self._end(
                session,
                Refused(
                    f"the owner has no weights, but island {session.hello.island} has trained "
                    "already: start the owner with its --state, or all islands anew"
                ),
            )
        else:
            self._join(session, weights, weights.knows(session.hello.base, session.hello.base_id))

    def _begin(self, session: Session, initial: dict[str, Tensor]) -> None:
        """An island has sent the weights that it was made with."""
        weights = self._weights
        if weights is None:
            self._weights = weights = OuterWeights.begin(initial, self._remembered)
            self._save(weights)
        is_first = weights.anchor.version == 0
        if is_first and any(
            not torch.equal(x, weights.anchor.weights[name]) for name, x in initial.items()
        ):
            self._end(
                session,
                Refused(
                    f"island {session.hello.island} has other initial weights than the first: "
                    "train.seed and run.init_from must be the same"
                ),
            )
            return
        self._join(session, weights, is_first)

    def _join(self, session: Session, weights: OuterWeights, is_known: bool) -> None:
        """An island takes part from now on."""
        hello = session.hello
        island = self.rounds.islands[hello.island]
        came = "joined" if island.state == "expected" and hello.is_fresh else "came back"
        session.since = math.inf
        is_kept = self.rounds.join(hello.island, hello.round, is_known, self._clock())
        round_ = hello.round if is_kept else self.rounds.version
        where = "" if is_kept else ", with the newest weights"
        self._report(f"island {hello.island} {came} in round {round_}{where}")
        self._send_on(session, weights, round_, not is_kept)

    def _deliver(self, session: Session, round_: int, term: Term) -> None:
        number = session.hello.island
        try:
            is_in_time = self.rounds.deliver(number, round_, term)
        except ValueError as error:
            self._end(session, Refused(str(error)))
            return
        if not is_in_time:
            late = self.rounds.islands[number].too_late
            self._report(f"island {number} is too late with round {round_} ({late} so far)")
        self._settle()

    def _ask(self, link: Link, wants: Ask, has: int) -> None:
        """A rank wants to go on, or to end."""
        session = self._session_of(link)
        if not session.is_complete or (session.asks and session.wants != wants):
            raise FrameError(f"{wants.kind}: does not fit the other ranks' of the island")
        if not session.asks:
            session.since, session.wants = self._clock(), wants
        session.asks[link.hello.rank] = has
        if len(session.asks) < session.hello.ranks:
            return
        session.since = math.inf
        number = session.hello.island
        if wants.kind == "finish":
            self._report(f"island {number} has finished")
            del self._sessions[number]
            self.rounds.leave(number, self._clock(), is_finished=True)
            self._tell(session, Answer("bye"))
        else:
            self.rounds.ask(number, wants.version, self._clock())
        self._settle()

    def _settle(self) -> None:
        """Close what can be closed, and let go on who can."""
        weights = self._weights
        if weights is None or self._is_closing:
            return
        while (terms := self.rounds.ready()) is not None:
            weights.close([*terms.values()], self._outer.lr, self._outer.momentum)
            self.rounds.advance(self._clock())
            if self.rounds.version % self._save_every == 0:
                self._save(weights)
            self._report_round([*terms])
        for number in self.rounds.granted():
            session = self._sessions[number]
            if self.rounds.islands[number].state == "dropped":
                self._join(session, weights, is_known=False)
            else:
                assert session.wants is not None
                self._send_on(session, weights, session.wants.round, False)

    def _send_on(
        self, session: Session, weights: OuterWeights, round_: int, is_reset: bool
    ) -> None:
        """Tell all ranks of an island to go on with ``round_``, from the newest anchor."""
        anchor = weights.anchor
        for rank, link in session.links.items():
            has = session.asks.get(rank, link.hello.base)
            is_wanted = is_reset or has != anchor.version
            fields = {
                "round": round_,
                "version": anchor.version,
                "id": anchor.id,
                "is_reset": is_reset,
                "has_values": is_wanted,
            }
            link.answers.put(Answer("go", fields, anchor if is_wanted else None))
        session.asks.clear()

    @staticmethod
    def _tell(session: Session, answer: Answer | Refused) -> None:
        for link in session.links.values():
            link.answers.put(answer)

    def _end(self, session: Session, refusal: Refused) -> None:
        """Let an island go; its connections' threads tell its ranks why."""
        for link in session.links.values():
            link.refusal = refusal
        self._tell(session, refusal)
        self._leave_rounds(session, f"it was refused: {refusal}")

    def _leave(self, link: Link, why: str) -> None:
        """A rank's connection has ended: so does its island's part."""
        session = self._sessions.get(link.hello.island)
        if self._is_closing or session is None or session.links.get(link.hello.rank) is not link:
            return
        for other in session.links.values():
            other.channel.close()
        of = f"rank {link.hello.rank}: " if link.hello.ranks > 1 else ""
        self._leave_rounds(session, of + why)

    def _leave_rounds(self, session: Session, why: str) -> None:
        number = session.hello.island
        self._sessions.pop(number, None)
        if self.rounds.islands[number].state == "live":
            self._drop(number, why)
        else:
            self._report(f"island {number}: {why}")

    def _drop(self, number: int, why: str) -> None:
        self._report(f"island {number} dropped: {why}")
        self.rounds.leave(number, self._clock())
        self._settle()

    def _tick(self, now: float) -> None:
        """What time does."""
        for session in [*self._sessions.values()]:
            if now - session.since > TOGETHER_S:
                self._end(session, Refused("its ranks have not all come", is_final=False))
        for number in self.rounds.overdue(now):
            self._drop(number, f"the others have waited for {self._outer.patience_s:g} s")

    def _save(self, weights: OuterWeights) -> bool:
        """Write the state; a disk that is full now may not be after the next round."""
        states = [island.state for island in self.rounds.islands]
        try:
            weights.save(self._state, self._settings, states)
        except OSError as error:
            self._report(f"{self._state}: cannot write it ({error.strerror}); goes on without")
            return False
        return True

    def _report_round(self, islands: list[int]) -> None:
        """Every so often, and when it is of other islands than the one before."""
        now, (then, before) = self._clock(), self._reported
        if now - then >= REPORT_S or islands != before:
            self._reported = now, islands
            self._report(
                f"round {self.rounds.version - 1} closed: islands {', '.join(map(str, islands))}"
            )
