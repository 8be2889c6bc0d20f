"""The answers to one HTTP request: from its admission, through the engine, to text.

Whatever way it ends (``close``), the engine forgets what is left of it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from megabit.inference.messages import (
    AddRequest,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)
from megabit.serving.answers import TIMEOUT, Answer, Asked, Piece, joined
from megabit.serving.api_error import ApiError
from megabit.serving.engine_client import Inbox, Job, Received
from megabit.serving.prompts import Messages, Prompt
from megabit.serving.server_metrics import RequestTimes
from megabit.serving.service import Service

logger = logging.getLogger("megabit.serving")


@dataclass(frozen=True)
class Wanted:
    """What a request asks for, whatever route it came by."""

    prompts: Sequence[str] | Sequence[Sequence[int]]
    sampling: SamplingParams
    max_tokens: int | None
    default_max_tokens: int | None
    """Without ``max_tokens``; None: what fits."""
    messages: Messages | None = None
    """A dialogue, instead of prompts."""
    first_token_s: float | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Characters of texts, and token ids."""
        texts = [p for p in self.prompts if isinstance(p, str)]
        texts += [m["content"] for m in self.messages or ()]
        ids = [p for p in self.prompts if not isinstance(p, str)]
        return sum(map(len, texts)), sum(map(len, ids))


class Generation:
    """One HTTP request with the engine.

    Args:
        request_id: what it is called in logs and in the answer.
    """

    def __init__(self, service: Service, request_id: str) -> None:
        self.id = request_id
        self._service = service
        self.created = int(time.time())
        self._arrived = time.monotonic()
        self._inbox = Inbox()
        self._asked: dict[Job, Asked] = {}
        self._first: list[Received] = []
        self.prompts: list[Prompt] = []
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        """By number of the prompt; there before the first piece of its answers."""
        self._ends: Counter[str] = Counter()
        self._is_closed = False
        self._refused = ""

    @property
    def usage(self) -> dict[str, object]:
        """Tokens so far, as the OpenAI API tells them."""
        asked = self._asked.values()
        prompt = sum(len(a.prompt.ids) for a in asked)
        answer = sum(a.answered for a in asked)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": sum(a.cached_tokens for a in asked)},
        }

    async def start(self, wanted: Wanted) -> None:
        """Hand the prompts over, and wait for the engine's first word.

        Raises:
            ApiError: it is refused, or there is no word in time.
        """
        limit = self._service.config.server.first_token_timeout_s
        if wanted.first_token_s is not None:
            limit = min(limit, wanted.first_token_s)
        self._service.enter(self)
        try:
            async with asyncio.timeout(limit):
                await self._submit(wanted)
                self._first = await self._inbox.take()
        except TimeoutError:
            self._count("timeout")
            raise ApiError(
                504,
                f"There was no first token within {limit:g} s; "
                f"{self._service.admission.requests} requests wait.",
                code="first_token_timeout",
                retry_after=self._service.admission.retry_after(),
            ) from None

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """All that is new, as it comes, until all answers are done.

        Raises:
            ApiError: they cannot be completed.
        """
        end = self._arrived + self._service.config.server.request_timeout_s
        while not all(asked.is_done for asked in self._asked.values()):
            received, self._first = self._first, []
            if not received:
                try:
                    async with asyncio.timeout(max(0.0, end - time.monotonic())):
                        received = await self._inbox.take()
                except TimeoutError:
                    for piece in self._cut():
                        yield piece
                    return
                except ApiError:
                    self._count("error")
                    raise
            for piece in joined([piece for each in received for piece in self._take(each)]):
                yield piece

    def close(self, error: ApiError | None = None) -> None:
        """The end, whatever the reason; what is under way still is aborted.

        Args:
            error: what the client is told instead of an answer; None: it has its answer, or is
                gone.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if error is not None and not self._ends:
            self._count("error")
            self._refused = f"{error.status} {error.code or 'error'}"
        if not self._ends or not all(asked.is_done for asked in self._asked.values()):
            self._service.metrics.disconnects.inc()
            self._count("abort")
        self._service.leave(self)
        self._log()

    def fail(self, error: ApiError) -> None:
        """End it for a reason of the server's own."""
        self._inbox.fail(error)

    async def _submit(self, wanted: Wanted) -> None:
        service = self._service
        chars, tokens = wanted.size
        count = len(wanted.prompts) or 1
        place = service.admission.enter(count, chars, tokens, service.dispatcher.free)
        try:
            service.check_fewest(*service.text.fewest_tokens(wanted.prompts, wanted.messages))
            if wanted.messages is None:
                self.prompts = await service.text.prompts(wanted.prompts)
            else:
                self.prompts = [await service.text.chat(wanted.messages)]
            room = [
                service.room(len(p.ids), wanted.max_tokens, wanted.default_max_tokens)
                for p in self.prompts
            ]
            total = sum(len(p.ids) for p in self.prompts)
            service.admission.measured(place, total, service.dispatcher.free)
            end_ids = tuple(wanted.sampling.stop_token_ids)
            if not wanted.sampling.ignore_eos:
                end_ids += service.text.end_ids
            for number, prompt in enumerate(self.prompts):
                sampling = replace(wanted.sampling, max_tokens=room[number])
                request = AddRequest(f"{self.id}-{number}", prompt.ids, sampling, end_ids)
                job = Job(request, self._inbox, place)
                stop = sampling.stop
                answers = [Answer(service.text.stream(prompt, stop)) for _ in range(sampling.n)]
                self._asked[job] = Asked(number, prompt, job, answers)
                service.metrics.request_max_tokens.observe(sampling.max_tokens)
            for job in self._asked:
                service.dispatcher.submit(job)
        finally:
            if not self._asked:
                service.admission.leave(place)

    def _take(self, received: Received) -> list[Piece]:
        asked, message = self._asked[received.job], received.message
        if isinstance(message, PromptLogprobs):
            self.prompt_logprobs[asked.number] = message.logprobs
            return []
        answer = asked.answers[message.index]
        if answer.is_done:  # by a stop text, while other answers go on
            return []
        if message.finish in ("error", "abort"):
            self._count("error")
            reason = message.error or "the engine has given it up"
            raise ApiError(500, f"The answer cannot be completed: {reason}.", code="engine_error")
        self._time(asked, answer, received)
        return [self._new(asked, answer, message)]

    def _new(self, asked: Asked, answer: Answer, message: Tokens) -> Piece:
        answer.tokens += len(message.tokens)
        answer.logprobs += message.logprobs
        asked.cached_tokens = max(asked.cached_tokens, message.cached_tokens)
        shown = message.tokens if message.stop_token is None else message.tokens[:-1]
        text = answer.stream.add(shown)
        finish: str | None = message.finish
        is_asked_for = message.stop_token in asked.job.request.sampling.stop_token_ids
        reason: str | int | None = message.stop_token if is_asked_for else None
        if message.finish is not None:
            text += answer.stream.finish()
        if answer.stream.stopped is not None:
            finish, reason = "stop", answer.stream.stopped
        logprobs: tuple[TokenLogprobs, ...] = ()
        if text or finish is not None:
            logprobs, answer.logprobs = tuple(answer.logprobs), []
        if finish is not None:
            self._end(asked, answer, finish)
        choice = asked.number * len(asked.answers) + message.index
        return Piece(choice, text, logprobs, finish, reason)

    def _cut(self) -> list[Piece]:
        """End what is not done with what it has."""
        pieces = []
        for asked in self._asked.values():
            for index, answer in enumerate(asked.answers):
                if not answer.is_done:
                    self._end(asked, answer, TIMEOUT)
                    choice = asked.number * len(asked.answers) + index
                    rest, logprobs = answer.stream.finish(), tuple(answer.logprobs)
                    pieces.append(Piece(choice, rest, logprobs, "length", TIMEOUT))
        return pieces

    def _end(self, asked: Asked, answer: Answer, reason: str) -> None:
        answer.is_done = True
        self._ends[reason] += 1
        self._service.metrics.ended(reason)
        # Stop texts are not known to the engine.
        if not asked.is_done:
            self._service.dispatcher.abort_answer(asked.job, asked.answers.index(answer))
            return
        self._service.dispatcher.abort(asked.job)
        if asked.first_at is not None and asked.job.sent_at is not None:
            last = max(a.last_at or 0.0 for a in asked.answers)
            times = RequestTimes(self._arrived, asked.job.sent_at, asked.first_at, last)
            self._service.metrics.timed(times, len(asked.prompt.ids), asked.answered)

    def _time(self, asked: Asked, answer: Answer, received: Received) -> None:
        metrics, message = self._service.metrics, received.message
        assert isinstance(message, Tokens)
        if asked.first_at is None:
            asked.first_at = received.at
            metrics.first_token_s.observe(received.at - self._arrived)
            metrics.prompt_tokens.inc(len(asked.prompt.ids))
        elif answer.last_at is not None and message.tokens:
            metrics.token_s.observe((received.at - answer.last_at) / len(message.tokens))
        answer.last_at = received.at
        metrics.generation_tokens.inc(len(message.tokens))

    def _count(self, reason: str) -> None:
        """Answers that have not ended yet end like this."""
        if not self._asked:
            self._ends[reason] += 1  # for the log only
        for asked in self._asked.values():
            for answer in asked.answers:
                if not answer.is_done:
                    answer.is_done = True
                    self._ends[reason] += 1
                    self._service.metrics.ended(reason)
            self._service.dispatcher.abort(asked.job)

    def _log(self) -> None:
        asked = self._asked.values()
        firsts = [a.first_at for a in asked if a.first_at is not None]
        first = f"{(min(firsts) - self._arrived) * 1e3:.0f} ms" if firsts else "-"
        logger.info(
            "%s: prompt %d, answer %d tokens, first %s, all %.0f ms, %s",
            self.id,
            sum(len(a.prompt.ids) for a in asked),
            sum(a.answered for a in asked),
            first,
            (time.monotonic() - self._arrived) * 1e3,
            self._refused
            or ", ".join(f"{n} × {why}" if n > 1 else why for why, n in self._ends.items()),
        )
