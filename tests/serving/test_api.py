"""What the routes answer, in front of the echo engine: forms of requests, and of mistakes."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.serving.echo_engine import IS_NO_NUMBER, MAX_MODEL_LEN
from tests.serving.served import VOCAB, Server, echo_server

PROMPT = "the quick brown fox"


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """Of a stream that ended well."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def error(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    assert "\n" not in body["message"]
    return body


def test_no_torch() -> None:
    code = (
        "import megabit.serving.app, megabit.serving.start, megabit.serving.run, sys;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_text(echo: Server) -> None:
    body = echo.complete(PROMPT, max_tokens=4).json()
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": PROMPT,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["total_tokens"] == 8


def test_default_length(echo: Server) -> None:
    assert echo.complete(PROMPT).json()["usage"]["completion_tokens"] == 16
    for left in (3, 1):
        near_the_end = [65] * (MAX_MODEL_LEN - left)
        assert echo.complete(near_the_end).json()["usage"]["completion_tokens"] == left
        wanted = echo.complete(near_the_end, max_tokens=left).json()
        assert wanted["usage"]["completion_tokens"] == left


def test_prompts_of_all_forms(echo: Server) -> None:
    ids = [70, 71, 72]
    for prompt, count in ((ids, 1), ([ids, ids[:1]], 2), ([PROMPT, "a", "b"], 3), ("", 1)):
        choices = echo.complete(prompt, max_tokens=2).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(count))
    # Choices are in the order of prompts, those of one prompt side by side.
    texts = [c["text"] for c in echo.complete([[70], [71]], n=2, max_tokens=1).json()["choices"]]
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_echo_and_logprobs(echo: Server) -> None:
    ids = [70, 71, 72]
    body = echo.complete([ids, ids], max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1)
    for choice in body.json()["choices"]:
        told = choice["logprobs"]
        # As lm-eval reads it: an entry for each token, the generated one at the end.
        assert told["token_logprobs"] == [None, -0.5, -0.5, -0.5]
        assert told["top_logprobs"][0] is None
        assert [max(top.values()) for top in told["top_logprobs"][1:]] == [-0.5] * 3
        assert told["text_offset"] == [0, 1, 2, 3]
        assert "".join(told["tokens"]) == choice["text"]
    scored = echo.complete(ids, max_tokens=0, echo=True, logprobs=0).json()["choices"][0]
    assert scored["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert scored["finish_reason"] == "length"


def test_one_prompt_token_with_logprobs(echo: Server) -> None:
    told = echo.complete([70], max_tokens=0, echo=True, logprobs=1).json()["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [None]


def test_stop(echo: Server) -> None:
    body = echo.complete(PROMPT, max_tokens=50, stop=["own f", "never"]).json()
    (choice,) = body["choices"]
    assert choice["text"] == "the quick br"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "own f")
    assert body["usage"]["completion_tokens"] == 4
    for answer in echo.complete(PROMPT, max_tokens=50, n=3, stop=" fox").json()["choices"]:
        assert answer["text"] == "the quick brown"
    by_id = echo.complete([70, 71, 72], stop_token_ids=[72]).json()["choices"][0]
    assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", 72)
    assert len(by_id["text"]) == 2
    end = echo.complete([70, 71, 0]).json()["choices"][0]
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", None)
    assert len(end["text"]) == 2
    ignored = echo.complete([70, 71, 0], ignore_eos=True, max_tokens=9).json()
    assert ignored["usage"]["completion_tokens"] == 9


def test_stream_is_the_answer_in_pieces(echo: Server) -> None:
    wanted = {"max_tokens": 40, "logprobs": 1, "echo": True, "n": 2, "ignore_eos": True}
    whole = echo.complete(PROMPT, **wanted).json()
    chunks = events(
        echo.complete(PROMPT, **wanted, stream=True, stream_options={"include_usage": True})
    )
    assert chunks.pop()["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert len(mine) > 3
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [t for c in mine for t in c["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
        ends = [c["finish_reason"] for c in mine]
        assert ends == [None] * (len(mine) - 1) + ["length"]


def test_a_character_is_never_broken(echo: Server) -> None:
    text = "naïve 北京 🙂🙂 "
    chunks = events(echo.complete(text, max_tokens=60, stream=True))
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces[:-1]).startswith(text)
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_chat(echo: Server) -> None:
    messages = [
        {"role": "system", "content": "hello"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "wor"}, {"type": "text", "text": "ld"}],
        },
    ]
    wanted = {"messages": messages, "max_tokens": 12, "ignore_eos": True}
    body = echo.post("/v1/chat/completions", **wanted, logprobs=True, top_logprobs=2).json()
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"].startswith("System: hello")
    first = choice["logprobs"]["content"][0]
    assert bytes(first["bytes"]).decode() == first["token"]
    assert len(first["top_logprobs"]) == 2
    chunks = events(echo.post("/v1/chat/completions", **wanted, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == choice["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_models_and_the_rest(echo: Server) -> None:
    (model,) = echo.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("echo", MAX_MODEL_LEN)
    assert echo.http.get("/v1/models/echo").json() == model
    error(echo.http.get("/v1/models/other"), 404)
    error(echo.http.get("/nowhere"), 404)
    error(echo.http.get("/v1/completions"), 405)
    assert echo.http.get("/health").json()["status"] == "ok"
    assert "version" in echo.http.get("/version").json()
    for page in ("/docs", "/redoc", "/openapi.json"):
        error(echo.http.get(page), 404)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"max_token": 5}, "max_token"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[5], [VOCAB]]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 64, "n": 17}, "n"),
        ({"prompt": [65] * (MAX_MODEL_LEN + 1)}, "prompt"),
        ({"prompt": [65] * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": [65] * 500, "max_tokens": 13}, "max_tokens"),
        ({"prompt": "the " * 2000}, "prompt"),
    ],
)
def test_wrong_fields(echo: Server, wrong: dict[str, Any], param: str) -> None:
    told = error(echo.post("/v1/completions", **{"prompt": PROMPT, **wrong}), 400)
    assert told["param"] == param
    assert param.split(".")[0] in told["message"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_wrong_chats(echo: Server, wrong: dict[str, Any], param: str) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}]}
    assert error(echo.post("/v1/chat/completions", **{**good, **wrong}), 400)["param"] == param


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"prompt": [1' + b"0" * 5000 + b"]}",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_no_json(echo: Server, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    error(echo.http.post("/v1/completions", content=content, headers=headers), 400)
    assert echo.complete(PROMPT).status_code == 200


def test_other_mistakes(echo: Server) -> None:
    plain = {"content-type": "text/plain"}
    error(echo.http.post("/v1/completions", content=b"{}", headers=plain), 415)
    told = error(echo.complete(PROMPT, model="gpt-5"), 404)
    assert (told["code"], told["param"]) == ("model_not_found", "model")
    assert "'echo'" in told["message"]
    assert echo.complete(PROMPT, model="echo").status_code == 200
    told = error(echo.complete([IS_NO_NUMBER]), 500)
    assert "not a number" in told["message"]
    told = error(echo.complete([65] * 500, max_tokens=13), 400)
    assert (told["code"], "500" in told["message"]) == ("context_length_exceeded", True)
    assert "512" in told["message"]
    assert "400 context_length_exceeded" in echo.log.splitlines()[-1]
    assert echo.metric("megabit_client_disconnects_total") == 0


def test_bodies_that_are_too_large(echo: Server) -> None:
    ten_mb = "x" * (10 << 20)
    assert error(echo.complete(ten_mb), 413)["code"] == "body_too_large"
    with socket.create_connection(("127.0.0.1", httpx2.URL(echo.url).port), 10) as raw:
        # A client that asks first is told before it has sent anything.
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            b"content-length: 10000000\r\nexpect: 100-continue\r\n\r\n"
        )
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    assert echo.complete(PROMPT).status_code == 200


def test_prompts_that_are_never_tokenized(echo: Server) -> None:
    """Their characters are more than all tokens that there is room for could have."""
    text = "the quick brown fox jumps " * 100_000
    chat = {"messages": [{"role": "user", "content": text}]}
    began = time.monotonic()
    for response, param in (
        (echo.complete(text), "prompt"),
        (echo.complete(["a", text]), "prompt"),
        (echo.post("/v1/chat/completions", **chat), "messages"),
    ):
        told = error(response, 400)
        assert told["code"] == "context_length_exceeded"
        assert told["param"] == param
        assert "at least" in told["message"]
    # 7.8 MB would take seconds to tokenize, more than sending it does.
    assert time.monotonic() - began < 2


def test_names_of_this_host(echo: Server) -> None:
    port = httpx2.URL(echo.url).port
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:80", "LOCALHOST"):
        assert echo.http.get("/health", headers={"host": host}).status_code == 200
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "[::2]", ""):
        told = error(echo.http.get("/v1/models", headers={"host": host}), 421)
        assert told["code"] == "unknown_host"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (b'"temperature": NaN', "temperature: must be a finite number."),
        (b'"temperature": -1', "temperature: must be greater than or equal to 0."),
        (b'"temperature": [1]', "temperature: must be a number."),
        (b'"repetition_penalty": 1e-300', "repetition_penalty: must be greater than or equal to"),
        (b'"max_tokens": "16"', "max_tokens: must be an integer."),
        (b'"stream": "yes"', "stream: must be a boolean."),
        (b'"stop": [""]', "stop.0: must have at least 1 character."),
        (b'"stream_options": 5', "stream_options: must be an object."),
        (b'"seed": null', "prompt: is missing."),
    ],
)
def test_sentences(echo: Server, wrong: bytes, message: str) -> None:
    prompt = b"" if b"seed" in wrong else b'"prompt": "a", '
    headers = {"content-type": "application/json"}
    content = b"{" + prompt + wrong + b"}"
    told = error(echo.http.post("/v1/completions", content=content, headers=headers), 400)
    assert told["message"].startswith(message)


def test_sentence_of_a_role(echo: Server) -> None:
    chat = {"messages": [{"role": "tool", "content": "x"}]}
    told = error(echo.post("/v1/chat/completions", **chat), 400)["message"]
    assert told.startswith("messages.0.role: must be 'system', ")


def test_no_http(echo: Server) -> None:
    with socket.create_connection(("127.0.0.1", httpx2.URL(echo.url).port), 10) as raw:
        raw.sendall(b"\x00\x01\x02 nothing\r\n\r\n")
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    assert echo.http.get("/health").status_code == 200


def test_ids_the_model_knows(echo: Server) -> None:
    """All of them may be asked for, whatever their bytes are."""
    body = echo.complete(list(range(7, VOCAB)), max_tokens=1, echo=True, logprobs=1)
    assert len(body.json()["choices"][0]["logprobs"]["tokens"]) == VOCAB - 6


def test_key(tmp_path: Path) -> None:
    with echo_server(tmp_path, "server.api_key=sécret", "server.model_name=mine") as server:
        for headers in ({}, {"authorization": "Bearer secret"}, {"authorization": "secret"}):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
                response = server.http.request(method, path, headers=headers)
                assert error(response, 401)["code"] == "invalid_api_key"
        server.http.headers["authorization"] = "Bearer sécret"
        response = server.complete(PROMPT, model="mine")
        assert response.json().get("model") == "mine", response.text
        assert "sécret" not in server.log
