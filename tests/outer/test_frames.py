"""Frames, and what an owner does with what is none."""

import json
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megabit.outer.frames import (
    MAGIC,
    MAX_HEADER_BYTES,
    VERSION,
    Channel,
    Closed,
    Frame,
    FrameError,
)
from megabit.outer.hello import Hello, Region, agreed_settings, tiling_problem
from tests.outer.jobs import Background, StaleRun, both, owner_here, stale_config, wait_until


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        channel = Channel(listener.accept()[0], silence_s=5)
        with other:
            yield channel, other
        channel.close()


def frame(
    header: bytes | dict[str, Any],
    value_bytes: int = 0,
    magic: bytes = MAGIC,
    version: int = VERSION,
    header_bytes: int | None = None,
) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    return struct.pack("<4sHIQ", magic, version, length, value_bytes) + text


def test_what_is_sent_is_received(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    values = [torch.randn(3, 5), torch.tensor([float("nan"), -0.0]), torch.empty(0, 4)]
    sent = Channel(other).send("round", [values[0].t(), *values[1:]], round=3, is_change=True)
    received = channel.receive()
    assert (received.kind, received.integer("round"), received.flag("is_change")) == (
        "round",
        3,
        True,
    )
    assert sent == 18 + len(json.dumps({"kind": "round", "round": 3, "is_change": True})) - 5 + 68
    shapes = [(5, 3), (2,), (0, 4)]
    for got, x in zip(channel.values(received, shapes), [values[0].t(), *values[1:]], strict=True):
        assert torch.equal(got.view(torch.int32), x.contiguous().view(torch.int32))
    assert not channel.has_ended
    other.close()
    wait_until(lambda: channel.has_ended)
    with pytest.raises(Closed):
        channel.receive()


HOSTILE = {
    "not megabit": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "it is not megabit that speaks"),
    "another version": (frame({"kind": "x"}, version=9), "speaks version 9, not 1"),
    "a huge header": (frame(b"", header_bytes=2**32 - 1), "a header of 4294967295 bytes is too"),
    "a large header": (frame(b"", header_bytes=MAX_HEADER_BYTES + 1), "is too long"),
    "no JSON": (frame(b"{]"), "a header is not JSON"),
    "no text": (frame(b"\xff\xfe"), "a header is not JSON"),
    "deep JSON": (frame(b"[" * 200_000), "a header is not JSON"),
    "a long number": (frame(b'{"kind":' + b"9" * 10_000 + b"}"), "a header is not JSON"),
    "a list": (frame(b"[1]"), "not an object with a kind"),
    "no kind": (frame({"round": 1}), "not an object with a kind"),
    "a kind that is none": (frame({"kind": 3}), "not an object with a kind"),
    "half a prefix": (MAGIC + b"\x01", "in the middle of a frame"),
    "half a header": (frame({"kind": "x"})[:-2], "in the middle of a frame"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_frame_is_refused(ends: tuple[Channel, socket.socket], name: str) -> None:
    channel, other = ends
    data, reason = HOSTILE[name]
    other.sendall(data)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(FrameError, match=reason):
        channel.receive()


def test_no_length_that_was_received_is_allocated(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(frame({"kind": "round"}, value_bytes=2**63))
    received = channel.receive()
    with pytest.raises(FrameError, match=r"'round' has 9223372036854775808 bytes of values, not 8"):
        next(channel.values(received, [(2,)]))


@pytest.mark.parametrize("value", [None, -1, 2.0, True, "3", 2**60, [1]])
def test_a_number_is_a_whole_number_in_its_bounds(value: object) -> None:
    with pytest.raises(FrameError, match="round must be a number from 0 to 7"):
        Frame("next", {"round": value}, 0).integer("round", 0, 7)


SHAPES = {"a": (4, 6), "b": (5,)}
OWN = {"outer.islands": 2, "outer.lr": 0.7}
WHOLE = [["a", [0, 4], [0, 6]], ["b", [0, 5]]]


def hello(**changes: object) -> Frame:
    fields: dict[str, object] = {
        "kind": "hello",
        "settings": OWN,
        "island": 1,
        "rank": 0,
        "ranks": 2,
        "token": "x",
        "gives": WHOLE,
        "takes": WHOLE,
        "round": 0,
        "base": 0,
        "base_id": "",
        "is_fresh": True,
    }
    return Frame("hello", {**fields, **changes}, 0)


def test_a_hello_survives_its_way() -> None:
    said = Hello.parse(hello(), OWN, SHAPES)
    assert said.gives == (Region("a", ((0, 4), (0, 6))), Region("b", ((0, 5),)))
    fields = json.loads(json.dumps({"kind": "hello", **said.fields()}))
    assert Hello.parse(Frame("hello", fields, 0), OWN, SHAPES) == said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("settings", [1]),
        ("settings", {}),
        ("settings", {"outer.islands": 2, "outer.lr": 0.5}),
        ("island", 2),
        ("island", -1),
        ("rank", 2),
        ("ranks", 0),
        ("ranks", 10**9),
        ("token", "x" * 65),
        ("token", 7),
        ("round", 2**40),
        ("base_id", None),
        ("is_fresh", 1),
        ("gives", "a"),
        ("gives", [[]]),
        ("gives", [["c", [0, 1]]]),
        ("gives", [["a\x1b[31m", [0, 1]]]),
        ("gives", [["a", [0, 4]]]),
        ("gives", [["a", [0, 4], [0, 7]]]),
        ("gives", [["a", [0, 4], [-1, 6]]]),
        ("gives", [["a", [0, 4], [3, 3]]]),
        ("gives", [["a", [0, 4], [5, 3]]]),
        ("gives", [["a", [0, 4], [0, True]]]),
        ("gives", [["a", [0, 4], [0, 6.0]]]),
        ("gives", [["a", [0, 4], 6]]),
        ("takes", [["b", [0, 5], [0, 1]]]),
        ("takes", {"b": 1}),
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(field: str, value: object) -> None:
    with pytest.raises(FrameError, match=r"hello: |settings: outer") as refused:
        Hello.parse(hello(**{field: value}), OWN, SHAPES)
    assert "\x1b" not in str(refused.value)


def test_parts_must_be_everything_once() -> None:
    top, bottom = Region("a", ((0, 2), (0, 6))), Region("a", ((2, 4), (0, 6)))
    left, right = Region("a", ((0, 4), (0, 3))), Region("a", ((0, 4), (3, 6)))
    b = Region("b", ((0, 5),))
    assert tiling_problem([b, bottom, top], SHAPES) is None
    assert tiling_problem([left, right, b], SHAPES) is None
    assert tiling_problem([top, b], SHAPES) == "does not bring every element of a once"
    assert tiling_problem([top, bottom], SHAPES) == "does not bring every element of b once"
    assert tiling_problem([top, left, b], SHAPES) == "brings a part of a twice"
    assert tiling_problem([top, bottom, b, b], SHAPES) == "does not bring every element of b once"


def exchange(port: int, data: bytes) -> bytes:
    """What the owner answers to ``data``."""
    with socket.create_connection(("127.0.0.1", port), 30) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            while received := sock.recv(65536):
                answer += received
        except ConnectionError:  # it had enough before all of it was sent
            return b""
        return answer


def garbage(rng: random.Random, good: bytes) -> bytes:
    """A good frame with something done to it."""
    data = bytearray(good)
    match rng.randrange(4):
        case 0:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            data[rng.randrange(len(data)) : 0] = rng.randbytes(rng.randint(1, 50))
        case _:
            data = bytearray(rng.randbytes(rng.randint(1, 500)))
    return bytes(data)


def test_an_owner_survives_everything_that_is_sent_to_it(tmp_path: Path) -> None:
    """And goes on serving its islands meanwhile; none of them is dropped."""
    with owner_here(tmp_path) as (port, lines, owner), both(port) as (fast, slow):
        config = stale_config(port, 1)
        said = {**hello().fields, "settings": agreed_settings(config), "gives": [], "takes": []}
        good = frame({**said, "island": 0, "rank": 5, "ranks": 6})
        for data, reason in HOSTILE.values():
            answer = exchange(port, data)
            if answer and "middle" not in reason:
                assert json.loads(answer[18:])["kind"] == "refuse"
        for header, reason in (
            ({**said, "gives": [["lm_head.oops", [0, 1]]]}, "which the model has not"),
            ({**said, "settings": {**said["settings"], "outer.lr": 0.5}}, "outer.lr is '0.5' ther"),
            ({"kind": "round", "round": 0}, "came where hello was to come"),
        ):
            assert reason in json.loads(exchange(port, frame(header))[18:])["reason"]
        rng = random.Random(0)
        for _ in range(150):
            exchange(port, garbage(rng, good))
        together = Background(lambda: fast.walk(0))
        slow.walk(1)
        together.result()
        assert owner.rounds.version == 1
        assert not any("dropped" in line for line in lines)
        assert all(line.isprintable() for line in lines)


def test_a_peer_that_breaks_the_rules_later_is_let_go(tmp_path: Path) -> None:
    """A round before its turn, of another length, of what is not finite: its island is dropped, and
    told why; the other goes on."""
    with owner_here(tmp_path) as (port, lines, _):
        good = StaleRun.create(stale_config(port, 0))
        good.outer.begin()
        for seed, (values_of, reason) in enumerate(
            (
                (lambda x: [v * float("nan") for v in x], "has what is not a finite number"),
                (lambda x: x[1:], "bytes of values, not"),
                (lambda x: [*x, x[0]], "bytes of values, not"),
            )
        ):
            bad = StaleRun.create(stale_config(port, 1))
            bad.outer.begin()
            joined = [line for line in lines if line.startswith("island 1")][-1]
            assert "joined" in joined or "came back" in joined
            link = bad.outer._link
            assert link is not None
            parts = [piece.tensors["master"] for piece in bad.state.optimizer.pieces(owned=True)]
            channel = link._channel
            channel.send("round", values_of(parts), round=seed, is_change=False, is_whole=True)
            answer = channel.receive()
            assert answer.kind == "refuse"
            assert reason in answer.text("reason")
            wait_until(lambda: lines[-1].startswith("island 1 dropped: it was refused: "))
            good.walk(seed)
