"""The life of the engine: started, watched, started again when it fails, given up in the end.

    starting → ready → restarting → ready → … → dead
                  ↘ stopping

A failure is that of the whole engine: its ranks wait for each other in collectives, so none of them
can be replaced, and no collective is done again. What the engine had is answered with an error, not
given to the next one: a request that ends engines must not end all of them.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from signal import Signals
from socket import socket
from typing import Protocol

from megabit.config.serving import ServingConfig
from megabit.errors import UserError
from megabit.inference.messages import Failed, Ready, Stats, Stop
from megabit.serving.api_error import ApiError
from megabit.serving.dispatch import Dispatcher
from megabit.serving.engine_client import EngineConnection, Job

_LOOK_S = 0.1
"""How often ranks are looked at."""

_GRACE_S = 5.0
"""A rank that waits for another one in vain says so after ``engine.timeout_s``; only if nothing is
heard for so much longer is rank 0 itself stuck."""

_LONGEST_SILENCE_S = 3.0
"""Reports come once a second, but not while a batch is computed."""

_STOP_S = 5.0

logger = logging.getLogger("megabit.serving")


class EngineProcess(Protocol):
    """Rank processes of an engine (``inference.ranks.RankProcesses``)."""

    @property
    def socket(self) -> socket: ...

    def exit_codes(self) -> list[int | None]: ...

    def failure(self) -> str: ...

    def kill(self) -> None: ...


class StatsListener(Protocol):
    """Who keeps the figures (``ServerMetrics``)."""

    def report(self, stats: Stats) -> None: ...

    def new_engine(self) -> None: ...


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DEAD = "dead"


class Supervisor:
    """Keeps an engine running for a dispatcher.

    Args:
        start: starts the ranks of an engine; gets settings to add. Blocks for as long as it takes.
        listener: hears of each report of an engine, and when one is lost.
    """

    def __init__(
        self,
        config: ServingConfig,
        dispatcher: Dispatcher,
        start: Callable[[Sequence[str]], EngineProcess],
        listener: StatsListener,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._start = start
        self._listener = listener
        self.state = EngineState.STARTING
        self.reason = ""
        """Why the engine is not ready."""
        self.ready: Ready | None = None
        """What the newest engine has said of itself."""
        self.stats: Stats | None = None
        """The newest report of the engine that runs."""
        self.restarts = 0
        self.rank_is_up: list[bool] = [False] * (config.parallel.tp * config.parallel.pp)
        self._heard_at = 0.0
        self._failed: str | None = None
        self._failures: deque[float] = deque()
        self._retry_at = 0.0
        self._connection: EngineConnection | None = None
        self._stop = asyncio.Event()
        self._is_urgent = False

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine last reported."""
        return time.monotonic() - self._heard_at

    def check_healthy(self) -> None:
        """Raises ApiError: 503, the engine is not ready, or silent for longer than it should be."""
        self.check_ready()
        age = self.heartbeat_age
        # Reports come between forward passes, and one may take a while.
        if age > max(_LONGEST_SILENCE_S, self._config.engine.timeout_s):
            text = f"Nothing was heard of the engine for {age:.1f} s."
            raise ApiError(503, text, code="engine_silent", retry_after=2)

    def check_ready(self) -> None:
        """Raises ApiError: 503, there is no engine to give anything to."""
        if self.state == EngineState.READY:
            return
        if self.state == EngineState.STARTING:
            raise ApiError(503, "The model is being loaded.", code="loading", retry_after=2)
        if self.state == EngineState.RESTARTING:
            wait = self._retry_at - time.monotonic() + 2
            text = f"The engine has failed and is being started again: {self.reason}"
            raise ApiError(503, text, code="engine_restarting", retry_after=wait)
        if self.state == EngineState.DEAD:
            text = f"The engine has failed and is not started again: {self.reason}"
            raise ApiError(503, text, code="engine_dead", close=True)
        raise shutting_down()

    async def run(self) -> None:
        """Until ``stop``, or until the engine is given up: then ``state`` is DEAD."""
        settings: list[str] = []
        while True:
            reason = await self._run_engine(settings)
            if self._stop.is_set():
                self.state = EngineState.STOPPING
                self._dispatcher.fail_all(shutting_down())
                return
            self.reason = reason
            # One that never was ready would fail again: memory, settings, files.
            pause = None if self.ready is None else self._pause()
            if self.ready is not None:
                logger.error("The engine has failed: %s", reason)
            if pause is None:
                self.state = EngineState.DEAD
                self._dispatcher.fail_all(self._lost(reason))
                return
            self.state = EngineState.RESTARTING
            self.restarts += 1
            settings = self._settings() or settings
            self._retry_at = time.monotonic() + pause
            logger.warning("Starting the engine again in %.1f s", pause)
            await _wait(self._stop, pause)

    def stop(self, at_once: bool = False) -> None:
        """End the engine and ``run``, unless it is dead; what the engine has is lost.

        Args:
            at_once: do not wait until ranks have ended by themselves.
        """
        if self.state == EngineState.DEAD:
            return
        self._is_urgent = at_once or self.state != EngineState.READY  # one that loads hears nothing
        self.state = EngineState.STOPPING
        if self._connection is not None:
            self._connection.send(Stop())
        self._stop.set()

    async def _run_engine(self, settings: Sequence[str]) -> str:
        """Start one, and watch it to its end; returns why it ended."""
        if self._stop.is_set():
            return "stopped"
        self._failed = None
        self.stats = None
        self._listener.new_engine()
        try:
            process = await asyncio.to_thread(self._start, settings)
        except (UserError, OSError) as error:
            return str(error)
        try:
            connection = await EngineConnection.open(process.socket, self._report, self._done)
            self._connection = connection
            reading = asyncio.create_task(connection.read())
            try:
                return await self._watch(process, reading)
            finally:
                self._connection = None
                self.rank_is_up = [False] * len(self.rank_is_up)
                self._dispatcher.detach(self._lost(self.reason or "it has ended"))
                reading.cancel()
                await connection.close()
        finally:
            await asyncio.to_thread(process.kill)

    async def _watch(self, process: EngineProcess, reading: "asyncio.Task[None]") -> str:
        """Until it fails or is stopped; returns why."""
        while True:
            if self._stop.is_set():
                await self._wait_for_end(process)
                return "stopped"
            codes = process.exit_codes()
            self.rank_is_up = [code is None for code in codes]
            if reading.done() and not any(codes):
                await asyncio.sleep(_LOOK_S)  # it may have ended, and will be known to have
                codes = process.exit_codes()
            self._failed = _killed(codes) or self._failed or self._what_is_wrong(codes, reading)
            if self._failed is not None:
                # Ranks may not have said all yet; requests need not wait for that.
                self.state, self.reason = EngineState.RESTARTING, self._failed
                self._dispatcher.detach(self._lost(self._failed))
                return await self._cause(process, self._failed)
            await asyncio.wait({reading}, timeout=_LOOK_S)

    def _what_is_wrong(self, codes: list[int | None], reading: "asyncio.Task[None]") -> str | None:
        for rank, code in enumerate(codes):
            if code is not None:
                return f"rank {rank} ended with code {code}"
        if reading.done():
            error = reading.exception()
            return "rank 0 has closed its socket" if error is None else f"rank 0 said: {error!r}"
        limit = self._config.engine.timeout_s + _GRACE_S
        if self.state == EngineState.READY and self.heartbeat_age > limit:
            return f"nothing was heard of rank 0 for {limit:.0f} s"
        return None

    async def _cause(self, process: EngineProcess, seen: str) -> str:
        """What the ranks say of a failure that was seen; nothing, if they still run."""
        said = await asyncio.to_thread(process.failure)
        has_ended = any(code is not None for code in process.exit_codes())
        return said if has_ended and said else seen

    async def _wait_for_end(self, process: EngineProcess) -> None:
        end = time.monotonic() + _STOP_S
        while time.monotonic() < end and not self._is_urgent and None in process.exit_codes():
            await asyncio.sleep(0.02)

    def _report(self, report: Ready | Stats | Failed) -> None:
        self._heard_at = time.monotonic()
        if isinstance(report, Failed):
            self._failed = report.error
        elif isinstance(report, Stats):
            self.stats = report
            self._listener.report(report)
        else:
            self.ready = report
            logger.info("Ready: %s", report.description)
            if self._connection is not None and self._failed is None and not self._stop.is_set():
                self.state = EngineState.READY
                self.reason = ""
                self._dispatcher.attach(self._connection)

    def _done(self, job: Job) -> None:
        self._dispatcher.done(job)

    def _pause(self) -> float | None:
        """Before the next start; None: there have been too many."""
        server, now = self._config.server, time.monotonic()
        self._failures.append(now)
        while self._failures[0] < now - server.restart_window_s:
            self._failures.popleft()
        if len(self._failures) > server.max_restarts:
            return None
        return server.restart_backoff_s * 2.0 ** (len(self._failures) - 1)

    def _settings(self) -> list[str]:
        """What is different in the next engine."""
        proposed = None if self.stats is None else self.stats.proposed_layers
        if not self._config.engine.rebalance or proposed is None:
            return []
        logger.info("The next engine has %s layers on its stages", list(proposed))
        return [f"parallel.layers_per_stage={list(proposed)}"]

    def _lost(self, reason: str) -> ApiError:
        return ApiError(
            503,
            f"The engine has failed, and this request with it: {reason}",
            code="engine_failed",
            retry_after=self._config.server.restart_backoff_s,
        )


def shutting_down() -> ApiError:
    """What is not done when the server ends is told this."""
    return ApiError(
        503, "The server is shutting down.", code="shutting_down", retry_after=5, close=True
    )


def _killed(codes: Sequence[int | None]) -> str | None:
    """The first rank that a signal has ended; others may have ended because of it."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return f"rank {rank} was ended by {Signals(-code).name}"
    return None


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
