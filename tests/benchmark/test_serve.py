"""``megabit bench serve`` against a server whose engine takes a known time for each token."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.image import imread

from megabit.benchmark.http_stream import Address, Reply
from megabit.benchmark.serve import Limits, Load, Result, run
from megabit.data.tokenizer import train_tokenizer
from megabit.errors import RunError, UserError
from tests.command import refused
from tests.serving.echo_engine import IS_NO_NUMBER
from tests.serving.served import TEXT, VOCAB, Server, echo_server
from tests.test_cli import ENVIRONMENT

TOKEN_S = 0.02


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with echo_server(tmp_path_factory.mktemp("server"), token_s=TOKEN_S) as server:
        yield server


def reply(sent: float, pieces: list[float], tokens: int, error: str | None = None) -> Reply:
    end = pieces[-1] if pieces else sent
    return Reply(sent, 200, pieces, end, 5, tokens, error=error)


def test_figures_are_those_of_their_definitions() -> None:
    replies = [
        reply(0.0, [1.0, 1.5, 2.0], 3),
        reply(1.0, [1.2, 1.4, 1.6, 4.0], 8),  # some pieces have several tokens
        reply(1.0, [1.1], 1),
        reply(2.0, [2.1, 2.2], 2, error="it broke"),
    ]
    result = Result("m", "u", Load(), Limits(ttft_s=0.5, tpot_s=0.45), 0.0, replies)
    assert result.values("ttft_s") == pytest.approx([1.0, 0.2, 0.1])
    assert result.values("itl_s") == pytest.approx([0.5, 0.5, 0.2, 0.2, 2.4])
    assert result.values("tpot_s") == pytest.approx([0.5, 0.4])
    assert result.values("e2e_s") == pytest.approx([2.0, 3.0, 0.1])
    assert result.summary("ttft_s") == pytest.approx(
        {"mean": 1.3 / 3, "p50": 0.2, "p90": 0.84, "p99": 0.984, "max": 1.0}
    )
    assert result.rates == pytest.approx(
        {
            "requests_per_s": 3 / 4,
            "prompt_tokens_per_s": 15 / 4,
            "generated_tokens_per_s": 12 / 4,
        }
    )
    assert result.goodput == pytest.approx(2 / 4)
    assert result.failures == {"200: it broke": 1}
    nothing = Result("m", "u", Load(), Limits(), 0.0, [])
    assert (nothing.summary("itl_s"), nothing.goodput) == (None, None)


def test_a_closed_loop_keeps_all_clients_busy(server: Server) -> None:
    load = Load(clients=4, requests=12, prompt_tokens=7, answer_tokens=10, warmup=1)
    told: list[int] = []
    result = asyncio.run(run(server.url, load, Limits(), told=told.append))
    assert told == list(range(1, 13))
    assert [r.error for r in result.replies] == [None] * 12
    assert {(r.prompt_tokens, r.completion_tokens) for r in result.replies} == {(7, 10)}
    assert min(result.values("e2e_s")) > TOKEN_S
    # A token of these random ones is often part of a character, and shows with a later one.
    assert len(result.values("itl_s")) > 12
    assert most_at_once(result) == 4


def test_poisson_load_does_not_wait_for_answers(server: Server) -> None:
    load = Load(clients=None, rate=100.0, requests=20, prompt_tokens=5, answer_tokens=20, seed=3)
    result = asyncio.run(run(server.url, load, Limits()))
    assert len(result.complete) == 20
    assert most_at_once(result) > 10  # 100 a second, each of 0.4 s or more
    assert result.replies[-1].sent_at - result.began_at > 0.02


def most_at_once(result: Result) -> int:
    starts = [reply.sent_at for reply in result.replies]
    return max(sum(r.sent_at <= at < r.ended_at for r in result.replies) for at in starts)


def test_time_and_prompts_are_limits(server: Server) -> None:
    load = Load(clients=2, requests=10_000, seconds=0.3, prompts=("a", "the fox"), answer_tokens=2)
    result = asyncio.run(run(server.url, load, Limits()))
    assert 2 <= len(result.replies) < 100
    assert {reply.prompt_tokens for reply in result.replies} == {
        len(ids) for ids in map(encoded, load.prompts)
    }


def encoded(text: str) -> list[int]:
    ids: list[int] = train_tokenizer([TEXT], VOCAB).encode(text).ids
    return ids


def test_requests_that_fail_are_counted(tmp_path: Path) -> None:
    settings = ("engine.max_sequences=1", "server.max_waiting_requests=1")
    load = Load(clients=8, requests=16, prompt_tokens=5, answer_tokens=20, warmup=1)
    with echo_server(tmp_path, *settings, token_s=0.01) as server:
        result = asyncio.run(run(server.url, load, Limits()))
        assert len(result.replies) == 16
        assert 0 < len(result.complete) < 16
        assert all(reason.startswith("429: The server is full") for reason in result.failures)
        assert sum(result.failures.values()) == 16 - len(result.complete)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("127.0.0.1:8000", "must be the URL of a server"),
        ("ftp://x", "must be the URL"),
        ("http://127.0.0.1:99999", "is no URL"),
        ("http://127.0.0.1:1", "cannot be reached"),
    ],
)
def test_what_is_no_server(url: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        asyncio.run(run(url, Load(), Limits()))


def test_requests_that_are_refused_end_it(server: Server) -> None:
    with pytest.raises(UserError, match=r"refuses these requests: .*512"):
        asyncio.run(run(server.url, Load(prompt_tokens=600), Limits()))
    with pytest.raises(UserError, match="answers GET /v1/models with 404"):
        asyncio.run(run(f"{server.url}/elsewhere", Load(), Limits()))


def test_a_server_that_cannot_answer_ends_it(server: Server) -> None:
    assert encoded("&") == [IS_NO_NUMBER]
    with pytest.raises(RunError, match="cannot answer"):
        asyncio.run(run(server.url, Load(prompts=("&",)), Limits()))


def test_addresses() -> None:
    assert Address.of("http://h:1/v1") == Address("h", 1, "", False, "h:1")
    assert Address.of("https://h/a/") == Address("h", 443, "/a", True, "h")


def test_the_command(server: Server, tmp_path: Path) -> None:
    found = subprocess.run(
        [
            *(sys.executable, "-m", "megabit", "bench", "serve", server.url, "--clients", "3"),
            *("--requests", "6", "--prompt-tokens", "9", "--shared-tokens", "4"),
            *("--answer-tokens", "8", "--ttft-ms", "60000", "--tpot-ms", "0.1"),
            *("--json", "out.json", "--png", "out.png"),
        ],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "closed loop of 3 clients" in found.stdout
    assert "echo: 6 of 6 requests answered" in found.stdout
    assert "goodput: 0.00 requests/s" in found.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    assert (content["answered"], content["failed"], content["load"]["clients"]) == (6, {}, 3)
    assert content["generated_tokens_per_s"] == pytest.approx(48 / content["seconds"])
    assert len(content["requests"]) == 6
    assert content["ttft_s"]["p50"] <= content["ttft_s"]["p99"]
    assert imread(tmp_path / "out.png").std() > 0.01


def test_options_that_cannot_be(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    url = "http://127.0.0.1:1"
    both = refused("bench", "serve", url, "--rate", 2, "--clients", 3)
    assert both.startswith("--rate: is another kind of load")
    assert refused("bench", "serve", url, "--png", there).startswith(f"--png: {there} exists")
    assert refused("bench", "serve", url, "--prompts", there).endswith("no line that is not empty")
    assert "settings are for a model" in refused("bench", "serve", url, "parallel.tp=2")
    assert "cannot be reached" in refused("bench", "serve", url)
