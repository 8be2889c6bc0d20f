"""Engines that fail, and the end of the server, in front of the echo engine."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.serving.echo_engine import DIES, FAILS, HANGS
from tests.serving.served import (
    Server,
    children,
    echo_server,
    first_chunk,
    in_background,
    rest_of,
)

LONG = [70, 71, 72, 73]


def test_failed_engines(tmp_path: Path) -> None:
    settings = ("server.restart_backoff_s=0.3", "engine.rebalance=true")
    with echo_server(tmp_path, *settings, token_s=0.02) as server:
        for restarts, how in enumerate((DIES, FAILS), 1):
            fail(server, how)
            for path in ("/health", "/ready"):
                response = server.http.get(path)
                assert response.status_code == 503
                assert "retry-after" in response.headers
            assert server.complete(LONG).json()["error"]["code"] == "engine_restarting"
            eventually(lambda: server.metric("megabit_rank_up") == 0)
            generated = server.metric("megabit_comm_bytes_total")
            assert generated > 0
            server.wait_for("/ready", 200)
            assert server.complete(LONG, max_tokens=3).status_code == 200
            assert server.metric("megabit_engine_restarts_total") == restarts
            assert server.metric("megabit_comm_bytes_total") >= generated
        assert server.log.count("starting with [1, 1]") == 2
        assert server.log.count("parallel.layers_per_stage=[1, 1] would be faster") == 3
        assert "Traceback" not in server.log


def fail(server: Server, how: int) -> None:
    """In the middle of a stream and of another answer; both are told at once."""
    whole = in_background(lambda: server.complete(LONG, max_tokens=400))
    with first_chunk(server, max_tokens=400) as stream:
        eventually(lambda: server.metric("megabit_num_requests_running") == 2)
        started = time.monotonic()
        assert server.complete([how]).status_code == 503
        eventually(lambda: whole)
        assert time.monotonic() - started < 1.5
        assert whole[0].status_code == 503
        assert whole[0].json()["error"]["code"] == "engine_failed"
        assert "retry-after" in whole[0].headers
        text = rest_of(stream)
        assert b'data: {"error":{' in text
        assert b"[DONE]" not in text


@pytest.mark.slow
def test_an_engine_that_says_nothing(tmp_path: Path) -> None:
    """As when rank 0 is stopped: not healthy after 3 s, ended some time later."""
    with echo_server(tmp_path, "engine.timeout_s=0.5", "server.restart_backoff_s=0.1") as server:
        stuck = in_background(lambda: server.complete([HANGS, 70], max_tokens=500, n=1))
        told = server.wait_for("/health", 503, 8)
        assert told.json()["error"]["code"] == "engine_silent"
        assert server.metric("megabit_rank_up") == 1
        server.wait_for("/ready", 200, 15)
        assert server.metric("megabit_engine_restarts_total") == 1
        assert stuck
        assert "nothing was heard of rank 0" in server.log


def test_waiting_requests_go_to_the_next_engine(tmp_path: Path) -> None:
    settings = ("engine.max_sequences=1", "server.restart_backoff_s=0.1")
    with echo_server(tmp_path, *settings, token_s=0.02) as server:
        running = [in_background(lambda: server.complete(LONG, max_tokens=300)) for _ in range(2)]
        eventually(lambda: server.metric("megabit_num_requests_running") == 2)
        waiting = in_background(lambda: server.complete(LONG, max_tokens=2))
        eventually(lambda: server.metric("megabit_num_requests_waiting") == 1)
        (engine,) = children(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        eventually(lambda: all(running) and waiting)
        assert [found[0].status_code for found in running] == [503, 503]
        assert "SIGKILL" in running[0][0].json()["error"]["message"]
        assert waiting[0].status_code == 200


@pytest.mark.slow
def test_an_engine_that_fails_again_and_again(tmp_path: Path) -> None:
    settings = ("server.restart_backoff_s=0.1", "server.max_restarts=2")
    with echo_server(tmp_path, *settings) as server:
        for _ in range(3):
            server.wait_for("/ready", 200)
            assert server.complete([DIES]).status_code == 503
        assert server.process.wait(10) == 1
        assert "error: the engine has failed too often: " in server.log
        assert re.findall(r"again in (\S+) s", server.log) == ["0.1", "0.2"]


def test_drain(tmp_path: Path) -> None:
    with echo_server(tmp_path, token_s=0.02) as server:
        running = in_background(lambda: server.complete(LONG, max_tokens=60))
        eventually(lambda: server.metric("megabit_num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        refused = server.wait_for("/ready", 503)
        assert refused.json()["error"]["code"] == "shutting_down"
        refused = server.complete(LONG)
        assert refused.status_code == 503
        assert (refused.headers["connection"], "retry-after" in refused.headers) == ("close", True)
        assert server.http.get("/health").status_code == 200
        assert server.process.wait(10) == 0
        eventually(lambda: running)
        assert running[0].status_code == 200
        assert running[0].json()["usage"]["completion_tokens"] == 60


@pytest.mark.slow
def test_drain_has_an_end(tmp_path: Path) -> None:
    with echo_server(tmp_path, "server.drain_timeout_s=0.3", token_s=0.05) as server:
        running = in_background(lambda: server.complete(LONG, max_tokens=500))
        eventually(lambda: server.metric("megabit_num_requests_running") == 1)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 3
        eventually(lambda: running)
        assert running[0].status_code == 503
        assert running[0].json()["error"]["code"] == "shutting_down"


@pytest.mark.slow
def test_second_signal(tmp_path: Path) -> None:
    with echo_server(tmp_path, token_s=0.05) as server:
        in_background(lambda: server.complete(LONG, max_tokens=500))
        eventually(lambda: server.metric("megabit_num_requests_running") == 1)
        (engine,) = children(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        server.wait_for("/ready", 503)
        started = time.monotonic()
        assert server.stop(signal.SIGINT) == 128 + signal.SIGTERM
        assert time.monotonic() - started < 2
        assert not Path(f"/proc/{engine}").exists()
