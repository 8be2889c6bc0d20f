"""HTTP connections, bounded in number and in the time that a request's head may take.

The HTTP library itself waits for a head without end, and so a few hundred clients that never end
theirs would take all the files that the process may open.
"""

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def most_connections() -> int:
    """Half of the files that this process may open: others are the engine's and the log's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else max(1, soft // 2)


def bounded_protocol(max_connections: int, head_s: float = HEAD_S) -> type[H11Protocol]:
    """What a connection is handled by.

    Args:
        max_connections: further ones are answered with 503 and closed.
        head_s: seconds from a connection's begin, or from the first byte of a later request, to
            the end of the request's head; then it is closed.
    """

    class BoundedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            is_full = len(self.connections) >= max_connections
            super().connection_made(transport)
            if is_full:
                transport.write(_FULL)
                transport.close()
            else:
                self._head_timer = self.loop.call_later(head_s, self._close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(head_s, self._close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _close(self) -> None:
            self._head_timer = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self.transport.close()

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return BoundedProtocol
