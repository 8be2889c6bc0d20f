"""``megabit generate`` and ``megabit chat``: a real model, from the outside."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from megabit.cli.generate import _harmless
from megabit.inference.engine import Engine
from megabit.inference.messages import SamplingParams
from tests.command import megabit, refused
from tests.evaluation.saved_models import save_model
from tests.serving.browser import new_page
from tests.serving.served import started
from tests.test_cli import ENVIRONMENT
from tests.training.tiny import tiny_corpus


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_model(folder / "saved", tiny_corpus(folder))


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    with Engine.open(model) as engine:
        (done,) = engine.generate("the quick", SamplingParams(max_tokens=9, temperature=0))
        return done.text


GREEDY = ("--temperature", "0", "--max-tokens", "9")


def test_text_and_json(model: Path, expected: str) -> None:
    code, out, err = megabit("generate", model, "the quick", *GREEDY)
    assert (code, "\n".join(out), err) == (0, "\n".join(expected.splitlines()), [])
    code, out, _ = megabit("generate", model, "the quick", *GREEDY, "--json")
    found = json.loads(out[0])
    assert code == 0
    assert found.pop("seconds") > 0
    assert found == {
        "model": "saved",
        "text": expected,
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 9,
    }


def test_options(model: Path) -> None:
    def text(*options: str | int) -> str:
        code, out, err = megabit("generate", model, "a", "--json", *options)
        assert (code, err) == (0, [])
        return str(json.loads(out[0])["text"])

    drawn = [text("--seed", seed, "--max-tokens", 12, "--temperature", 2) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    only_one = text("--seed", 5, "--max-tokens", 12, "--top-k", 1)
    assert only_one == text("--max-tokens", 12, "--temperature", 0)
    stop = only_one[1:3]
    stopped = text("--max-tokens", 12, "--temperature", 0, "--stop", stop, "--stop", "never")
    assert stopped == only_one[: only_one.index(stop)]
    assert text("--chat", "--max-tokens", 3, "--temperature", 0) is not None


@pytest.mark.slow
def test_standard_input_and_ranks(model: Path, expected: str) -> None:
    command = [sys.executable, "-m", "megabit", "generate", str(model), "-", *GREEDY]

    def run(text: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*command, "parallel.tp=2"],
            input=text,
            env=ENVIRONMENT,
            capture_output=True,
            timeout=120,
            check=False,
        )

    done = run(b"the quick")
    assert (done.returncode, done.stdout.decode()) == (0, expected + "\n"), done.stderr
    bad = run(b"\xff")
    assert (bad.returncode, bad.stdout) == (2, b"")
    assert bad.stderr.decode().startswith("error: standard input: not UTF-8")


def test_a_terminal_obeys_no_model() -> None:
    text = "\x1b]0;title\x07 a\nb\tc\x9b31m é你"
    assert _harmless(text) == "\ufffd]0;title\ufffd a\nb\tc\ufffd31m é你"


@pytest.mark.slow
def test_text_comes_to_a_terminal(model: Path, expected: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "megabit", "generate", str(model), "the quick", *GREEDY]
    process = subprocess.Popen(command, stdout=theirs, env=ENVIRONMENT)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1000):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0
    assert shown.decode().replace("\r\n", "\n") == _harmless(expected) + "\n"


def test_what_is_wrong_is_told_in_a_line(model: Path, tmp_path: Path) -> None:
    assert "nowhere: does not exist" in refused("generate", tmp_path / "nowhere", "x")
    assert "--top-p" in refused("generate", model, "x", "--top-p", 0)
    assert "--stop: must not be empty" in refused("generate", model, "x", "--stop", "")
    assert refused("generate", model, "a b " * 50).startswith("prompt: has ")
    assert "paralel" in refused("generate", model, "x", "paralel.tp=2")
    assert "nowhere: does not exist" in refused("chat", tmp_path / "nowhere")


@pytest.mark.slow
def test_chat_is_a_page_that_answers(model: Path, tmp_path: Path) -> None:
    command = ["-m", "megabit", "chat", str(model)]
    with started(command, tmp_path / "log") as server, new_page(tmp_path) as page:
        assert server.url.startswith("http://127.0.0.1:")
        page.open(server.url)
        page.wait("document.getElementById('state').dataset.state === 'ready'")
        page.run("document.getElementById('input').focus()")
        page.type("a")
        page.press_enter()
        page.wait("document.querySelector('.message.assistant .note') !== null")
        assert page.text(".error") == ""
        assert "tokens" in page.text(".note")
        assert server.stop() == 0
