"""The watchdog of a rank: it ends a run that hangs, and says who made it hang.

The training thread tells it which step it is in; collectives are counted by the mesh. Two threads
of its own do the rest: one puts up signs of life and reads those of others (``heartbeat``), which
may block if the store is gone; the other one only looks at the clock. After ``faults.hang_s``
without progress it writes all stacks down, says whom it has not heard of or who is behind
(``blame``), and ends the process with code ``HUNG``. All other ranks wait for the same one, so
they do the same at the same time.

A rank that dies is noticed much sooner, by its connections. The error that this raises in others is
turned into a ``RankLost`` with the name of that rank where the watchdog's block ends.
"""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from megabit.config import FaultsConfig
from megabit.errors import RunError, first_line, named_line
from megabit.faults import HUNG
from megabit.faults.blame import Observer
from megabit.faults.heartbeat import LOST, Board, Listener, Sign
from megabit.faults.stacks import StackFile
from megabit.mesh import ParallelMesh

BACKSTOP_S = 1.0
"""How much later than the watchdog the C library's timer strikes."""
READS_AT_ONCE = 64
"""Signs that a stuck rank reads in a heartbeat's time; in a larger world it reads less often."""
GLOO = re.compile(r"^\[[^\]]*gloo[^\]]*\] ?")
"""How its errors begin: with a place in its source."""


class RankLost(RunError):
    """Another rank is gone. Process groups must not be closed then: that would wait for it."""


@dataclass
class _Progress:
    """How far this rank has come, and since when."""

    mark: tuple[int, int, int] = (0, 0, 0)
    """Steps, collectives begun, collectives done."""
    at: float = 0.0


class Watchdog:
    """For the length of a block, on every rank; it sends nothing that a step waits for.

    Args:
        folder: for stacks of a rank that hangs; made when the first step begins.

    Raises:
        RankLost: at the end of the block, in place of the error of a collective that has lost
            another rank.
    """

    def __init__(self, mesh: ParallelMesh, config: FaultsConfig, folder: Path) -> None:
        self._mesh, self._config = mesh, config
        rank, size = mesh.world.rank, mesh.world.size
        self._sign = Sign(rank, socket.gethostname(), os.getpid())
        self._stacks = StackFile(folder, rank)
        self._progress = _Progress()
        self._step = 0
        self._is_watching = False
        self._doing = "starting"
        self._listener: Listener | None = None
        self._store_lost = False
        self._ending = threading.Event()
        """The block is over: nothing is watched any more."""
        self._ended = threading.Event()
        self._read_s = config.heartbeat_s * max(1, size / READS_AT_ONCE)
        self._silence_s = 3 * self._read_s
        self._clock = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._heart: threading.Thread | None = None
        self._farewell: Board | None = None
        if config.hang_s:
            # There is little to go by if a hang is as short as a few heartbeats.
            self._silence_s = max(1.5 * self._read_s, min(self._silence_s, config.hang_s / 2))

    @property
    def is_on(self) -> bool:
        """Whether there are signs of life, as configured."""
        return self._config.heartbeat_s > 0

    def __enter__(self) -> Self:
        if not self.is_on:
            return self
        self._progress.at = time.monotonic()
        if self._config.hang_s:
            self._clock.start()
        store, size = self._mesh.store, self._mesh.world.size
        if store is not None:
            self._farewell = Board(store, size, self._patience_s)
            board = Board(store, size, self._patience_s)
            self._heart = threading.Thread(
                target=self._beat, args=(board,), name="heartbeat", daemon=True
            )
            self._heart.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.rest("ending")
        self._ending.set()
        if self._clock.is_alive():
            self._clock.join()
        lost = None if error is None else lost_reason(error)
        cause = None
        try:
            if self._farewell is not None:
                self._say_goodbye(error, lost)
                cause = None if lost is None else self._look_for_cause()
            if lost is not None:
                where = f"rank {self._sign.rank} lost its connection in step {self._step + 1}"
                raise RankLost(f"{cause or 'another rank is gone'}; {where}: {lost}") from error
        finally:
            self._ended.set()
            if self._heart is not None:
                self._heart.join(timeout=self._patience_s)
            self._stacks.close()

    # What the training thread says.

    def begin_step(self, step: int) -> None:
        """Step ``step`` (0-based) begins now; from here on it must get on."""
        self._step, self._doing = step, "a step"
        self._progress = _Progress(self._mark(), time.monotonic())
        self._is_watching = self.is_on and self._config.hang_s > 0

    @contextmanager
    def resting(self, doing: str) -> Iterator[None]:
        """While the block does something that may take long, such as ``"saving"``."""
        before = (self._is_watching, self._doing)
        self.rest(doing)
        try:
            yield
        finally:
            self._progress = _Progress(self._mark(), time.monotonic())
            self._is_watching, self._doing = before

    def rest(self, doing: str) -> None:
        """Do not watch until the next step."""
        self._is_watching, self._doing = False, doing

    # Signs of life.

    @property
    def _patience_s(self) -> float:
        """For an answer of the store."""
        return max(2.0, 2 * self._config.heartbeat_s)

    def _mark(self) -> tuple[int, int, int]:
        begun, done = sum(self._mesh.begun().values()), sum(self._mesh.calls().values())
        return self._step, begun, done

    def _own_sign(self) -> Sign:
        step, begun, done = self._mark()
        return replace(self._sign, step=step, doing=self._doing, begun=begun, done=done)

    def _beat(self, board: Board) -> None:
        """The thread of signs; blocks when the store does."""
        beat = 0
        read_at = 0.0
        while not self._ended.is_set():
            beat += 1
            try:
                board.write(replace(self._own_sign(), beat=beat))
                listener = self._listener
                if listener is not None and time.monotonic() >= read_at + self._read_s / 2:
                    read_at = time.monotonic()
                    listener.hear(board.read())
                    self._store_lost = False
            except RuntimeError:
                self._store_lost = True
            listens = self._listener is not None
            self._ended.wait(self._config.heartbeat_s / (2 if listens else 1))

    # A run that hangs.

    def _watch(self) -> None:
        """The thread that looks at the clock."""
        hang_s = self._config.hang_s
        # Others must have been heard of for a while, before anything is said about them.
        listens_after = hang_s - max(hang_s / 2, 2 * self._silence_s)
        pause_s = min(0.2, hang_s / 10)
        armed_at = 0.0
        while not self._ending.wait(pause_s):
            now, progress = time.monotonic(), self._progress
            if not self._is_watching:
                self._listener = None
                if armed_at:
                    self._stacks.stop_timer()
                    armed_at = 0.0
                continue
            mark = self._mark()
            if mark != progress.mark:
                self._progress = progress = _Progress(mark, now)
                self._listener = None
            idle_s = now - progress.at
            if idle_s >= hang_s:
                self._end(idle_s)
            if idle_s >= listens_after and self._listener is None:
                self._listener = Listener()
            if now - armed_at >= self._config.heartbeat_s:
                # This thread may be kept from running; then that timer strikes.
                self._stacks.set_timer(hang_s - idle_s + self._config.heartbeat_s + BACKSTOP_S)
                armed_at = now

    def _end(self, idle_s: float) -> None:
        """Say what is known, and end the process."""
        observer = self._observer()
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        heading = f"{when}  {self._sign.name}: nothing has moved for {idle_s:.1f} s"
        with suppress(OSError):
            self._stacks.write(f"{heading} in step {self._step + 1}")
        if observer.speaks:
            cause = observer.cause() or "no rank is to blame more than others"
            print(
                f"error: nothing has moved for {idle_s:.0f} s in step {self._step + 1}: {cause}. "
                f"The stacks of ranks are in {self._stacks.path.parent}",
                file=sys.stderr,
                flush=True,
            )
        os._exit(HUNG)

    def _observer(self) -> Observer:
        listener = self._listener or Listener()
        return Observer(
            self._own_sign(), self._mesh.world.size, listener, self._silence_s, self._store_lost
        )

    # A rank that died.

    def _say_goodbye(self, error: BaseException | None, lost: str | None) -> None:
        assert self._farewell is not None
        reason = ""
        if error is not None:
            says = first_line if isinstance(error, RunError) else named_line
            reason = LOST if lost is not None else says(error)
        self._sign = replace(self._sign, ended=reason)  # from now on in all signs
        with suppress(RuntimeError):
            self._farewell.write(self._own_sign())

    def _look_for_cause(self) -> str | None:
        """Who is silent, or has said why it failed; takes a few heartbeats."""
        self._listener = Listener()
        deadline = time.monotonic() + self._silence_s + 2 * self._read_s
        if self._sign.rank == 0:
            deadline += self._config.heartbeat_s  # others may be looking at a store of its process
        cause = None
        while cause is None and time.monotonic() < deadline:
            time.sleep(min(0.1, self._config.heartbeat_s / 4))
            cause = self._observer().missing()
        return cause


def lost_reason(error: BaseException) -> str | None:
    """What a collective or a message that lost another rank says about it; None for errors of
    other kinds."""
    cause = error.__cause__ if isinstance(error, RunError) else error
    if not isinstance(cause, RuntimeError):
        return None
    text = (str(cause).splitlines() or [""])[0]
    is_gloo = GLOO.match(text) is not None
    if not is_gloo and not isinstance(cause, dist.DistBackendError | dist.DistNetworkError):
        return None
    # "… This is typically caused by a remote worker crashing. …" is not news.
    return GLOO.sub("", text).split(". ")[0]
