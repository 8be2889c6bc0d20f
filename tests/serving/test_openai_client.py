"""``megabit serve`` with a real engine at tp=2, asked by the official client."""

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest

from tests.inference.models import save_served_model
from tests.patience import eventually
from tests.serving.served import Server, megabit_server

PROMPT = "the quick brown fox"
MESSAGES = [{"role": "user", "content": "what has the king said?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    model = save_served_model(folder / "model", max_length=256)
    with megabit_server(model, folder / "log", "parallel.tp=2", "engine.kv_cache_mb=2") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(trust_env=False)
    url = server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", http_client=http, max_retries=0) as client:
        yield client


def test_completions(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "model"
    wanted = {"model": model.id, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**wanted, logprobs=3)
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == 20
    assert choice.logprobs is not None
    assert len(choice.logprobs.token_logprobs) == 20
    for logprob, top in zip(
        choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert logprob in top.values()
    streamed = list(client.completions.create(**wanted, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    assert streamed[-1].choices[0].finish_reason == "length"
    assert client.completions.create(**wanted).choices[0].text == choice.text


def test_chat(client: openai.OpenAI) -> None:
    wanted = {"model": "model", "messages": MESSAGES, "max_completion_tokens": 16, "seed": 5}
    whole = client.chat.completions.create(**wanted, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert text
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    assert b"".join(bytes(token.bytes) for token in content).decode(errors="replace")
    streamed = list(
        client.chat.completions.create(
            **wanted, stream=True, stream_options={"include_usage": True}
        )
    )
    assert streamed[0].choices[0].delta.role == "assistant"
    assert streamed[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": streamed[-1].usage.prompt_tokens_details}
    )
    pieces = [c.choices[0].delta.content or "" for c in streamed if c.choices]
    assert "".join(pieces) == text
    several = client.chat.completions.create(**wanted, n=3)
    assert len({choice.message.content for choice in several.choices}) == 3
    assert several.choices[0].message.content == text  # a seed is a seed


def test_prompt_logprobs_are_those_of_the_answer(client: openai.OpenAI) -> None:
    """What is generated, and then given as a prompt, has the same log probabilities."""
    wanted = {"model": "model", "temperature": 0, "logprobs": 1}
    ids = [70, 71, 72, 73]
    first = client.completions.create(prompt=ids, max_tokens=8, **wanted).choices[0]
    scored = client.completions.create(
        prompt=[ids, ids[:1]], max_tokens=1, echo=True, **wanted
    ).choices
    assert [len(choice.logprobs.token_logprobs) for choice in scored] == [5, 2]
    assert scored[0].logprobs.token_logprobs[0] is None
    assert scored[0].logprobs.token_logprobs[4] == first.logprobs.token_logprobs[0]


def test_errors(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="There is no model 'other' here"):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="the model takes 256 in all"):
        client.completions.create(model="model", prompt=PROMPT, max_tokens=300)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="model", prompt=PROMPT, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model="model", messages=[])
    with pytest.raises(openai.APIStatusError, match="larger than") as told:
        client.completions.create(model="model", prompt="x" * (10 << 20))
    assert told.value.status_code == 413
    assert server.http.get("/health").status_code == 200


def test_many_at_once_are_what_each_is_alone(client: openai.OpenAI) -> None:
    prompts = [PROMPT[i:] + " " * (i % 3) for i in range(12)]

    def answer(prompt: str) -> str:
        wanted = {"model": "model", "max_tokens": 24, "temperature": 0}
        return client.completions.create(prompt=prompt, **wanted).choices[0].text

    alone = [answer(prompt) for prompt in prompts[:4]]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(answer, prompts))
    assert together[:4] == alone


@pytest.mark.slow
def test_clients_that_go_leave_no_block(server: Server) -> None:
    draw = random.Random(1)
    address = ("127.0.0.1", httpx2.URL(server.url).port)

    def one(number: int) -> None:
        with socket.create_connection(address, 10) as raw:
            body = b'{"prompt": "the %d", "max_tokens": 200, "stream": %s}' % (
                number,
                b"true" if number % 2 else b"false",
            )
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            time.sleep(draw.random() * 0.3)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(200)))
    eventually(lambda: server.metric("megabit_kv_cache_usage_perc") == 0, 30)
    eventually(lambda: server.metric("megabit_num_requests_running") == 0, 30)
    assert server.metric("megabit_num_requests_waiting") == 0
    assert server.metric("megabit_client_disconnects_total") >= 150
    assert server.complete(PROMPT, max_tokens=4).status_code == 200
    assert "Traceback" not in server.log


def test_metrics_of_ranks(server: Server) -> None:
    server.complete(PROMPT, max_tokens=4)
    eventually(lambda: server.metric("megabit_comm_bytes_total", axis="tp") > 0)
    for rank in "01":
        assert server.metric("megabit_rank_up", rank=rank) == 1
        used = server.metric("megabit_rank_memory_bytes", rank=rank)
        assert 1 << 20 < used < server.metric("megabit_rank_memory_limit_bytes", rank=rank)
    assert server.metric("megabit_comm_calls_total", axis="tp") > 0
    assert server.metric("megabit_stage_seconds_total", stage="0") > 0
    assert server.metric("megabit_iteration_tokens_total_count") > 0


def test_log(server: Server, tmp_path: Path) -> None:
    server.complete(PROMPT, max_tokens=4)
    assert "answer 4 tokens" in server.log.splitlines()[-1]
    assert "Ready: " in server.log
