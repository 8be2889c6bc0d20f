"""Full queues, deadlines and clients that go, in front of the echo engine."""

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from megabit.config.serving import ServerConfig
from megabit.serving.admission import Admission
from megabit.serving.api_error import ApiError
from tests.patience import eventually
from tests.serving.served import (
    as_http,
    echo_server,
    first_chunk,
    in_background,
    rest_of,
)

LONG = [70, 71, 72, 73]


def test_a_full_queue_and_afterwards(tmp_path: Path) -> None:
    settings = ("engine.max_sequences=1", "server.max_waiting_requests=2")
    with echo_server(tmp_path, *settings, token_s=0.01) as server:
        # The engine gets one and one more for afterwards; two wait.
        running = [in_background(lambda: server.complete(LONG, max_tokens=50)) for _ in range(4)]
        eventually(lambda: server.metric("megabit_num_requests_waiting") == 2)
        refused = server.complete(LONG, max_tokens=1)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        eventually(lambda: all(running))
        assert [found[0].status_code for found in running] == [200] * 4
        assert server.complete(LONG, max_tokens=1).status_code == 200
        assert server.metric("megabit_num_requests_waiting") == 0
        # A batch that could never fit is let in when nobody waits.
        assert len(server.complete([LONG] * 9, max_tokens=1).json()["choices"]) == 9


@pytest.mark.slow
def test_queued_tokens_are_bounded(tmp_path: Path) -> None:
    settings = ("engine.max_sequences=1", "server.max_waiting_tokens=300")
    with echo_server(tmp_path, *settings, token_s=0.01) as server:
        long = [70] * 200
        running = [in_background(lambda: server.complete(long, max_tokens=60)) for _ in range(3)]
        eventually(lambda: server.metric("megabit_num_requests_waiting") == 1)
        # Not even tokenized.
        assert server.complete("x" * 1000, max_tokens=1).status_code == 429
        assert server.complete("hello", max_tokens=1).status_code == 200
        eventually(lambda: all(running))
        assert [found[0].status_code for found in running] == [200] * 3


@pytest.mark.slow
def test_deadlines(tmp_path: Path) -> None:
    settings = (
        "engine.max_sequences=1",
        "server.first_token_timeout_s=1",
        "server.request_timeout_s=8",
    )
    with echo_server(tmp_path, *settings, token_s=0.05) as server:
        running = [in_background(lambda: server.complete(LONG, max_tokens=400)) for _ in range(2)]
        eventually(lambda: server.metric("megabit_num_requests_running") == 2)
        late = server.complete(LONG, max_tokens=1)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "first_token_timeout")
        assert "no first token within 1 s" in late.json()["error"]["message"]
        late = server.complete(LONG, first_token_timeout=0.2)
        assert late.status_code == 504
        assert "no first token within 0.2 s" in late.json()["error"]["message"]
        eventually(lambda: all(running))
        for (found,) in running:
            body = found.json()
            assert 1 < body["usage"]["completion_tokens"] < 400
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["choices"][0]["stop_reason"] == "timeout"
        assert server.metric("megabit_request_success_total", finished_reason="timeout") >= 3
        eventually(lambda: server.metric("megabit_kv_cache_usage_perc") == 0)
        assert server.complete(LONG, max_tokens=1).status_code == 200


def test_clients_that_go(tmp_path: Path) -> None:
    """At random moments: before an answer begins, in the middle of it, with and without a
    stream. The engine keeps nothing for them."""
    draw = random.Random(0)
    with echo_server(tmp_path, "engine.max_sequences=8", token_s=0.005) as server:
        port = httpx2.URL(server.url).port

        def one(_: int) -> None:
            request = as_http({"prompt": LONG, "max_tokens": 400, "stream": draw.random() < 0.5})
            with socket.create_connection(("127.0.0.1", port), 10) as raw:
                raw.sendall(request[: draw.choice([150, len(request), len(request)])])
                time.sleep(draw.random() * 0.1)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(one, range(100)))
        eventually(lambda: server.metric("megabit_num_requests_waiting") == 0)
        eventually(lambda: server.metric("megabit_kv_cache_usage_perc") == 0)
        assert server.metric("megabit_client_disconnects_total") > 50
        assert server.metric("megabit_num_requests_running") == 0
        assert server.complete(LONG, max_tokens=3).status_code == 200
        assert "Traceback" not in server.log


def test_streams_whose_client_goes(tmp_path: Path) -> None:
    """In the middle of answers that would go on for long; none of them is overlooked."""
    settings = ("engine.max_model_len=1000000", "engine.max_sequences=64")
    draw = random.Random(2)
    with echo_server(tmp_path, *settings, token_s=0.002) as server:

        def one(_: int) -> None:
            with first_chunk(server, max_tokens=900000, ignore_eos=True):
                time.sleep(draw.random() * 0.1)

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(one, range(200)))
        eventually(lambda: server.metric("megabit_client_disconnects_total") == 200)
        eventually(lambda: server.metric("megabit_num_requests_running") == 0)


def test_what_waits_is_counted() -> None:
    admission = Admission(ServerConfig(max_waiting_requests=3, max_waiting_tokens=100))
    first = admission.enter(2, 41, 10, free=0)
    assert (admission.requests, admission.tokens) == (2, 21)
    admission.measured(first, 50, free=0)
    assert (admission.requests, admission.tokens) == (2, 50)
    admission.enter(1, 0, 50, free=0)
    assert (admission.requests, admission.tokens) == (3, 100)
    with pytest.raises(ApiError, match="3 requests wait"):
        admission.enter(1, 0, 0, free=0)
    admission.handed_over(first, 20)
    assert (admission.requests, admission.tokens) == (2, 80)
    with pytest.raises(ApiError, match="80 prompt tokens wait"):
        admission.enter(1, 0, 21, free=0)
    last = admission.enter(1, 0, 20, free=0)
    with pytest.raises(ApiError, match="80 prompt tokens wait"):
        admission.measured(last, 21, free=0)
    assert (admission.requests, admission.tokens) == (2, 80)
    admission.given_up(first, 30)
    admission.leave(first)
    assert (admission.requests, admission.tokens) == (1, 50)


@pytest.mark.slow
def test_slow_client(tmp_path: Path) -> None:
    """One that reads nothing loses its answer; the server does not keep it all for it."""
    # 64 answers are more than all the buffers between the two hold.
    body = {"max_tokens": 508, "n": 64, "logprobs": 20}
    with echo_server(tmp_path, token_s=0.0) as server, first_chunk(server, **body) as stream:
        eventually(lambda: server.metric("megabit_kv_cache_usage_perc") > 0)
        eventually(lambda: server.metric("megabit_kv_cache_usage_perc") == 0)
        assert server.complete(LONG).status_code == 200
        told = rest_of(stream)  # what was in buffers, then why there is no more
        assert b'"code":"slow_client"' in told
        assert b"[DONE]" not in told
