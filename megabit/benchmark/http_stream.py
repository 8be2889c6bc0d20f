"""A request to a server of the OpenAI API, and when each piece of the answer came.

Plain asyncio: a load generator shares the machine with what it measures, and a general HTTP client
takes several times the CPU time for each piece. One connection for each request, as from clients
that do not know of each other.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from megabit.errors import UserError

_HEADERS_S = 600.0
"""A server that has not answered by then has failed."""
_MAX_LINE = 1 << 24


@dataclass(frozen=True)
class Address:
    """Where the server is."""

    host: str
    port: int
    path: str
    is_secure: bool
    host_header: str

    @staticmethod
    def of(url: str) -> "Address":
        """Raises UserError: it is no URL of a server."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UserError(f"{url}: is no URL ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url}: must be the URL of a server, such as http://127.0.0.1:8000")
        is_secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return Address(
            parts.hostname, port or (443 if is_secure else 80), path, is_secure, parts.netloc
        )


@dataclass
class Reply:
    """What came back, on the clock of ``time.perf_counter``."""

    sent_at: float
    status: int = 0
    """0: no HTTP answer."""
    pieces_at: list[float] = field(default_factory=list)
    """When pieces with text came."""
    ended_at: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retry_after: float = 0.0
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None


async def stream(address: Address, body: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
    """Ask for a streamed completion and note what comes. Never raises for what the server does."""
    reply = Reply(time.perf_counter())
    try:
        await _exchange(address, body, headers, reply)
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, TimeoutError) as error:
        reply.error = f"{type(error).__name__}: {error}".rstrip(": ")
    reply.ended_at = time.perf_counter()
    return reply


async def get_json(address: Address, path: str, headers: Mapping[str, str]) -> Any:
    """Raises UserError: the server cannot be reached, or answers with an error."""
    try:
        reader, writer = await _connect(address)
        try:
            writer.write(_head(address, "GET", path, headers, b""))
            status, found = await _read_head(reader)
            content = b"".join([part async for part in _body(reader, found)])
        finally:
            writer.close()
        if status != 200:
            raise UserError(f"{address.host_header}: answers GET {path} with {status}")
        return json.loads(content)
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        raise UserError(
            f"{address.host_header}: cannot be reached, or is no such server ({error})"
        ) from error


async def _exchange(
    address: Address, body: Mapping[str, Any], headers: Mapping[str, str], reply: Reply
) -> None:
    content = json.dumps(body).encode()
    reader, writer = await _connect(address)
    try:
        writer.write(_head(address, "POST", "/v1/completions", headers, content) + content)
        await writer.drain()
        reply.status, found = await _read_head(reader)
        reply.retry_after = _number(found.get("retry-after", ""))
        if reply.status != 200:
            text = b"".join([part async for part in _body(reader, found)])
            reply.error = _reason(text) or f"status {reply.status}"
            return
        await _read_events(reader, found, reply)
    finally:
        writer.close()


async def _read_events(
    reader: asyncio.StreamReader, headers: Mapping[str, str], reply: Reply
) -> None:
    rest = b""
    async for part in _body(reader, headers):
        now = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        has_text = False
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                reply.error = _reason(data) or "an error in the stream"
                return
            usage = event.get("usage")
            if usage:
                reply.prompt_tokens = usage["prompt_tokens"]
                reply.completion_tokens = usage["completion_tokens"]
            has_text |= any(choice.get("text") for choice in event["choices"])
        if has_text:
            reply.pieces_at.append(now)
    reply.error = "the stream ended before its end"


async def _connect(
    address: Address,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.wait_for(
        asyncio.open_connection(
            address.host, address.port, ssl=address.is_secure or None, limit=_MAX_LINE
        ),
        _HEADERS_S,
    )


def _head(
    address: Address, method: str, path: str, headers: Mapping[str, str], content: bytes
) -> bytes:
    lines = [
        f"{method} {address.path}{path} HTTP/1.1",
        f"Host: {address.host_header}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if content:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEADERS_S)
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status, *_ = f"{first}  ".split(" ")
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        raise ValueError(f"{first[:80]!r} is no HTTP answer")
    pairs = (line.partition(":") for line in lines if line)
    return int(status), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body in parts, as they come."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


def _number(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0


def _reason(content: bytes) -> str:
    """What an error of the OpenAI API says."""
    try:
        return str(json.loads(content)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return ""
