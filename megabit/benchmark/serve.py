"""Load on a server: how fast its answers come, under how many requests.

Two kinds of load. *Closed loop*: so many clients, each of which asks again when it has its answer;
it shows the most that a server can do, and waits when the server does. *Poisson*: requests at
random times, so many a second on average, however the server fares; queues show in its times to
the first token, as they would for users.
"""

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megabit.benchmark.http_stream import Address, Reply, get_json, stream
from megabit.errors import RunError, UserError

PERCENTILES = (50, 90, 99)
MEASURES = {
    "ttft_s": "time to the first token",
    "itl_s": "between pieces of an answer",
    "tpot_s": "for each token after the first",
    "e2e_s": "for a whole answer",
}
_FIRST_ID, _LAST_ID = 10, 250
"""Prompts of a given length are random ids in this range, which every byte-level vocabulary has."""
_LONGEST_PAUSE_S = 2.0
"""Of a client that was told to come back later."""


@dataclass(frozen=True)
class Load:
    """What is asked, and how often."""

    clients: int | None = 8
    """Of a closed loop; None: Poisson."""
    rate: float | None = None
    """Requests a second of Poisson load."""
    requests: int | None = 64
    """At most; None: no limit, where ``seconds`` is one."""
    seconds: float | None = None
    """No request begins after so long."""
    prompt_tokens: int = 64
    shared_tokens: int = 0
    """Of those, with which all prompts begin."""
    answer_tokens: int = 64
    """Of every answer, whatever it says (``ignore_eos``)."""
    prompts: tuple[str, ...] = ()
    """Texts to ask in turn, instead."""
    temperature: float = 0.0
    warmup: int = 2
    """Requests before, one after another, that do not count."""
    seed: int = 0


@dataclass(frozen=True)
class Limits:
    """Of what is called good: seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None


@dataclass(frozen=True)
class Result:
    """What was measured."""

    model: str
    url: str
    load: Load
    limits: Limits
    began_at: float
    replies: Sequence[Reply]
    """In the order in which they were sent."""

    @property
    def complete(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.is_complete]

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return max((r.ended_at for r in self.replies), default=self.began_at) - self.began_at

    @property
    def failures(self) -> dict[str, int]:
        """How many failed, by status and reason."""
        reasons = (f"{r.status or 'no answer'}: {r.error}" for r in self.replies if r.error)
        return dict(Counter(reasons).most_common())

    @property
    def rates(self) -> dict[str, float]:
        """Of answers that are complete, a second."""
        done, seconds = self.complete, max(self.seconds, 1e-9)
        return {
            "requests_per_s": len(done) / seconds,
            "prompt_tokens_per_s": sum(r.prompt_tokens for r in done) / seconds,
            "generated_tokens_per_s": sum(r.completion_tokens for r in done) / seconds,
        }

    @property
    def goodput(self) -> float | None:
        """Complete answers within the limits, a second."""
        if not self.limits.is_set:
            return None
        return sum(map(self._is_good, self.complete)) / max(self.seconds, 1e-9)

    def values(self, measure: str) -> list[float]:
        """Of complete answers: one each, or for ``itl_s`` one for each piece but the first."""
        if measure == "itl_s":
            pairs = (itertools.pairwise(reply.pieces_at) for reply in self.complete)
            return [later - earlier for pair in pairs for earlier, later in pair]
        found = (_measured(reply, measure) for reply in self.complete)
        return [value for value in found if value is not None]

    def summary(self, measure: str) -> dict[str, float] | None:
        """Mean, percentiles and largest; None if there is nothing of the kind."""
        values = self.values(measure)
        if not values:
            return None
        ranks = np.percentile(values, PERCENTILES).tolist()
        named = {f"p{p}": value for p, value in zip(PERCENTILES, ranks, strict=True)}
        return {"mean": float(np.mean(values)), **named, "max": max(values)}

    def _is_good(self, reply: Reply) -> bool:
        first, each = _measured(reply, "ttft_s"), _measured(reply, "tpot_s")
        return (
            first is not None
            and (self.limits.ttft_s is None or first <= self.limits.ttft_s)
            and (self.limits.tpot_s is None or (each or 0.0) <= self.limits.tpot_s)
        )


def _measured(reply: Reply, measure: str) -> float | None:
    if not reply.pieces_at:
        return None
    if measure == "ttft_s":
        return reply.pieces_at[0] - reply.sent_at
    if measure == "e2e_s":
        return reply.ended_at - reply.sent_at
    tokens = reply.completion_tokens - 1
    return (reply.pieces_at[-1] - reply.pieces_at[0]) / tokens if tokens > 0 else None


async def run(
    url: str,
    load: Load,
    limits: Limits,
    key: str | None = None,
    told: Callable[[int], None] = lambda done: None,
) -> Result:
    """Put ``load`` on the server at ``url``.

    Args:
        key: of the API.
        told: hears how many requests have ended.

    Raises:
        UserError: there is no such server, or it does not take these requests.
        RunError: it cannot answer now.
    """
    address = Address.of(url)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    listed = await get_json(address, "/v1/models", headers)
    try:
        model = str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(f"{url}: lists no model at /v1/models") from error
    bodies = _bodies(model, load)
    for _ in range(max(1, load.warmup)):
        first = await stream(address, next(bodies), headers)
        if first.error and first.status in (400, 401, 404, 413, 415, 422):
            raise UserError(f"{url}: refuses these requests: {first.error}")
        if first.error:
            raise RunError(f"{url}: cannot answer: {first.error}")
    replies: list[Reply] = []
    began_at = time.perf_counter()

    async def ask() -> Reply:
        reply = await stream(address, next(bodies), headers)
        replies.append(reply)
        told(len(replies))
        return reply

    if load.rate is None:
        await _closed_loop(load, ask)
    else:
        await _poisson(load, load.rate, ask)
    replies.sort(key=lambda reply: reply.sent_at)
    return Result(model, url, load, limits, began_at, replies)


async def _closed_loop(load: Load, ask: Callable[[], Any]) -> None:
    left = math.inf if load.requests is None else load.requests
    end = time.perf_counter() + (load.seconds or math.inf)

    async def client() -> None:
        nonlocal left
        while left > 0 and time.perf_counter() < end:
            left -= 1
            reply = await ask()
            if reply.error:  # as a client would, and so that a full server is not asked in a spin
                await asyncio.sleep(min(_LONGEST_PAUSE_S, max(0.05, reply.retry_after)))

    async with asyncio.TaskGroup() as group:
        for _ in range(load.clients or 1):
            group.create_task(client())


async def _poisson(load: Load, rate: float, ask: Callable[[], Any]) -> None:
    random_ = random.Random(f"{load.seed} arrivals")
    at = start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in itertools.count(1):
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            group.create_task(ask())
            at += random_.expovariate(rate)
            if number == load.requests or at > start + (load.seconds or math.inf):
                return


def _bodies(model: str, load: Load) -> Iterator[Mapping[str, Any]]:
    """Requests, each with a prompt of its own; the same ones for the same seed."""
    random_ = random.Random(f"{load.seed} prompts")

    def ids(count: int) -> list[int]:
        return random_.choices(range(_FIRST_ID, _LAST_ID), k=count)

    shared = ids(min(load.shared_tokens, load.prompt_tokens))
    number = 0
    while True:
        prompt: str | list[int] = (
            load.prompts[number % len(load.prompts)]
            if load.prompts
            else shared + ids(load.prompt_tokens - len(shared))
        )
        number += 1
        yield {
            "model": model,
            "prompt": prompt,
            "max_tokens": load.answer_tokens,
            "temperature": load.temperature,
            "ignore_eos": True,
            "seed": load.seed + number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
