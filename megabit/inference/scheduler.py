"""Which tokens are computed next: continuous batching over a paged cache.

Before each forward pass a batch is put together anew. Sequences that run come first, in the order
of their arrival: those that wait for one more token, then what is left of prompts, cut to what
fits into ``max_tokens`` (chunked prefill). Then sequences that wait are let in, while there are
blocks for them. When a running one finds no free block, the one that was let in last gives up its
blocks and waits again, to compute its tokens a second time.

Several batches may be under way, one on each pipeline stage. A sequence whose next token is under
way is in none of the others; chunks of a prompt may follow each other at once. All stages compute
batches in the same order, so blocks can be given away while a batch that uses them is under way.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from math import isnan

import numpy as np
import numpy.typing as npt

from megabit.inference.batch import Batch, Kind, Wanted
from megabit.inference.block_pool import BlockPool
from megabit.inference.messages import (
    AddRequest,
    Finish,
    Message,
    PromptLogprobs,
    TokenLogprobs,
    Tokens,
)
from megabit.inference.sequence import Sequence

NOT_A_NUMBER = "the model's output is not a number"


@dataclass(frozen=True)
class Limits:
    """Of a batch, and of an engine."""

    max_sequences: int
    max_tokens: int
    max_model_len: int
    stages: int
    """Batches that are under way at once."""


@dataclass
class Counters:
    """Since the engine's start."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True)
class Scheduled:
    """A batch under way."""

    batch: Batch
    owners: tuple[Sequence, ...]
    """Of each wanted row."""
    sequences: tuple[Sequence, ...]


class Scheduler:
    """Requests, from their arrival to their end."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.limits, self.pool = limits, pool
        self.counters = Counters()
        self.may_round = True
        """Whether sums over TP may be rounded, where that is set up."""
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._number = 0
        self._batch_tokens: list[int] = []
        self._was_exact = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(sequence.num_prompt for sequence in self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def take_batch_tokens(self) -> tuple[int, ...]:
        """Tokens of each batch since the last call."""
        taken, self._batch_tokens = tuple(self._batch_tokens), []
        return taken

    def add(self, request: AddRequest, seed: int) -> None:
        """Queue a request.

        Args:
            seed: of its noise, where it names none.
        """
        own = request.sampling.seed
        limit = min(len(request.prompt) + request.sampling.max_tokens, self.limits.max_model_len)
        leader: Sequence | None = None
        for index in range(request.sampling.n):
            sequence = Sequence(request, index, limit, seed if own is None else own, leader)
            sequence.tokens = list(request.prompt)
            if self.pool.has_prefix_cache:
                leader = leader or sequence
            self._waiting.append(sequence)
        self.counters.prompt_tokens += len(request.prompt)

    def abort(self, request_id: str, index: int | None = None) -> list[Message]:
        """Forget a request, or one answer to it, whatever it is doing."""
        known = (*self._running, *self._waiting)
        found = [s for s in known if s.id == request_id and index in (None, s.index)]
        for sequence in found:
            self._end(sequence)
        return [Tokens(s.id, s.index, (), finish="abort") for s in found]

    def stop_rounding(self) -> None:
        """From now on sums over TP are exact; what was computed with others is computed again."""
        self.may_round = False
        self.pool.forget_prefixes()
        for sequence in reversed(self._running):
            self._preempt(sequence)

    def schedule(self) -> Scheduled | None:
        """The next batch, if there is something that can be computed now."""
        # In turns, where there are both, so that neither kind waits for the other.
        first = not self._was_exact
        for is_exact in (first, not first):
            chosen = self._choose(is_exact)
            if chosen:
                self._was_exact = is_exact
                return self._batch(chosen)
        return None

    def _choose(self, is_exact: bool) -> list[tuple[Sequence, int]]:
        """Sequences of a batch that may be rounded, or may not, and how many tokens of each."""
        chosen: list[tuple[Sequence, int]] = []
        left = self.limits.max_tokens
        for sequence, tokens in self._of_running(is_exact):
            if not left:
                break
            tokens = min(tokens, left)
            if self._make_room(sequence, sequence.computed + tokens, chosen):
                chosen.append((sequence, tokens))
                left -= tokens
        if left:
            self._let_in(chosen, left, is_exact)
        return chosen

    def update(self, scheduled: Scheduled, result: npt.NDArray[np.float64]) -> list[Message]:
        """What a batch brought, as messages.

        Args:
            result: ``[rows, 2 + 2 · k]``, as ``Batch.result_shape`` says.
        """
        for sequence in scheduled.sequences:
            sequence.in_flight -= 1
        messages: list[Message] = []
        rows = zip(scheduled.batch.wanted, scheduled.owners, result, strict=False)
        for wanted, sequence, row in rows:
            if sequence.is_finished:
                continue
            token, logprob, *top = row.tolist()
            if isnan(token) or isnan(logprob):
                messages.append(self._failed(sequence))
                continue
            logprobs = None
            if wanted.logprobs is not None:
                pairs = list(zip(top[::2], top[1::2], strict=True))[: wanted.logprobs]
                best = tuple((int(i), p) for i, p in pairs if i >= 0)
                logprobs = TokenLogprobs(int(token), logprob, best)
            if wanted.target is not None:
                assert logprobs is not None
                messages += self._told_prompt(sequence, logprobs)
            else:
                if sequence.num_prompt == 1 and sequence.num_answered == 0:
                    messages += self._nothing_to_tell(sequence)
                messages.append(self._answered(sequence, int(token), logprobs))
        return messages

    def _of_running(self, is_exact: bool) -> Iterator[tuple[Sequence, int]]:
        """Running sequences with something to compute, single tokens first, and how much."""
        own = [s for s in self._running if s.request.is_exact == is_exact]
        ready = [s for s in own if s.num_new > 0]
        # Others are for the batches of the other stages, so that all of them have some.
        share = -(-len(own) // self.limits.stages)
        singles = [s for s in ready if s.num_new == 1 and s.num_answered > 0]
        for sequence in singles[:share]:
            yield sequence, 1
        for sequence in ready:
            if sequence.num_answered == 0 or sequence.num_new > 1:
                yield sequence, sequence.num_new

    def _make_room(
        self, sequence: Sequence, tokens: int, chosen: Listing[tuple[Sequence, int]]
    ) -> bool:
        """Blocks for so many tokens of a running sequence, if need be those of others."""
        if sequence not in self._running:  # has just given up its own
            return False
        missing = self.pool.blocks_for(tokens) - len(sequence.blocks)
        taken = {s for s, _ in chosen}
        while missing > self.pool.num_free:
            victim = self._running[-1]
            if victim is sequence or victim in taken:
                return False
            self._preempt(victim)
        sequence.blocks += self.pool.allocate(max(0, missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        sequence.give_up_blocks(self.pool)
        self._waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _let_in(self, chosen: list[tuple[Sequence, int]], left: int, is_exact: bool) -> None:
        """Start sequences that wait, in their order, while there is room: for their own tokens, and
        for a block more of each that runs, which would have to give way else."""
        held_back: list[Sequence] = []
        while self._waiting and left and len(self._running) < self.limits.max_sequences:
            sequence = self._waiting[0]
            if sequence.request.is_exact != is_exact or sequence.in_flight:
                # Of the other kind, or its next token is under way.
                held_back.append(self._waiting.popleft())
                continue
            leader = sequence.leader
            if leader and not leader.is_finished and leader.computed < leader.num_prompt:
                held_back.append(self._waiting.popleft())
                continue
            shared = self._shared_blocks(sequence)
            computed = len(shared) * self.pool.block_size
            tokens = min(len(sequence.tokens) - computed, left)
            missing = self.pool.blocks_for(computed + tokens) - len(shared)
            free = self.pool.num_free - self.pool.num_free_among(shared)
            if missing > free - len(self._running):
                break
            self._waiting.popleft()
            self.pool.share(shared)
            sequence.blocks = [*shared, *self.pool.allocate(missing)]
            sequence.computed = computed
            if sequence.num_answered == 0:
                sequence.cached_tokens = computed
            if self.pool.has_prefix_cache:
                self.counters.prefix_queries += len(sequence.tokens)
                self.counters.prefix_hits += computed
            self._running.append(sequence)
            chosen.append((sequence, tokens))
            left -= tokens
        self._waiting.extendleft(reversed(held_back))

    def _shared_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks that hold what the sequence begins with."""
        is_apart = sequence.wants_prompt_logprobs or sequence.request.is_exact
        if not self.pool.has_prefix_cache or is_apart:
            return []
        digests = sequence.full_digests(self.pool.block_size)
        blocks = self.pool.find(digests)
        sequence.digests = digests[: len(blocks)]
        return blocks

    def _batch(self, chosen: Listing[tuple[Sequence, int]]) -> Scheduled:
        size = self.pool.block_size
        tokens: list[int] = []
        positions: list[int] = []
        starts, contexts = [0], []
        wanted: list[Wanted] = []
        owners: list[Sequence] = []
        for sequence, count in chosen:
            begin, end = sequence.computed, sequence.computed + count
            first_row = len(tokens)
            tokens += sequence.tokens[begin:end]
            positions += range(begin, end)
            starts.append(len(tokens))
            contexts.append(end)
            for want in self._wanted(sequence, begin, end, first_row):
                wanted.append(want)
                owners.append(sequence)
            sequence.computed = end
            sequence.in_flight += 1
            if not sequence.request.is_exact:
                sequence.remember_full_blocks(self.pool)
        tables = np.zeros((len(chosen), max(len(s.blocks) for s, _ in chosen)), np.int64)
        for table, (sequence, _) in zip(tables, chosen, strict=True):
            table[: len(sequence.blocks)] = sequence.blocks
        at = np.array(positions, np.int64)
        owner_of_token = np.repeat(np.arange(len(chosen)), np.diff(starts))
        slots = tables[owner_of_token, at // size] * size + at % size
        self._number += 1
        self.counters.steps += 1
        self._batch_tokens.append(len(tokens))
        batch = Batch(
            Kind.FORWARD,
            self._number,
            np.array(tokens, np.int64),
            at,
            slots,
            np.array(starts, np.int64),
            np.array(contexts, np.int64),
            tables,
            tuple(wanted),
            is_lossy=self.may_round and not chosen[0][0].request.is_exact,
        )
        return Scheduled(batch, tuple(owners), tuple(sequence for sequence, _ in chosen))

    def _wanted(self, sequence: Sequence, begin: int, end: int, row: int) -> Iterator[Wanted]:
        """What is wanted of tokens ``begin`` to ``end`` − 1, the first of which is in ``row``."""
        sampling = sequence.sampling
        if sequence.wants_prompt_logprobs:
            places = range(max(begin, sequence.prompt_asked), min(end, sequence.num_prompt - 1))
            for place in places:
                target = sequence.tokens[place + 1]
                yield Wanted(row + place - begin, target, sampling.prompt_logprobs, None)
            sequence.prompt_asked += len(places)
        if end == len(sequence.tokens):
            yield Wanted(row + end - 1 - begin, None, sampling.logprobs, sequence.row_sampling())

    def _told_prompt(self, sequence: Sequence, logprobs: TokenLogprobs) -> Iterator[Message]:
        """The log probability of one more of its tokens; the message, once all are there."""
        told = self._prompt_logprobs.setdefault(sequence.id, [])
        told.append(logprobs)
        if len(told) == sequence.num_prompt - 1:
            yield PromptLogprobs(sequence.id, tuple(self._prompt_logprobs.pop(sequence.id)))

    def _nothing_to_tell(self, sequence: Sequence) -> Iterator[Message]:
        """Of a prompt of one token."""
        if sequence.sampling.prompt_logprobs is not None and sequence.index == 0:
            yield PromptLogprobs(sequence.id, ())

    def _answered(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> Message:
        if sequence.sampling.max_tokens == 0:  # only the prompt was to be looked at
            self._end(sequence)
            return Tokens(
                sequence.id,
                sequence.index,
                (),
                finish="length",
                cached_tokens=sequence.cached_tokens,
            )
        sequence.tokens.append(token)
        self.counters.generation_tokens += 1
        finish: Finish | None = None
        stop_token = token if token in sequence.request.end_ids else None
        if stop_token is not None:
            finish = "stop"
        elif len(sequence.tokens) >= sequence.max_length:
            finish = "length"
        if finish is not None:
            self._end(sequence)
        return Tokens(
            sequence.id,
            sequence.index,
            (token,),
            () if logprobs is None else (logprobs,),
            finish,
            stop_token,
            cached_tokens=sequence.cached_tokens,
        )

    def _failed(self, sequence: Sequence) -> Message:
        self._end(sequence)
        return Tokens(sequence.id, sequence.index, (), finish="error", error=NOT_A_NUMBER)

    def _end(self, sequence: Sequence) -> None:
        sequence.is_finished = True
        self._prompt_logprobs.pop(sequence.id, None)
        sequence.give_up_blocks(self.pool)
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
