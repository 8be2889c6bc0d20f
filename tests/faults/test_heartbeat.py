"""Signs of life through a real store, and whom they make to blame."""

import dataclasses
import json
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megabit.faults import heartbeat
from megabit.faults.blame import MAX_NAMED, Observer
from megabit.faults.heartbeat import LOST, MAX_TEXT, Board, Listener, Sign


def sign(rank: int, **more: object) -> Sign:
    return dataclasses.replace(Sign(rank, f"node{rank // 2}", 100 + rank), **more)  # type: ignore[arg-type]


def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# Signs and the board.


def test_a_sign_comes_back() -> None:
    own = sign(3, beat=7, step=12, doing="a step", begun=5, done=4)
    assert Sign.decode(own.encode().encode()) == own
    assert own.waits
    assert not dataclasses.replace(own, done=5).waits


def test_why_a_rank_ends_is_cut() -> None:
    decoded = Sign.decode(sign(0, ended="x" * 10_000).encode().encode())
    assert decoded is not None
    assert decoded.ended == "x" * MAX_TEXT


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        json.dumps({**dataclasses.asdict(sign(0)), "pid": "1"}).encode(),
        json.dumps({**dataclasses.asdict(sign(0)), "more": 1}).encode(),
        json.dumps({**dataclasses.asdict(sign(0)), "host": "x" * 5000}).encode(),
    ],
    ids=["empty", "bytes", "list", "nothing", "type", "unknown", "long"],
)
def test_what_is_not_a_sign(data: bytes) -> None:
    assert Sign.decode(data) is None


def test_a_board_has_the_signs_that_were_put_up() -> None:
    shared = store()
    first, second = Board(shared, 3, 2.0), Board(shared, 3, 2.0)
    assert first.read() == {}
    first.write(sign(0))
    second.write(sign(2, beat=1))
    assert first.read() == {0: sign(0), 2: sign(2, beat=1)}
    second.write(sign(2, beat=2))
    assert first.read()[2].beat == 2


def test_a_board_that_is_gone_is_an_error_soon() -> None:
    server = store()
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    board = Board(client, 2, 1.0)
    board.write(sign(0))
    del server
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        board.read()
    assert time.monotonic() - started < 30


# Listening.


def test_who_counts_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    listener = Listener(since=now[0])
    for beat in range(4):
        listener.hear({1: sign(1, beat=beat), 2: sign(2, beat=5), 3: sign(3, ended="")})
        now[0] += 0.1
    assert listener.silent([1, 2, 3, 4], for_s=0.3) == [2, 4]
    assert listener.silent([1, 2], for_s=60) == []


# Blame.


def observer(
    *signs: Sign, own: int = 0, heard: tuple[int, ...] = (), lost: bool = False
) -> Observer:
    """Rank ``own`` of as many as there are signs, 10 s after it began to listen."""
    now = time.monotonic()
    listener = Listener(since=now - 10)
    listener.signs = {each.rank: each for each in signs if each.rank != own}
    listener.heard_at = dict.fromkeys(heard, now)
    return Observer(signs[own], len(signs), listener, 3.0, lost)


def test_who_is_silent() -> None:
    said = observer(sign(0), sign(1), sign(2), heard=(1,)).cause()
    assert said == "rank 2 (node1, pid 102) has given no sign of life for 10 s or more"


def test_when_a_rank_was_last_heard() -> None:
    seen = observer(sign(0), sign(1), sign(2), heard=(1,))
    seen.listener.heard_at[2] = time.monotonic() - 7
    assert seen.cause() == "rank 2 (node1, pid 102) was last heard 7 s ago"


def test_who_waits_for_nobody() -> None:
    waiting = {"begun": 9, "done": 8, "step": 4}
    busy = sign(1, begun=8, done=8, step=4, doing="a step")
    said = observer(sign(0, **waiting), busy, sign(2, **waiting), heard=(1, 2)).cause()
    assert said == (
        "rank 1 (node0, pid 101) waits for nobody, at step 5 (a step), while others wait for it"
    )


def test_who_is_behind() -> None:
    waiting = {"begun": 9, "done": 8}
    said = observer(sign(0, step=5, **waiting), sign(1, step=4, **waiting), heard=(1,)).cause()
    assert said == "rank 1 (node0, pid 101) is at step 5, others at 6"


def test_nobody_is_to_blame() -> None:
    waiting = {"begun": 9, "done": 8, "step": 5}
    assert observer(sign(0, **waiting), sign(1, **waiting), heard=(1,)).cause() is None


def test_a_rank_that_has_failed_by_itself_is_the_cause_and_not_who_lost_it() -> None:
    failed, lost = sign(1, ended="ValueError: no"), sign(2, ended=LOST)
    said = observer(sign(0), failed, lost, sign(3)).missing()
    assert said == "rank 1 (node0, pid 101) has failed: ValueError: no"


def test_the_store_is_gone() -> None:
    said = observer(sign(0), sign(1), own=1, lost=True).missing()
    assert said is not None
    assert said.startswith("rank 0 (node0, pid 100) or its launcher, or their host, is gone")
    # Rank 0 has said goodbye: what it had to say is told by itself.
    assert observer(sign(0, ended=LOST), sign(1), own=1, lost=True).missing() is None


def test_of_many_some_are_named() -> None:
    said = observer(*map(sign, range(MAX_NAMED + 3))).cause()
    assert said is not None
    assert said.count("no sign of life") == MAX_NAMED
    assert said.endswith("; and 2 more")


def test_one_rank_of_a_host_speaks() -> None:
    signs = [sign(rank) for rank in range(4)]
    assert [observer(*signs, own=r, heard=(0, 1, 2, 3)).speaks for r in range(4)] == [
        True,
        False,
        True,
        False,
    ]
    assert observer(*signs, own=3, heard=(0, 1)).speaks  # rank 2 is silent
