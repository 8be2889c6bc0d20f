"""An engine without a model: answers repeat the prompt. A process of its own that speaks the
engine's messages, for tests of what is between a client and an engine.

    python tests/serving/echo_engine.py SOCKET_FD SECONDS_PER_TOKEN MAX_MODEL_LEN

Some prompts have effects: see the constants.
"""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import socket, socketpair

from megabit.config import ServingConfig
from megabit.inference.messages import (
    AbortRequest,
    AddRequest,
    Failed,
    Message,
    PromptLogprobs,
    Ready,
    Stats,
    Stop,
    TokenLogprobs,
    Tokens,
    decode,
    encode,
)

MAX_MODEL_LEN = 512
DIES, FAILS, HANGS, IS_NO_NUMBER = 3, 4, 5, 6
"""First tokens of prompts that end the engine, let it say that it failed, stop its heartbeat, and
have an answer that cannot be computed."""
_REPORT_S = 0.2


class EchoProcess:
    """What ``RankProcesses`` is to a real engine."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket) -> None:
        self.socket = sock
        self.process = process

    @staticmethod
    def start(serving: ServingConfig, token_s: float = 0.001) -> "EchoProcess":
        own, theirs = socketpair()
        fd = theirs.fileno()
        length = serving.engine.max_model_len or MAX_MODEL_LEN
        told = (fd, token_s, length)
        command = [sys.executable, str(Path(__file__).resolve()), *map(str, told)]
        process = subprocess.Popen(command, pass_fds=[fd], start_new_session=True)
        theirs.close()
        return EchoProcess(process, own)

    def exit_codes(self) -> list[int | None]:
        return [self.process.poll()]

    def failure(self) -> str:
        code = self.process.poll()
        return f"the echo engine ended with {code}" if code is not None else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()


class Echo:
    def __init__(self, connection: socket, token_s: float, max_model_len: int) -> None:
        self._connection = connection
        self._token_s = token_s
        self._max_model_len = max_model_len
        self._buffer = b""
        self._running: dict[str, AddRequest] = {}
        self._answered: dict[str, int] = {}
        self._hangs = False
        self._generated = 0

    def run(self) -> None:
        self._send(Ready(self._max_model_len, 100, 16, 1, 1, (2,), "echo"))
        reported = 0.0
        while True:
            wait = self._token_s if self._running else 0.05
            for message in self._received(wait):
                if isinstance(message, Stop):
                    return
                if isinstance(message, AbortRequest):
                    self._abort(message.id)
                elif isinstance(message, AddRequest):
                    self._add(message)
            self._step()
            if time.monotonic() > reported + _REPORT_S and not self._hangs:
                reported = time.monotonic()
                self._send(self._stats())

    def _add(self, request: AddRequest) -> None:
        first = request.prompt[0]
        if first == DIES:
            os._exit(7)
        if first == FAILS:
            self._send(Failed("it was asked to fail"))
        self._hangs |= first == HANGS
        if first == IS_NO_NUMBER:
            self._send(Tokens(request.id, 0, (), finish="error", error="not a number"))
            return
        time.sleep(self._token_s)  # a prompt takes as long as a token
        if request.sampling.prompt_logprobs is not None:
            logprobs = tuple(_logprobs(t, 1) for t in request.prompt[1:])
            self._send(PromptLogprobs(request.id, logprobs))
        self._running[request.id] = request
        self._answered[request.id] = 0

    def _abort(self, request_id: str) -> None:
        request = self._running.pop(request_id, None)
        if request is not None:
            for index in range(request.sampling.n):
                self._send(Tokens(request_id, index, (), finish="abort"))

    def _step(self) -> None:
        for request in list(self._running.values()):
            done = self._answered[request.id]
            if request.sampling.max_tokens == 0:
                self._finish(request, ())
                continue
            token = request.prompt[done % len(request.prompt)]
            done = self._answered[request.id] = done + 1
            self._generated += request.sampling.n
            if token in request.end_ids:
                self._finish(request, (token,), token)
            elif done >= request.sampling.max_tokens:
                self._finish(request, (token,))
            else:
                for index in range(request.sampling.n):
                    self._send(Tokens(request.id, index, (token,), self._of(request, token)))

    def _finish(
        self, request: AddRequest, tokens: tuple[int, ...], stop_token: int | None = None
    ) -> None:
        finish = "length" if stop_token is None else "stop"
        for index in range(request.sampling.n):
            told = self._of(request, tokens[0]) if tokens else ()
            self._send(Tokens(request.id, index, tokens, told, finish, stop_token))
        del self._running[request.id]

    @staticmethod
    def _of(request: AddRequest, token: int) -> tuple[TokenLogprobs, ...]:
        top = request.sampling.logprobs
        return () if top is None else (_logprobs(token, top),)

    def _stats(self) -> Stats:
        return Stats(
            running=len(self._running),
            blocks_used=len(self._running),
            blocks_total=100,
            generation_tokens=self._generated,
            preemptions=1,
            prefix_queries=20,
            prefix_hits=5,
            comm_bytes={"tp/exact16": float(self._generated)},
            comm_seconds={"tp": 0.5},
            comm_calls={"tp": 10},
            comm_fallbacks={"size": 2},
            batch_tokens=(len(self._running),) if self._running else (),
            rank_memory=(1000,),
            rank_memory_limit=(2000,),
            stage_seconds=(0.25,),
            proposed_layers=(1, 1),
        )

    def _received(self, wait: float) -> list[Message]:
        readable, _, _ = select.select([self._connection], [], [], wait)
        if not readable:
            return []
        data = self._connection.recv(1 << 20)
        if not data:
            return [Stop()]
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [decode(line) for line in lines]

    def _send(self, message: Message) -> None:
        self._connection.sendall(encode(message))


def _logprobs(token: int, top: int) -> TokenLogprobs:
    best = tuple((token + i, -0.5 - i) for i in range(top))
    return TokenLogprobs(token, -0.5, best)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Echo(socket(fileno=int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3])).run()
