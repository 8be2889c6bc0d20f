"""Messages between islands and the owner of the outer weights, as bytes on a TCP connection.

A frame is

    b"MBOW" | version: 2 bytes | header's length: 4 | values' length: 8 | header | values

with all numbers little-endian. The header is a JSON object with a ``kind``; values are fp32 numbers
as they are in memory (torch runs on little-endian hosts), of tensors that both sides know of from
the first frame on. Nothing says how to build an object, so there is nothing to be tricked with:
whoever receives checks the header first, then asks for the values with tensors of its own that they
must fill exactly. No length that was received is ever allocated, but for a header of up to 1 MiB.
"""

import json
import math
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAGIC = b"MBOW"
VERSION = 1
_PREFIX = struct.Struct("<4sHIQ")
MAX_HEADER_BYTES = 1 << 20
CHUNK_BYTES = 1 << 22
"""Sent at a time: the time-out of a connection is for as much as that."""
SILENCE_S = 300.0
"""How long the other side may be silent in the middle of a frame: as long as an owner may take to
write its file."""
LINGER_S = 1.0
"""How long who ends a connection listens on, for the other side to read why."""
VANISHED_S = 60
"""After how long a host that does not answer the network any more is known to be gone, on Linux."""


class FrameError(Exception):
    """What came is not a frame, or not the one that was to come; the connection is of no use."""


class Closed(FrameError):
    """The other side has ended the connection between two frames."""


@dataclass(frozen=True)
class Frame:
    """What came before the values."""

    kind: str
    fields: Mapping[str, Any]
    """The header; checked by the methods below."""
    value_bytes: int
    """Of the values that follow."""

    def integer(self, name: str, low: int = 0, high: int = 2**53) -> int:
        """A field that is a whole number from ``low`` to ``high``."""
        value = self.fields.get(name)
        if type(value) is not int or not low <= value <= high:
            raise FrameError(f"{self.kind}: {name} must be a number from {low} to {high}")
        return value

    def text(self, name: str, longest: int = 1000) -> str:
        """A field that is text."""
        value = self.fields.get(name)
        if not isinstance(value, str) or len(value) > longest:
            raise FrameError(f"{self.kind}: {name} must be text of at most {longest} characters")
        return value

    def flag(self, name: str) -> bool:
        """A field that is true or false."""
        value = self.fields.get(name)
        if not isinstance(value, bool):
            raise FrameError(f"{self.kind}: {name} must be true or false")
        return value

    def expect(self, *kinds: str) -> "Frame":
        """Itself, if it is of one of ``kinds``."""
        if self.kind not in kinds:
            raise FrameError(f"{shown(self.kind)} came where {' or '.join(kinds)} was to come")
        return self


class Channel:
    """A connection that frames are sent and received on; by one thread at a time each.

    A frame that is waited for may take as long as it likes: the system finds out when the other
    process or its host is gone.

    Args:
        silence_s: how long any part of a frame may take.

    Raises:
        FrameError: in any method, what comes is no frame.
        OSError: in any method, the connection is broken, or silent for too long.
    """

    def __init__(self, sock: socket.socket, silence_s: float = SILENCE_S) -> None:
        self._sock, self._silence_s = sock, silence_s
        sock.settimeout(silence_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", VANISHED_S // 2),
            ("TCP_KEEPINTVL", VANISHED_S // 6),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", VANISHED_S * 1000),
        ):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @property
    def has_ended(self) -> bool:
        """Whether the other side has ended the connection, as far as is known; reads nothing."""
        self._sock.setblocking(False)
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._sock.settimeout(self._silence_s)

    def send(self, kind: str, values: Sequence[Tensor] = (), **fields: Any) -> int:
        """Send a frame; returns its bytes.

        Args:
            values: fp32 tensors, sent one after the other.
        """
        header = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
        if len(header) > MAX_HEADER_BYTES:
            raise FrameError(f"{kind}: its header of {len(header)} bytes is too long to be sent")
        size = sum(_num_bytes(x) for x in values)
        self._sock.sendall(_PREFIX.pack(MAGIC, VERSION, len(header), size) + header)
        for x in values:
            data = _bytes_of(x.detach().cpu().contiguous())
            for begin in range(0, len(data), CHUNK_BYTES):
                self._sock.sendall(data[begin : begin + CHUNK_BYTES])
        return _PREFIX.size + len(header) + size

    def receive(self, wait_s: float | None = None) -> Frame:
        """The next frame's header; its values, if any, are to be received next.

        Args:
            wait_s: how long it may take to begin; None: any time.

        Raises:
            Closed: there is none, and the other side has ended the connection.
        """
        prefix = bytearray(_PREFIX.size)
        self._sock.settimeout(wait_s)
        try:
            received = self._sock.recv_into(prefix)
        finally:
            self._sock.settimeout(self._silence_s)
        if not received:
            raise Closed("the connection has ended")
        self._fill(memoryview(prefix)[received:])
        magic, version, header_bytes, value_bytes = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise FrameError("it is not megabit that speaks")
        if version != VERSION:
            raise FrameError(f"it speaks version {version}, not {VERSION}; use the same megabit")
        if header_bytes > MAX_HEADER_BYTES:
            raise FrameError(f"a header of {header_bytes} bytes is too long")
        header = bytearray(header_bytes)
        self._fill(memoryview(header))
        try:
            fields = json.loads(bytes(header))
        except (ValueError, RecursionError) as error:
            raise FrameError("a header is not JSON") from error
        if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
            raise FrameError("a header is not an object with a kind")
        return Frame(fields["kind"], fields, value_bytes)

    def values(self, frame: Frame, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
        """Receive a frame's values: fp32 tensors of ``shapes``, one at a time. All are to be taken.

        Raises:
            FrameError: the frame has not that many values; nothing is allocated then.
        """
        expected = 4 * sum(map(math.prod, shapes))
        if frame.value_bytes != expected:
            raise FrameError(
                f"{shown(frame.kind)} has {frame.value_bytes} bytes of values, not {expected}"
            )
        for shape in shapes:
            x = torch.empty(shape)
            self._fill(_bytes_of(x))
            yield x

    def close(self, is_polite: bool = False) -> None:
        """End the connection; a thread that waits for it wakes up.

        Args:
            is_polite: see to it that what was sent last arrives, though more was to be received:
                a connection that is closed then may lose it.
        """
        with suppress(OSError):
            if is_polite:
                self._sock.shutdown(socket.SHUT_WR)
                self._sock.settimeout(LINGER_S)
                until = time.monotonic() + LINGER_S
                while self._sock.recv(CHUNK_BYTES) and time.monotonic() < until:
                    pass
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _fill(self, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            received = self._sock.recv_into(buffer[filled:])
            if not received:
                raise FrameError("the connection has ended in the middle of a frame")
            filled += received


def shown(text: str) -> str:
    """What somebody else has sent, fit for a line of a log."""
    return repr(text[:80])


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _bytes_of(x: Tensor) -> memoryview:
    if x.dtype != torch.float32:
        raise TypeError(f"values are float32, not {x.dtype}")
    return x.reshape(-1).view(torch.uint8).numpy().data
