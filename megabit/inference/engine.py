"""Generate text from Python::

    from megabit.inference import Engine, SamplingParams

    with Engine.open("runs/mine", ["parallel.tp=2"]) as engine:
        for text in engine.stream("ROMEO:", SamplingParams(max_tokens=100)):
            print(text, end="", flush=True)
        answers = engine.generate(["Once", "Twice"], SamplingParams(temperature=0))

An engine of one rank computes in this process, others have processes of their own on this host
(``ranks``): that is all the difference. What is computed is in ``core``; here text becomes tokens
and tokens become text again.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from megabit.config import ServingConfig, load_serving_config
from megabit.errors import RunError, UserError
from megabit.inference.fit import check_fit
from megabit.inference.messages import (
    AbortRequest,
    AddRequest,
    Failed,
    Finish,
    Message,
    PromptLogprobs,
    Ready,
    SamplingParams,
    Stats,
    Stop,
    TokenLogprobs,
    Tokens,
    decode,
    encode,
)
from megabit.inference.model_text import ModelText
from megabit.inference.ranks import RankProcesses
from megabit.inference.sampling_problems import sampling_problems
from megabit.inference.text_stream import TextStream

if TYPE_CHECKING:
    from megabit.inference.session import EngineSession

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass
class Answer:
    """What the model made of a prompt."""

    text: str = ""
    """Without the stop string that ended it, or special tokens."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, if ``SamplingParams.logprobs`` asks for them."""
    finish: Finish | None = None
    """``stop``: an end token or a stop string; ``length``: ``max_tokens`` or the model's length."""


@dataclass
class Generation:
    """A prompt and its answers."""

    prompt_tokens: list[int]
    answers: list[Answer]
    """``SamplingParams.n`` of them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of all prompt tokens but the first, if ``SamplingParams.prompt_logprobs`` asks for them."""

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.answers[0].text


class Engine:
    """A model that answers. Not for several threads at once.

    Attributes:
        text: the model's tokenizer.
        ready: how the model is laid out, and what it has room for.
    """

    def __init__(self, link: "_Link", text: ModelText) -> None:
        self._link, self.text = link, text
        self._numbers = itertools.count()
        self._streams: dict[str, _Stream] = {}
        self.stats = Stats()
        """The newest report."""
        self.ready = self._wait_until_ready()

    @staticmethod
    def open(
        checkpoint: str | Path, settings: Sequence[str] = (), log: Path | None = None
    ) -> "Engine":
        """Load a model: a checkpoint, a run's folder, or a folder of Hugging Face's.

        Args:
            settings: YAML files and ``key=value``, as for ``megabit serve``: ``parallel.tp=2``.
            log: file for what rank processes print; default: standard error.

        Raises:
            UserError: the model or the settings are wrong.
            RunError: a rank failed.
        """
        path = Path(checkpoint)
        config = load_serving_config(settings)
        check_fit(path, config)
        text = ModelText(path)
        if config.parallel.tp * config.parallel.pp == 1:
            return Engine(_InProcess(path, config), text)
        return Engine(_Processes(RankProcesses.start(path, config, log)), text)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None
    ) -> list[Generation]:
        """Answer prompts, all of them side by side, in their order.

        Raises:
            UserError: a prompt is empty or too long, or has ids that are no tokens.
            RunError: the engine failed.
        """
        sampling = sampling or SamplingParams()
        started = [self._start(prompt, sampling) for prompt in _several(prompts)]
        try:
            while not all(stream.is_done for stream in started):
                self._take_in()
        finally:
            for stream in started:
                self._forget(stream)
        return [stream.generation for stream in started]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """The text of an answer in pieces, as it comes. Ending the loop ends the request.

        Raises:
            UserError, RunError: as ``generate``.
        """
        sampling = replace(sampling or SamplingParams(), n=1)
        stream = self._start(prompt, sampling)
        shown = 0
        try:
            while not stream.is_done:
                self._take_in()
                text = stream.generation.text
                if len(text) > shown:
                    yield text[shown:]
                    shown = len(text)
        finally:
            self._forget(stream)

    def close(self) -> None:
        """Let go of the model and of its processes."""
        self._link.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, prompt: Prompt, sampling: SamplingParams) -> "_Stream":
        ids = self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(ids, sampling)
        ends = () if sampling.ignore_eos else self.text.end_ids
        request = AddRequest(
            str(next(self._numbers)), tuple(ids), sampling, (*ends, *sampling.stop_token_ids)
        )
        stream = self._streams[request.id] = _Stream(request, self.text)
        self._link.send(request)
        return stream

    def _check(self, ids: list[int], sampling: SamplingParams) -> None:
        limit = self.ready.max_model_len
        problems = sampling_problems(sampling)
        if problems:
            raise UserError(*problems)
        if not ids:
            raise UserError("prompt: has no tokens; give one at least")
        if len(ids) + min(1, sampling.max_tokens) > limit:
            raise UserError(
                f"prompt: has {len(ids)} tokens, and with its answer may have {limit} "
                "(engine.max_model_len)"
            )
        for token in ids:
            if not 0 <= token < self.text.vocab_size:
                raise UserError(f"prompt: {token} is no token of a {self.text.vocab_size} in all")

    def _take_in(self) -> None:
        for message in self._link.receive():
            if isinstance(message, Failed):
                raise RunError(f"the engine has failed: {message.error}")
            if isinstance(message, Stats):
                self.stats = message
            if not isinstance(message, Tokens | PromptLogprobs):
                continue
            stream = self._streams.get(message.id)
            if stream is not None and stream.take(message):
                assert isinstance(message, Tokens)
                self._link.send(AbortRequest(message.id, message.index))

    def _forget(self, stream: "_Stream") -> None:
        self._streams.pop(stream.request.id, None)
        if not stream.is_done:
            self._link.send(AbortRequest(stream.request.id))

    def _wait_until_ready(self) -> Ready:
        while True:
            for message in self._link.receive():
                if isinstance(message, Ready):
                    return message
                if isinstance(message, Failed):
                    self.close()
                    if message.is_input_error:
                        raise UserError(*message.error.splitlines())
                    raise RunError(message.error)


class _Stream:
    """A request's answers as they come."""

    def __init__(self, request: AddRequest, text: ModelText) -> None:
        self.request = request
        count, stop = request.sampling.n, request.sampling.stop
        self.generation = Generation([*request.prompt], [Answer() for _ in range(count)])
        self._texts: list[TextStream] = [text.stream(request.prompt, stop) for _ in range(count)]

    @property
    def is_done(self) -> bool:
        return all(answer.finish for answer in self.generation.answers)

    def take(self, message: Tokens | PromptLogprobs) -> bool:
        """Take in what the engine says; whether an answer has ended before it knows."""
        if isinstance(message, PromptLogprobs):
            self.generation.prompt_logprobs = [*message.logprobs]
            return False
        answer, text = self.generation.answers[message.index], self._texts[message.index]
        if answer.finish:
            return False
        if message.error is not None:
            raise RunError(f"the engine could not answer: {message.error}")
        answer.tokens += message.tokens
        answer.logprobs += message.logprobs
        shown = message.tokens[: len(message.tokens) - (message.stop_token is not None)]
        answer.text += text.add(shown)
        if message.finish is not None:
            answer.text += text.finish()
        answer.finish = "stop" if text.stopped is not None else message.finish
        return text.stopped is not None and message.finish is None


class _Link(Protocol):
    """The way to an engine."""

    def send(self, message: AddRequest | AbortRequest) -> None: ...

    def receive(self) -> list[Message]:
        """What it has to say; waits until there is something, or something was done."""

    def close(self) -> None: ...


class _InProcess:
    """An engine of one rank."""

    def __init__(self, checkpoint: Path, serving: ServingConfig) -> None:
        from megabit.inference.device import device_of_rank
        from megabit.inference.start import start_core
        from megabit.mesh import ParallelMesh

        mesh = ParallelMesh(device=device_of_rank(serving.engine.device, 0, 1))
        started = start_core(checkpoint, serving, mesh)
        self._session: EngineSession | None = started.session()
        self._told: list[Message] = [self._session.ready(started.description)]
        self._report_at = 0.0

    def send(self, message: AddRequest | AbortRequest) -> None:
        self._told += self._open().handle(message)

    def receive(self) -> list[Message]:
        session = self._open()
        told, self._told = self._told, []
        if session.has_work:
            told += session.step()
        if time.monotonic() >= self._report_at:
            told.append(session.stats())
            self._report_at = time.monotonic() + 1
        return told

    def close(self) -> None:
        """Nothing runs between calls; the model is let go of."""
        self._session = None

    def _open(self) -> "EngineSession":
        if self._session is None:
            raise RunError("the engine was closed")
        return self._session


class _Processes:
    """An engine in rank processes of its own.

    A thread takes in what rank 0 says as it comes, whether anybody asks for it or not: it reports
    once a second, and would not compute any more if nobody took that.
    """

    def __init__(self, ranks: RankProcesses) -> None:
        self._ranks = ranks
        self._told: deque[Message] = deque()
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, message: AddRequest | AbortRequest) -> None:
        try:
            self._ranks.socket.sendall(encode(message))
        except OSError:
            raise RunError(f"the engine has failed: {self._ranks.failure()}") from None

    def receive(self) -> list[Message]:
        with self._changed:
            while not self._told:
                self._changed.wait()
            told, self._told = [*self._told], deque()
        for number, message in enumerate(told):
            if isinstance(message, Failed) and not message.is_input_error:
                # Rank 0 knows that another one is gone, its parent why.
                told[number] = Failed(self._ranks.failure())
        return told

    def close(self) -> None:
        try:
            self._ranks.socket.sendall(encode(Stop()))
        except OSError:
            self._ranks.kill()
        self._ranks.close()
        self._reader.join()

    def _read(self) -> None:
        lines = self._ranks.socket.makefile("rb")
        with suppress(OSError, ValueError):  # closed meanwhile
            while (line := lines.readline()).endswith(b"\n"):
                self._tell(decode(line))
        self._tell(Failed("the engine has ended"))

    def _tell(self, message: Message) -> None:
        with self._changed:
            if self._told and isinstance(message, Stats) and isinstance(self._told[-1], Stats):
                self._told.pop()  # nobody wants the older one
            self._told.append(message)
            self._changed.notify_all()


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many of them, as many."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [[int(token) for token in prompts]]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]
