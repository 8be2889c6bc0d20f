"""The server's process: HTTP, the engine's supervisor and signals, from the first to the last."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn

from megabit.errors import RunError, UserError
from megabit.serving.app import create_app
from megabit.serving.http_protocol import bounded_protocol, most_connections
from megabit.serving.service import Service
from megabit.serving.supervisor import EngineState

_KEEP_ALIVE_S = 30
_CLOSING_S = 5
"""For answers that are complete, to be sent."""
_ALERTS_S = 1.0

logger = logging.getLogger("megabit.serving")


def bind(host: str, port: int) -> socket.socket:
    """A socket to listen on; taken before anything else is started.

    Raises:
        UserError: that is not possible.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(
            f"server.host: {host} is no address of this machine ({error.strerror})"
        ) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"server.host: {host} is no address of this machine") from error
        raise UserError(
            f"server.port: cannot listen on {host}:{port} ({error.strerror}); "
            "choose a free port, or 0"
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(service: Service, sock: socket.socket) -> int:
    """Answer requests until a signal comes; returns the exit code.

    SIGTERM and Ctrl-C: nothing is let in any more, what is under way has
    ``server.drain_timeout_s`` to end. A second one ends everything at once.

    Raises:
        RunError: the engine has failed for good.
    """
    return asyncio.run(_Process(service, sock).run())


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for ``_Process``."""
        yield


class _Process:
    def __init__(self, service: Service, sock: socket.socket) -> None:
        self._service = service
        self._socket = sock
        self._server = _Server(
            uvicorn.Config(
                create_app(service),
                http=bounded_protocol(most_connections()),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSING_S,
            )
        )
        self._signals = 0
        self._signalled = asyncio.Event()
        self._in_a_hurry = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        supervisor = self._service.supervisor
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        supervising = asyncio.create_task(supervisor.run())
        others = [asyncio.create_task(work) for work in (self._judge(), self._signalled.wait())]
        try:
            await asyncio.wait(
                (serving, supervising, others[1]), return_when=asyncio.FIRST_COMPLETED
            )
            if self._signalled.is_set():
                await self._drain()
        finally:
            supervisor.stop(at_once=self._in_a_hurry.is_set())
            self._server.should_exit = True
            self._server.force_exit = self._in_a_hurry.is_set()
            for task in others:
                task.cancel()
            results = await asyncio.gather(serving, supervising, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if supervisor.state == EngineState.DEAD:
            was_ready = supervisor.ready is not None
            why = "the engine has failed too often" if was_ready else "the engine cannot start"
            raise RunError(f"{why}: {supervisor.reason}")
        logger.info("Stopped")
        return 128 + signal.SIGTERM if self._in_a_hurry.is_set() else 0

    async def _drain(self) -> None:
        seconds = self._service.config.server.drain_timeout_s
        logger.info(
            "Shutting down: %d requests under way have %g s to end",
            self._service.open_requests,
            seconds,
        )
        draining = asyncio.create_task(self._service.drain(seconds))
        hurry = asyncio.create_task(self._in_a_hurry.wait())
        await asyncio.wait((draining, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        draining.cancel()
        await asyncio.gather(draining, hurry, return_exceptions=True)

    async def _judge(self) -> None:
        while True:
            await asyncio.sleep(_ALERTS_S)
            self._service.alerts.judge(self._service.supervisor.stats)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        self._signalled.set()
        self._service.is_draining = True
        if self._signals > 1:
            self._in_a_hurry.set()
