"""Connections that stay open without a request, in front of a small application."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megabit.serving.http_protocol import bounded_protocol
from tests.patience import PATIENCE_S, eventually

HEAD_S, SLOW_S = 2.0, 2.5
HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n"


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(SLOW_S if scope["path"] == "/slow" else 0)
    await Response("hello")(scope, receive, send)


@contextmanager
def served(max_connections: int, head_s: float) -> Iterator[int]:
    """Its port."""
    config = uvicorn.Config(
        slow_app,
        http=bounded_protocol(max_connections, head_s),
        lifespan="off",
        log_config=None,
        timeout_keep_alive=120,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            eventually(lambda: server.started)
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def test_heads_must_come_to_an_end() -> None:
    with served(100, HEAD_S) as port, connect(port) as nothing, connect(port) as drip:
        began = time.monotonic()
        drip.sendall(HEAD[:20])
        time.sleep(0.3)
        drip.sendall(HEAD[20:25])
        assert nothing.recv(10) == b""
        assert drip.recv(10) == b""
        assert time.monotonic() - began > 0.9 * HEAD_S


def test_answers_and_pauses_may_take_longer_than_heads() -> None:
    with served(100, HEAD_S) as port, connect(port) as raw:
        raw.sendall(HEAD.replace(b"/ ", b"/slow ") + b"\r\n")
        assert whole(raw).startswith(b"HTTP/1.1 200 ")
        time.sleep(SLOW_S)
        raw.sendall(HEAD + b"\r\n")
        assert whole(raw).startswith(b"HTTP/1.1 200 ")
        began = time.monotonic()
        raw.sendall(HEAD)  # but not within a later one
        assert raw.recv(10) == b""
        assert time.monotonic() - began > 0.9 * HEAD_S


def test_connections_are_bounded() -> None:
    with served(3, PATIENCE_S) as port, connect(port) as a, connect(port), connect(port):
        eventually(lambda: _status(port) == b"503")
        a.close()
        eventually(lambda: _status(port) == b"200")


def whole(raw: socket.socket) -> bytes:
    content = b""
    while not content.endswith(b"hello"):
        part = raw.recv(1000)
        assert part, content
        content += part
    return content


def _status(port: int) -> bytes:
    with connect(port) as raw:
        try:
            raw.sendall(HEAD + b"\r\n")
            return raw.recv(1000)[9:12]
        except ConnectionError:  # closed before it had read the request
            return b"503"
