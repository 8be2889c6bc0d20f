"""Servers for tests: processes, started and ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from megabit.data.tokenizer import train_tokenizer
from tests.patience import PATIENCE_S, eventually

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 400
TEXT = "the quick brown fox jumps over the lazy dog; User: Assistant: System: hello world\n" * 20


class Server:
    """A server process, and a client of it."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self._log = process, url, log
        self.http = httpx2.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> httpx2.Response:
        return self.post("/v1/completions", prompt=prompt, **body)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            family, _, rest = sample.partition("{")
            if family == name and all(f'{k}="{v}"' in rest for k, v in labels.items()):
                total += float(value)
        return total

    def wait_for(self, path: str, status: int, seconds: float = PATIENCE_S) -> httpx2.Response:
        return eventually(lambda: self._answer(path, status), seconds)

    def _answer(self, path: str, status: int) -> httpx2.Response | None:
        with suppress(httpx2.TransportError):
            response = self.http.get(path)
            return response if response.status_code == status else None
        return None

    def stop(self, number: int = signal.SIGTERM, seconds: float = PATIENCE_S) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def started(command: Sequence[str], log: Path, ready: bool = True) -> Iterator[Server]:
    """A server whose first line of output ends in its URL; nothing is left of it afterwards."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, log.read_text(encoding="utf-8")
        server = Server(process, line[line.index("http://") :].split()[0], log)
        if ready:
            server.wait_for("/ready", 200)
        try:
            yield server
        finally:
            server.http.close()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@contextmanager
def echo_server(folder: Path, *settings: str, token_s: float = 0.001) -> Iterator[Server]:
    """One in front of the echo engine."""
    model = folder / "echo"
    if not model.exists():
        model.mkdir()
        train_tokenizer([TEXT], VOCAB).save(str(model / "tokenizer.json"))
        config = {"vocab_size": VOCAB, "max_position_embeddings": 512}
        (model / "config.json").write_text(json.dumps(config))
    script = str(ROOT / "tests" / "serving" / "echo_server.py")
    command = [script, str(model), str(token_s), "server.port=0", *settings]
    with started(command, folder / f"log{time.monotonic_ns()}") as server:
        yield server


@contextmanager
def megabit_server(model: Path, log: Path, *settings: str, ready: bool = True) -> Iterator[Server]:
    """``megabit serve``."""
    command = ["-m", "megabit", "serve", str(model), "server.port=0", *settings]
    with started(command, log, ready) as server:
        yield server


def children(pid: int) -> list[int]:
    """Processes that a process has started: of a server its ranks, in order."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [int(child) for t in tasks for child in (t / "children").read_text().split()]
    return sorted(found)


def in_background(work: Callable[[], Any]) -> list[Any]:
    """What ``work`` gives, once it is done."""
    found: list[Any] = []
    threading.Thread(target=lambda: found.append(work()), daemon=True).start()
    return found


def first_chunk(server: Server, **body: Any) -> socket.socket:
    """A stream that has begun, and that nobody reads further."""
    raw = socket.create_connection(("127.0.0.1", httpx2.URL(server.url).port), PATIENCE_S)
    raw.sendall(as_http({"prompt": [70, 71, 72, 73], "stream": True, **body}))
    assert b"200 OK" in raw.recv(1 << 16)
    return raw


def as_http(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(content), content)
    )


def rest_of(stream: socket.socket) -> bytes:
    """A stream to its end."""
    content = bytearray()
    while part := stream.recv(1 << 16):
        content += part
        if content.endswith(b"0\r\n\r\n"):
            break
    return bytes(content)
