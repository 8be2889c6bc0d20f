"""The server's end of the socket to an engine: messages out, and each message in to whom it is for.

One ``Inbox`` belongs to one HTTP request, which may have several prompts and so several engine
requests. It is bounded: a client that does not read what was generated for it loses the request,
not the server its memory.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from socket import socket

from megabit.inference.messages import (
    AbortRequest,
    AddRequest,
    Failed,
    Message,
    PromptLogprobs,
    Ready,
    Stats,
    Tokens,
    decode,
    encode,
)
from megabit.serving.admission import Place
from megabit.serving.api_error import ApiError

MAX_UNREAD = 4096
"""Messages for a request that nobody has taken; some hundred bytes each."""

_MAX_LINE = 1 << 28
"""Log probabilities of a long prompt are one line."""


@dataclass(frozen=True)
class Received:
    """A message about a request, and when it came (``time.monotonic``)."""

    at: float
    job: "Job"
    message: Tokens | PromptLogprobs


class Inbox:
    """What the engine has said about the jobs of one HTTP request, in order."""

    def __init__(self) -> None:
        self._received: deque[Received] = deque()
        self._failure: ApiError | None = None
        self._changed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return len(self._received) >= MAX_UNREAD

    def put(self, received: Received) -> None:
        self._received.append(received)
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """No more will come; ``take`` raises this, after what is there already."""
        if self._failure is None:
            self._failure = error
            self._changed.set()

    async def take(self) -> list[Received]:
        """All that is there, at least one: who is slower than the engine gets more at once.

        Raises:
            ApiError: the engine has failed, or the client was too slow.
        """
        while not self._received:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        taken = list(self._received)
        self._received.clear()
        return taken


@dataclass(eq=False)
class Job:
    """One engine request, from its admission to its end."""

    request: AddRequest
    inbox: Inbox
    place: Place
    """Its own and that of the request's other prompts, as long as they wait."""
    sent_at: float | None = None
    """When the engine got it; None while it waits here."""
    is_aborted: bool = False
    finished: set[int] = field(default_factory=set)
    """Answers that are done, by index."""

    @property
    def sequences(self) -> int:
        return self.request.sampling.n


class EngineConnection:
    """Reads and writes one engine's socket.

    Args:
        on_report: hears of ``Ready``, ``Stats`` and ``Failed``.
        on_done: hears of each job that the engine has nothing more to say about.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_report: Callable[[Ready | Stats | Failed], None],
        on_done: Callable[[Job], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_report = on_report
        self._on_done = on_done
        self.jobs: dict[str, Job] = {}
        """That the engine has."""

    @staticmethod
    async def open(
        sock: socket,
        on_report: Callable[[Ready | Stats | Failed], None],
        on_done: Callable[[Job], None],
    ) -> "EngineConnection":
        reader, writer = await asyncio.open_connection(sock=sock, limit=_MAX_LINE)
        return EngineConnection(reader, writer, on_report, on_done)

    async def read(self) -> None:
        """Distribute messages until the engine's end is closed."""
        while True:
            try:
                line = await self._reader.readline()
            except (ConnectionError, ValueError):  # ValueError: a line beyond all bounds
                return
            if not line.endswith(b"\n"):
                return
            self._distribute(decode(line))

    def add(self, job: Job) -> None:
        job.sent_at = time.monotonic()
        self.jobs[job.request.id] = job
        self.send(job.request)

    def abort(self, job: Job) -> None:
        """Nobody wants the answer; the engine says so once it has let go of it."""
        if job.request.id in self.jobs and not job.is_aborted:
            job.is_aborted = True
            self.send(AbortRequest(job.request.id))

    def abort_answer(self, job: Job, index: int) -> None:
        """Nobody wants more of one answer; the others go on."""
        if job.request.id in self.jobs and not job.is_aborted:
            self.send(AbortRequest(job.request.id, index))

    def send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):  # the other end was first
            await self._writer.wait_closed()

    def _distribute(self, message: Message) -> None:
        if isinstance(message, Ready | Stats | Failed):
            self._on_report(message)
        elif isinstance(message, Tokens | PromptLogprobs):
            job = self.jobs.get(message.id)
            if job is not None:  # else: it was over when the engine heard of its abort
                self._deliver(job, message)

    def _deliver(self, job: Job, message: Tokens | PromptLogprobs) -> None:
        if not job.is_aborted:
            if job.inbox.is_full:
                error = ApiError(
                    503, "The answer was not read as fast as it was generated.", code="slow_client"
                )
                job.inbox.fail(error)
                self.abort(job)
            else:
                job.inbox.put(Received(time.monotonic(), job, message))
        if not isinstance(message, Tokens) or message.finish is None:
            return
        job.finished.add(message.index)
        is_over = job.is_aborted and message.finish == "abort"
        if is_over or len(job.finished) == job.sequences:
            del self.jobs[job.request.id]
            self._on_done(job)
