"""Server-sent events: ``data: {json}`` lines, ``data: [DONE]`` at the end."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megabit.serving.api_error import ApiError
from megabit.serving.requests import ClientGone, unless_gone

_WRITE_TIMEOUT_S = 30.0
"""A client that takes nothing for so long is gone."""

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each object that ``chunks`` gives at once; whatever happens, ``close`` is called.

    An ApiError in the middle, when the status has been sent long since, is the last event. There is
    no ``[DONE]`` then, which would look like an answer that is complete.
    """

    def __init__(
        self, chunks: AsyncGenerator[dict[str, Any], None], close: Callable[[], None]
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            # Proxies are not to collect it.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        try:
            await send(start)
            await unless_gone(receive, self._send_all(send))
        except (ClientGone, TimeoutError):
            pass  # whom it matters to sees it closed before its end
        finally:
            await self._chunks.aclose()
            self._close()

    async def _send_all(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                await self._send(send, event(chunk))
            await self._send(send, _DONE)
        except ApiError as error:
            await self._send(send, event(error.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": True}
        # Not wait_for: that of Python 3.11 swallows a cancellation once ``send`` has returned.
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await send(message)


def event(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
