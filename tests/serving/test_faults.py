"""Ranks that die or stop, and the end of ``megabit serve``, with a real engine at tp=2."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command import refused
from tests.inference.models import save_served_model
from tests.patience import PATIENCE_S, eventually
from tests.serving.served import (
    Server,
    children,
    first_chunk,
    in_background,
    megabit_server,
    rest_of,
)

PROMPT = "the quick brown fox"
LAYERS = "parallel.layers_per_stage"
GREEDY = {"max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Long answers, so that requests are under way for some time.
    return save_served_model(tmp_path_factory.mktemp("faults") / "model", max_length=4096)


@contextmanager
def served(model: Path, folder: Path, *settings: str) -> Iterator[Server]:
    common = ("parallel.tp=2", "engine.timeout_s=6", "server.restart_backoff_s=0.2")
    with megabit_server(model, folder / "log", *common, *settings) as server:
        yield server


@pytest.mark.slow
def test_ranks_that_are_lost_and_the_end(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path) as server:
        text = server.complete(PROMPT, **GREEDY).json()["choices"][0]["text"]
        # A stopped rank is missed by the other one, after engine.timeout_s.
        for restarts, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            lose_a_rank(server, number)
            # The same answer from the next engine, and nothing is left of the last one.
            server.wait_for("/ready", 200)
            assert server.complete(PROMPT, **GREEDY).json()["choices"][0]["text"] == text
            assert len(children(server.process.pid)) == 2
            assert server.metric("megabit_engine_restarts_total") == restarts
        end_under_load(server)


def lose_a_rank(server: Server, number: int) -> None:
    """In the middle of a stream and of another answer; both are told."""
    whole = in_background(lambda: server.complete(PROMPT, max_tokens=4000, ignore_eos=True))
    with first_chunk(server, max_tokens=4000, ignore_eos=True) as stream:
        eventually(lambda: server.metric("megabit_num_requests_running") == 2)
        os.kill(children(server.process.pid)[1], number)
        content = rest_of(stream)
        assert b'data: {"error":{' in content
        assert b"[DONE]" not in content
    eventually(lambda: whole)
    told = whole[0].json()["error"]
    assert (whole[0].status_code, told["code"]) == (503, "engine_failed")
    assert server.http.get("/health").status_code == 503


def end_under_load(server: Server) -> None:
    ranks = children(server.process.pid)
    running = [
        in_background(lambda: server.complete(PROMPT, max_tokens=100, ignore_eos=True))
        for _ in range(8)
    ]
    eventually(lambda: server.metric("megabit_num_requests_running") == 8)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("/ready", 503)
    assert server.complete(PROMPT).status_code == 503
    assert server.process.wait(PATIENCE_S) == 0
    eventually(lambda: all(running))
    for (found,) in running:
        assert found.status_code == 200
        assert found.json()["usage"]["completion_tokens"] == 100
    assert not any(_runs(rank) for rank in ranks)


@pytest.mark.slow
def test_more_than_may_wait(model: Path, tmp_path: Path) -> None:
    settings = (
        "engine.max_sequences=2",
        "server.max_waiting_requests=3",
        "server.first_token_timeout_s=120",  # of a busy machine
    )
    with megabit_server(model, tmp_path / "log", *settings) as server:
        wanted = {"max_tokens": 100, "ignore_eos": True}
        running = [in_background(lambda: server.complete(PROMPT, **wanted)) for _ in range(12)]
        eventually(lambda: all(running))
        answers = [found[0] for found in running]
        refused = [answer for answer in answers if answer.status_code == 429]
        # Two are computed, one more is with the engine, three wait.
        assert 1 <= len(refused) <= 12 - 6
        assert all("retry-after" in answer.headers for answer in refused)
        for answer in answers:
            if answer not in refused:
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 100
        assert server.metric("megabit_num_requests_waiting") == 0


@pytest.mark.slow
def test_ranks_end_with_the_server(model: Path, tmp_path: Path) -> None:
    """Even while they load the model, and whatever end it has."""
    with megabit_server(model, tmp_path / "log", "parallel.tp=2", ready=False) as server:
        ranks = eventually(lambda: children(server.process.pid))
        server.process.kill()
        eventually(lambda: not any(_runs(rank) for rank in ranks))


@pytest.mark.slow
def test_what_the_engine_refuses(model: Path, tmp_path: Path) -> None:
    with megabit_server(model, tmp_path / "log", "engine.kv_cache_mb=0.01", ready=False) as server:
        assert server.process.wait(PATIENCE_S) == 1
        (line,) = [line for line in server.log.splitlines() if line.startswith("error: ")]
        assert "engine.kv_cache_mb" in line


def test_what_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    assert refused("serve", tmp_path / "nothing").startswith(str(tmp_path / "nothing"))
    assert "engine.max_sequences" in refused("serve", model, "engine.max_sequences=0")
    assert "did you mean 'port'" in refused("serve", model, "server.prt=1")
    assert "parallel.tp: 3 does not divide" in refused("serve", model, "parallel.tp=3")
    assert "layers_per_stage" in refused("serve", model, "parallel.pp=2", f"{LAYERS}=[3,3]")
    assert "4096 positions" in refused("serve", model, "engine.max_model_len=5000")
    template = tmp_path / "template.jinja"
    template.write_text("{% if %}")
    told = refused("serve", model, f"server.chat_template={template}")
    assert told.startswith(f"{template}: not a chat template")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused("serve", model, f"server.port={port}")
    assert "server.host" in refused("serve", model, "server.host=203.0.113.1")


def _runs(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
