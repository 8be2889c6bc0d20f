"""Bodies that come in, bounded in size and time, and clients that go away."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from megabit.serving.api_error import ApiError

_READ_TIMEOUT_S = 30.0
_DISCARD_BODIES = 16
"""Of a body that is too large, so many times the limit is read and thrown away: a client that is
still sending would see a broken connection instead of an answer."""

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is there to hear an answer."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request that must be JSON.

    Raises:
        ApiError: it is of another type, too large, or does not come.
        ClientGone: the client went away.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # Browsers send such a type to other sites only after asking.
        raise ApiError(
            415,
            f"The body is {kind or 'of no type'}; send it as Content-Type: application/json.",
            code="unsupported_media_type",
        )
    if "expect" in request.headers and _length(request) > max_bytes:
        raise _too_large(max_bytes)  # it has not been sent yet
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            return await _read(request, max_bytes)
    except TimeoutError:
        text = f"The body did not come within {_READ_TIMEOUT_S:.0f} s."
        raise ApiError(408, text, code="body_timeout", close=True) from None
    except ClientDisconnect:
        raise ClientGone from None


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        else:
            parts.clear()
            if size > max_bytes * _DISCARD_BODIES:
                break
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


def _length(request: Request) -> int:
    text = request.headers.get("content-length", "")
    return int(text) if text.isdecimal() else 0


def _too_large(max_bytes: int) -> ApiError:
    text = f"The body is larger than {max_bytes} bytes (server.max_body_mb)."
    return ApiError(413, text, code="body_too_large", close=True)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What ``work`` gives; it is cancelled when the client goes away.

    Raises:
        ClientGone: that has happened.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
