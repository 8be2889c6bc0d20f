"""What is computed when: against a stand-in for the model that says what it was given.

The "model" of these tests answers each wanted row with a number that depends on all tokens of the
sequence up to there, read through the slots that batches name: if a block were given to two
sequences, or a token computed at a wrong place, the answer would show it.
"""

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabit.inference.batch import Batch
from megabit.inference.block_pool import BlockPool
from megabit.inference.messages import AddRequest, Message, PromptLogprobs, SamplingParams, Tokens
from megabit.inference.noise import noise_seed
from megabit.inference.runner import _row
from megabit.inference.scheduler import Limits, Scheduled, Scheduler

SIZE = 4


def answer_to(tokens: list[int]) -> int:
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 7 + 3) % 101


def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer_to(tokens))
    return tokens[len(prompt) :]


class Machine:
    """Computes batches in order, with a cache of tokens in place of keys and values."""

    def __init__(self, blocks: int) -> None:
        self.cache = np.full(blocks * SIZE, -1, np.int64)

    def compute(self, batch: Batch) -> npt.NDArray[np.float64]:
        self.cache[batch.slots] = batch.tokens
        assert len(set(batch.slots.tolist())) == batch.num_tokens
        result = np.zeros(batch.result_shape)
        for i, wanted in enumerate(batch.wanted):
            sequence = int(np.searchsorted(batch.query_starts, wanted.row, "right")) - 1
            length = int(batch.positions[wanted.row]) + 1
            places = np.arange(length)
            slots = batch.block_tables[sequence][places // SIZE] * SIZE + places % SIZE
            seen = self.cache[slots].tolist()
            result[i, 0] = answer_to(seen) if wanted.target is None else wanted.target
            result[i, 1] = -float(sum(seen))
        return result


class Engine:
    """A scheduler and so many stages, of which the last one is done some steps later."""

    def __init__(self, blocks: int = 64, stages: int = 1, **limits: Any) -> None:
        fields = {"max_sequences": 8, "max_tokens": 16, "max_model_len": 64, **limits}
        self.scheduler = Scheduler(
            Limits(**fields, stages=stages), BlockPool(blocks, SIZE, limits.get("prefix", True))
        )
        self.machine = Machine(blocks)
        self.stages = stages
        self.under_way: deque[tuple[Scheduled, npt.NDArray[np.float64]]] = deque()
        self.messages: list[Message] = []

    def step(self) -> Scheduled | None:
        scheduled = self.scheduler.schedule() if len(self.under_way) < self.stages else None
        if scheduled is not None:
            self.under_way.append((scheduled, self.machine.compute(scheduled.batch)))
        if self.under_way and (scheduled is None or len(self.under_way) == self.stages):
            self.messages += self.scheduler.update(*self.under_way.popleft())
        return scheduled

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.under_way:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def tokens(self, request: str, index: int = 0) -> list[int]:
        return [
            token
            for message in self.messages
            if isinstance(message, Tokens) and (message.id, message.index) == (request, index)
            for token in message.tokens
        ]

    def finish(self, request: str) -> list[str | None]:
        found = [m for m in self.messages if isinstance(m, Tokens) and m.id == request]
        return [m.finish for m in found if m.finish]


def request(name: str, prompt: tuple[int, ...], **sampling: Any) -> AddRequest:
    return AddRequest(name, prompt, SamplingParams(**{"temperature": 0.0, **sampling}))


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=30),
            st.integers(1, 20),
            st.integers(0, 12),
        ),
        min_size=1,
        max_size=9,
    ),
    blocks=st.integers(16, 40),
    stages=st.integers(1, 3),
    max_tokens=st.integers(8, 40),
    aborted=st.sets(st.integers(0, 8)),
    has_prefix_cache=st.booleans(),
)
def test_any_mixture_is_answered_as_if_alone_and_leaves_no_block(
    prompts: list[tuple[list[int], int, int]],
    blocks: int,
    stages: int,
    max_tokens: int,
    aborted: set[int],
    has_prefix_cache: bool,
) -> None:
    engine = Engine(blocks, stages, max_tokens=max_tokens)
    engine.scheduler.pool = BlockPool(blocks, SIZE, has_prefix_cache)
    for number, (prompt, count, steps_before) in enumerate(prompts):
        engine.scheduler.add(request(str(number), tuple(prompt), max_tokens=count), seed=1)
        for _ in range(steps_before):
            engine.step()
        if number in aborted:
            engine.messages += engine.scheduler.abort(str(number))
    engine.run()
    for number, (prompt, count, _) in enumerate(prompts):
        whole = expected(tuple(prompt), count)
        got = engine.tokens(str(number))
        if number in aborted:
            assert got == whole[: len(got)]
            # It may have ended before.
            assert engine.finish(str(number)) in (["abort"], ["length"])
            assert (engine.finish(str(number)) == ["length"]) == (len(got) == count)
        else:
            assert got == whole
            assert engine.finish(str(number)) == ["length"]
    assert engine.scheduler.pool.num_used == 0
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0


def test_a_long_prompt_is_cut_and_others_go_on_meanwhile() -> None:
    engine = Engine(max_tokens=8)
    engine.scheduler.add(request("short", (1, 2), max_tokens=20), 1)
    engine.step()
    engine.scheduler.add(request("long", tuple(range(30)), max_tokens=1), 1)
    for _ in range(4):
        scheduled = engine.step()
        assert scheduled is not None
        assert {s.id for s in scheduled.sequences} == {"short", "long"}
        assert scheduled.batch.num_tokens == 8
    engine.run()
    assert engine.tokens("long") == expected(tuple(range(30)), 1)


def test_chunks_of_one_prompt_fill_the_pipeline_and_decoding_is_shared_out() -> None:
    engine = Engine(stages=2, max_tokens=8)
    engine.scheduler.add(request("long", tuple(range(24)), max_tokens=1), 1)
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert first is not None
    assert second is not None
    assert [first.batch.num_tokens, second.batch.num_tokens] == [8, 8]
    engine = Engine(stages=2)
    for name in "abcd":
        engine.scheduler.add(request(name, (1, 2, 3), max_tokens=8), 1)
    engine.step()
    engine.messages += engine.scheduler.update(*engine.under_way.popleft())
    halves = [engine.scheduler.schedule(), engine.scheduler.schedule()]
    assert [[s.id for s in half.sequences] for half in halves if half] == [["a", "b"], ["c", "d"]]


def test_a_prompt_that_was_computed_is_not_computed_again() -> None:
    engine = Engine(max_tokens=64)
    prompt = tuple(range(18))
    engine.scheduler.add(request("first", prompt, max_tokens=3), 1)
    engine.run()
    engine.scheduler.add(request("again", prompt, max_tokens=3), 1)
    engine.scheduler.add(request("longer", (*prompt, 5, 6), max_tokens=3), 1)
    scheduled = engine.step()
    assert scheduled is not None
    # Four full blocks of four; what is left of 18 and of 20 is computed.
    assert scheduled.batch.num_tokens == 2 + 4
    engine.run()
    assert engine.tokens("again") == engine.tokens("first")
    assert engine.tokens("longer") == expected((*prompt, 5, 6), 3)
    assert engine.scheduler.counters.prefix_hits == 32
    assert {m.cached_tokens for m in engine.messages if isinstance(m, Tokens)} == {0, 16}


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    engine = Engine()
    for name in ("first", "again"):
        engine.scheduler.add(request(name, tuple(range(16)), max_tokens=1), 1)
        engine.run()
    assert engine.tokens("again") == engine.tokens("first")
    assert engine.scheduler.counters.prefix_hits == 12


def test_several_answers_share_their_prompt() -> None:
    engine = Engine(max_tokens=64)
    engine.scheduler.add(request("n", tuple(range(13)), max_tokens=2, n=3), 1)
    scheduled = engine.step()
    assert scheduled is not None
    assert scheduled.batch.num_tokens == 13
    engine.run()
    assert all(engine.tokens("n", i) == expected(tuple(range(13)), 2) for i in range(3))
    assert engine.scheduler.counters.prompt_tokens == 13


def test_without_room_the_newest_gives_way_and_is_computed_again() -> None:
    engine = Engine(blocks=16, max_tokens=64)
    for name in "ab":
        engine.scheduler.add(request(name, tuple(range(20)), max_tokens=30), 1)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    assert engine.tokens("a") == engine.tokens("b") == expected(tuple(range(20)), 30)


@pytest.mark.parametrize("chunk", [8, 64])
def test_prompt_logprobs_are_told_once_and_whole(chunk: int) -> None:
    engine = Engine(blocks=16, max_tokens=chunk)
    prompt = tuple(range(21))
    engine.scheduler.add(request("other", prompt, max_tokens=40), 1)
    engine.scheduler.add(request("asked", prompt, max_tokens=20, prompt_logprobs=0, logprobs=0), 1)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    (told,) = [m for m in engine.messages if isinstance(m, PromptLogprobs)]
    assert [t.token for t in told.logprobs] == [*prompt[1:]]
    assert [t.logprob for t in told.logprobs] == [-sum(prompt[: i + 1]) for i in range(20)]
    assert engine.tokens("asked") == expected(prompt, 20)


def test_a_prompt_alone_can_be_asked_about() -> None:
    engine = Engine()
    engine.scheduler.add(request("a", (1, 2, 3), max_tokens=0, prompt_logprobs=0), 1)
    engine.scheduler.add(request("b", (1,), max_tokens=1, prompt_logprobs=0), 1)
    engine.run()
    assert engine.tokens("a") == []
    assert engine.finish("a") == ["length"]
    told = {m.id: len(m.logprobs) for m in engine.messages if isinstance(m, PromptLogprobs)}
    assert told == {"a": 2, "b": 0}


def test_it_stops_at_an_end_token_and_at_the_models_length() -> None:
    engine = Engine(max_model_len=12)
    prompt = (1, 2, 3)
    whole = expected(prompt, 9)
    end = whole[4]
    engine.scheduler.add(AddRequest("e", prompt, SamplingParams(max_tokens=30), (end,)), 1)
    engine.scheduler.add(request("m", prompt, max_tokens=30), 1)
    engine.run()
    assert engine.tokens("e") == whole[: whole.index(end) + 1]
    assert engine.finish("e") == ["stop"]
    assert engine.tokens("m") == whole
    assert engine.finish("m") == ["length"]


def test_what_is_no_number_ends_the_sequence_with_an_error_and_no_other() -> None:
    engine = Engine()
    engine.scheduler.add(request("bad", (1, 2), max_tokens=5), 1)
    engine.scheduler.add(request("good", (1, 3), max_tokens=5), 1)
    scheduled = engine.scheduler.schedule()
    assert scheduled is not None
    result = engine.machine.compute(scheduled.batch)
    result[0, 0] = np.nan
    engine.messages += engine.scheduler.update(scheduled, result)
    engine.run()
    assert engine.finish("bad") == ["error"]
    assert engine.tokens("good") == expected((1, 3), 5)
    assert engine.scheduler.pool.num_used == 0


def test_what_is_aborted_is_not_computed_any_more() -> None:
    engine = Engine()
    engine.scheduler.add(request("a", (1, 2), max_tokens=50, n=2), 1)
    engine.scheduler.add(request("b", (1, 2), max_tokens=50), 1)
    assert engine.scheduler.waiting_tokens == 6
    for _ in range(3):
        engine.step()
    assert engine.scheduler.waiting_tokens == 0
    ended = engine.scheduler.abort("a", 1)
    assert [(m.id, m.index, m.finish) for m in ended if isinstance(m, Tokens)] == [
        ("a", 1, "abort")
    ]
    scheduled = engine.step()
    assert scheduled is not None
    assert [(s.id, s.index) for s in scheduled.sequences] == [("a", 0), ("b", 0)]
    assert len(engine.scheduler.abort("a")) == 1
    assert engine.scheduler.abort("a") == []
    assert engine.scheduler.num_running == 1


def test_a_sequence_whose_token_is_under_way_is_not_let_in_again() -> None:
    engine = Engine(blocks=16, stages=2, max_tokens=64)
    for name in "ab":
        engine.scheduler.add(request(name, tuple(range(20)), max_tokens=8), 1)
    first = engine.scheduler.schedule()
    assert first is not None
    assert {s.id for s in first.sequences} == {"a", "b"}
    engine.under_way.append((first, engine.machine.compute(first.batch)))
    engine.scheduler.stop_rounding()  # all give up their blocks
    assert engine.scheduler.schedule() is None
    engine.run()
    assert engine.tokens("a") == engine.tokens("b") == expected(tuple(range(20)), 8)


def test_settings_of_a_draw_reach_the_row_that_is_drawn() -> None:
    engine = Engine()
    own = {"top_k": 5, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.5}
    engine.scheduler.add(
        request("a", (1, 2), temperature=0.3, presence_penalty=0.5, frequency_penalty=0.2, **own), 7
    )
    scheduled = engine.scheduler.schedule()
    assert scheduled is not None
    (wanted,) = scheduled.batch.wanted
    assert wanted.sampling is not None
    drawn = _row(wanted)
    s = drawn.sampling
    assert (s.temperature, s.presence_penalty, s.frequency_penalty) == (0.3, 0.5, 0.2)
    assert {key: getattr(s, key) for key in own} == own
    assert (list(drawn.prompt_tokens), list(drawn.answer_tokens)) == ([1, 2], [])
    assert drawn.noise == noise_seed(7, 0, 2)


def test_rounding_that_stops_leaves_nothing_rounded() -> None:
    engine = Engine()
    prompt = tuple(range(20))
    engine.scheduler.add(request("before", prompt, max_tokens=20), 1)
    for _ in range(5):
        engine.step()
    engine.scheduler.stop_rounding()
    engine.scheduler.add(request("after", prompt, max_tokens=4), 1)
    scheduled = engine.step()
    assert scheduled is not None
    assert not scheduled.batch.is_lossy
    # All of it again, and nothing shared with what was there before.
    assert scheduled.batch.positions[0] == 0
    engine.run()
    assert engine.tokens("before") == expected(prompt, 20)


def test_who_is_let_in_leaves_a_block_to_each_that_runs() -> None:
    engine = Engine(blocks=16, max_tokens=64)
    for name in "abc":
        engine.scheduler.add(request(name, tuple(range(24)), max_tokens=8), 1)
    engine.step()
    # Six blocks each: a third one would fit, and one of the others give way a token later.
    assert engine.scheduler.num_running == 2
    engine.run()
    assert engine.scheduler.counters.preemptions == 0


def test_neither_kind_waits_for_the_other() -> None:
    engine = Engine(max_sequences=8)
    engine.scheduler.add(request("long", (1, 2, 3), max_tokens=40), 1)
    engine.step()
    exact = AddRequest("exact", (4, 5), SamplingParams(max_tokens=2), is_exact=True)
    engine.scheduler.add(exact, 1)
    engine.scheduler.add(request("late", (6, 7), max_tokens=2), 1)
    for _ in range(8):
        engine.step()
    assert engine.finish("exact") == engine.finish("late") == ["length"]
    assert engine.finish("long") == []


def test_exact_requests_are_apart_and_share_nothing() -> None:
    engine = Engine()
    prompt = tuple(range(9))
    exact = AddRequest("exact", prompt, SamplingParams(max_tokens=2), is_exact=True)
    engine.scheduler.add(request("usual", prompt, max_tokens=2), 1)
    engine.scheduler.add(exact, 1)
    kinds = []
    while engine.scheduler.has_work:
        scheduled = engine.step()
        assert scheduled is not None
        kinds.append((scheduled.batch.is_lossy, {s.id for s in scheduled.sequences}))
    assert sorted(kinds, key=str) == sorted(
        [(True, {"usual"})] * 2 + [(False, {"exact"})] * 2, key=str
    )
    assert engine.scheduler.counters.prefix_hits == 0
