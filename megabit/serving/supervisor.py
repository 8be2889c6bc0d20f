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
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from socket import socket
from typing import Protocol

from megabit.config.serving import ServingConfig
from megabit.errors import UserError
from megabit.inference.messages import Failed, Ready, Stats, Stop
from megabit.serving.api_error import ApiError
from megabit.serving.dispatch import Dispatcher
from megabit.serving.engine_client import EngineConnection, Job
from megabit.serving.failures import killed, short
from megabit.serving.restarts import Restarts

_LOOK_S = 0.1
"""How often ranks are looked at."""

_GRACE_S = 5.0
"""A rank that waits for another one in vain says so after ``engine.timeout_s``; only if nothing is
heard for so much longer is rank 0 itself stuck."""

_LONGEST_SILENCE_S = 3.0
"""Reports come once a second, but not while a batch is computed."""

_LONGEST_LAG_S = 1.0
"""Of the time between two looks, what counts as silence of the engine: if it is longer, this
process itself was busy, and has not read yet what the engine said."""

_LOAD_S = 600.0
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
        start: starts the ranks of an engine. Blocks for as long as it takes.
        listener: hears of each report of an engine, and when one is lost.
        load_s: seconds that an engine may take to load the model.
    """

    def __init__(
        self,
        config: ServingConfig,
        dispatcher: Dispatcher,
        start: Callable[[ServingConfig], EngineProcess],
        listener: StatsListener,
        load_s: float = _LOAD_S,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._start = start
        self._listener = listener
        self._load_s = load_s
        self.state = EngineState.STARTING
        self.reason = ""
        """Why the engine is not ready."""
        self.ready: Ready | None = None
        """What the newest engine has said of itself."""
        self.stats: Stats | None = None
        """The newest report of the engine that runs."""
        self.restarts = 0
        self.rank_is_up: list[bool] = [False] * (config.parallel.tp * config.parallel.pp)
        self._silence_s = 0.0
        """Of the engine, until the last look."""
        self._looked_at = time.monotonic()
        self._failed: str | None = None
        self._restarts = Restarts(config.server)
        self._retry_at = 0.0
        self._connection: EngineConnection | None = None
        self._stop = asyncio.Event()
        self._is_urgent = False
        self._is_loading = True

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine last reported, without those in which nobody could listen."""
        return self._silence_s + min(time.monotonic() - self._looked_at, _LONGEST_LAG_S)

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
            text = f"The engine has failed and is being started again: {short(self.reason)}"
            raise ApiError(503, text, code="engine_restarting", retry_after=wait)
        if self.state == EngineState.DEAD:
            text = f"The engine has failed and is not started again: {short(self.reason)}"
            raise ApiError(503, text, code="engine_dead", close=True)
        raise shutting_down()

    async def run(self) -> None:
        """Until ``stop``, or until the engine is given up: then ``state`` is DEAD."""
        config = self._config
        while True:
            reason = await self._run_engine(config)
            if self._stop.is_set():
                self.state = EngineState.STOPPING
                self._dispatcher.fail_all(shutting_down())
                return
            self.reason = reason
            # One that never was ready would fail again: memory, settings, files.
            pause = None if self.ready is None else self._restarts.pause(time.monotonic())
            if self.ready is not None:
                logger.error("The engine has failed: %s", reason)
            if pause is None:
                self.state = EngineState.DEAD
                self._dispatcher.fail_all(self._lost(reason))
                return
            self.state = EngineState.RESTARTING
            self.restarts += 1
            config = self._next(config)
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

    async def _run_engine(self, config: ServingConfig) -> str:
        """Start one, and watch it to its end; returns why it ended."""
        if self._stop.is_set():
            return "stopped"
        self._failed = None
        self.stats = None
        self._is_loading = True
        self._listener.new_engine()
        try:
            process = await asyncio.to_thread(self._start, config)
        except (UserError, OSError) as error:
            return str(error)
        self._heard()
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
            self._look()
            codes = process.exit_codes()
            self.rank_is_up = [code is None for code in codes]
            if reading.done() and not any(codes):
                await asyncio.sleep(_LOOK_S)  # it may have ended, and will be known to have
                codes = process.exit_codes()
            seen = killed(codes) or self._failed or self._what_is_wrong(codes, reading)
            if seen is not None:
                # Ranks may not have said all yet; requests need not wait for that.
                self._lose(seen)
                return await self._cause(process, seen)
            await asyncio.wait({reading}, timeout=_LOOK_S)

    def _what_is_wrong(self, codes: list[int | None], reading: "asyncio.Task[None]") -> str | None:
        if any(code is not None for code in codes):
            return "a rank has ended"  # which one was first is not known yet
        if reading.done():
            error = reading.exception()
            return "rank 0 has closed its socket" if error is None else f"rank 0 said: {error!r}"
        limit = self._load_s if self._is_loading else self._config.engine.timeout_s + _GRACE_S
        if self.heartbeat_age <= limit:
            return None
        if self._is_loading:
            return f"the model was not loaded within {limit:g} s"
        return f"nothing was heard of rank 0 for {limit:g} s"

    async def _cause(self, process: EngineProcess, seen: str) -> str:
        """What ranks say of a failure, once they have ended; what was seen of it, if none has."""
        said = await asyncio.to_thread(process.failure)
        codes = process.exit_codes()
        running = [str(rank) for rank, code in enumerate(codes) if code is None]
        if len(running) == len(codes):
            return seen
        # One that is stuck may be the cause, and those that have ended only its victims.
        return (said or seen) + (f" (rank {', '.join(running)} still runs)" if running else "")

    def _lose(self, seen: str) -> None:
        """There is no engine any more, and what it had is lost."""
        self._failed = seen
        if not self._stop.is_set():
            self.state, self.reason = EngineState.RESTARTING, seen
        self._dispatcher.detach(self._lost(seen))

    def _look(self) -> None:
        now = time.monotonic()
        self._silence_s += min(now - self._looked_at, _LONGEST_LAG_S)
        self._looked_at = now

    def _heard(self) -> None:
        self._silence_s, self._looked_at = 0.0, time.monotonic()

    async def _wait_for_end(self, process: EngineProcess) -> None:
        end = time.monotonic() + _STOP_S
        while time.monotonic() < end and not self._is_urgent and None in process.exit_codes():
            await asyncio.sleep(0.02)

    def _report(self, report: Ready | Stats | Failed) -> None:
        if isinstance(report, Failed):  # no sign of life
            self._lose(report.error)
            return
        self._heard()
        if isinstance(report, Stats):
            before, self.stats = self.stats, report
            self._listener.report(report)
            if report.proposed_layers != (None if before is None else before.proposed_layers):
                self._tell_proposal(report.proposed_layers)
        else:
            self.ready = report
            self._is_loading = False
            logger.info("Ready: %s", report.description)
            if self._connection is not None and self._failed is None and not self._stop.is_set():
                self.state = EngineState.READY
                self.reason = ""
                self._dispatcher.attach(self._connection)

    def _done(self, job: Job) -> None:
        self._dispatcher.done(job)

    def _next(self, config: ServingConfig) -> ServingConfig:
        """Of the next engine."""
        proposed = None if self.stats is None else self.stats.proposed_layers
        if not config.engine.rebalance or proposed is None:
            return config
        logger.info("The next engine has %s layers on its stages", list(proposed))
        return replace(config, parallel=replace(config.parallel, layers_per_stage=list(proposed)))

    def _tell_proposal(self, layers: Sequence[int] | None) -> None:
        if layers is None:
            return
        how = "a restart" + ("" if self._config.engine.rebalance else " with engine.rebalance=true")
        logger.info(
            "Stages are unlike: parallel.layers_per_stage=%s would be faster; %s takes it up",
            list(layers),
            how,
        )

    def _lost(self, reason: str) -> ApiError:
        return ApiError(
            503,
            f"The engine has failed, and this request with it: {short(reason)}",
            code="engine_failed",
            retry_after=self._config.server.restart_backoff_s,
        )


def shutting_down() -> ApiError:
    """What is not done when the server ends is told this."""
    return ApiError(
        503, "The server is shutting down.", code="shutting_down", retry_after=5, close=True
    )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
