"""The engine as one uses it from Python: in this process and in others."""

import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from megabit.errors import RunError, UserError
from megabit.inference import Engine, SamplingParams
from megabit.inference.messages import Message
from tests.inference.models import save_served_model

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LAYOUTS = [
    pytest.param([], id="one"),
    pytest.param(["parallel.tp=2"], id="tp2"),
    pytest.param(["parallel.pp=2"], id="pp2"),
]
TEXTS = ["the king", "naïve café", "what the queen has said"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    log = model.parent / "ranks.log"
    with Engine.open(model, [*request.param, "engine.kv_cache_mb=8"], log) as engine:
        yield engine


def test_it_answers_text_and_tokens_alike_in_their_order(engine: Engine) -> None:
    answers = engine.generate(TEXTS, GREEDY)
    as_tokens = engine.generate([engine.text.encode(text) for text in TEXTS], GREEDY)
    assert [a.answers for a in answers] == [a.answers for a in as_tokens]
    for text, answer in zip(TEXTS, answers, strict=True):
        assert answer.prompt_tokens == engine.text.encode(text)
        assert len(answer.answers[0].tokens) == 12
        assert answer.answers[0].finish == "length"
        assert engine.generate(text, GREEDY)[0].answers == answer.answers


def test_a_stream_is_the_whole_answer_in_pieces(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each message that has text; whoever reads late gets several at once, and one piece."""
    receive, waiting = engine._link.receive, deque[Message]()

    def one_at_a_time() -> list[Message]:
        if not waiting:
            waiting.extend(receive())
        return [waiting.popleft()] if waiting else []

    sampling = SamplingParams(max_tokens=40, seed=11)
    with monkeypatch.context() as patch:
        patch.setattr(engine._link, "receive", one_at_a_time)
        pieces = list(engine.stream(TEXTS[0], sampling))
    assert len(pieces) > 3
    assert all(pieces)
    assert "".join(pieces) == engine.generate(TEXTS[0], sampling)[0].text


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(engine: Engine) -> None:
    whole = engine.generate(TEXTS[0], SamplingParams(max_tokens=40, seed=11))[0].text
    word = whole[len(whole) // 2 :][:3]
    answer = engine.generate(TEXTS[0], SamplingParams(max_tokens=40, seed=11, stop=(word,)))[0]
    assert answer.text == whole[: whole.index(word)]
    assert answer.answers[0].finish == "stop"
    assert not engine.generate(TEXTS[1], GREEDY)[0].answers[0].text.endswith(word)


def test_several_answers_and_log_probabilities(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=5, n=3, seed=2, logprobs=2, prompt_logprobs=1)
    (result,) = engine.generate(TEXTS[2], sampling)
    assert len({tuple(answer.tokens) for answer in result.answers}) == 3
    for answer in result.answers:
        assert [told.token for told in answer.logprobs] == answer.tokens
        assert all(len(told.top) == 2 for told in answer.logprobs)
    assert [told.token for told in result.prompt_logprobs] == result.prompt_tokens[1:]


def test_what_is_left_early_leaves_no_block(engine: Engine) -> None:
    for _ in engine.stream(TEXTS[0], SamplingParams(max_tokens=100)):
        break
    engine.generate(TEXTS[1], GREEDY)
    before = engine.stats
    while engine.stats is before or engine.stats.blocks_used:
        engine._take_in()  # reports come once a second
    assert engine.stats.running == engine.stats.waiting == 0
    tp, pp = engine.ready.tp, engine.ready.pp
    assert len(engine.stats.rank_memory) == tp * pp
    assert len(set(engine.stats.stage_seconds)) == pp
    assert min(engine.stats.stage_seconds) > 0
    assert set(engine.stats.comm_calls) == set(engine.stats.comm_seconds)
    assert all(seconds > 0 for seconds in engine.stats.comm_seconds.values())
    assert ("tp" in engine.stats.comm_seconds) == (tp > 1)
    assert ("pp" in engine.stats.comm_seconds) == (pp > 1)


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        pytest.param([], "has no tokens", id="nothing"),
        pytest.param([5] * 128, r"has 128 tokens, and with its answer may have 128", id="long"),
        pytest.param([1, 320], "320 is no token", id="id"),
        pytest.param([-1], "-1 is no token", id="negative"),
    ],
)
def test_wrong_prompts_are_refused(engine: Engine, prompt: list[int], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        engine.generate([prompt], GREEDY)


@pytest.mark.parametrize(
    ("sampling", "wrong"),
    [
        (SamplingParams(min_p=2), r"min_p: must be 0 to 1, not 2"),
        (SamplingParams(max_tokens=-3), r"max_tokens: must be 0 or more, not -3"),
        (SamplingParams(temperature=float("nan")), r"temperature: must be 0 to 100, not nan"),
        (SamplingParams(top_p=0), r"top_p: must be more than 0 and at most 1, not 0"),
        (SamplingParams(n=0), r"n: must be 1 to 64, not 0"),
        (SamplingParams(repetition_penalty=0), r"repetition_penalty: must be 0\.01 to 100, not 0"),
        (SamplingParams(stop=("",)), r"stop: must be a tuple of texts"),
        (SamplingParams(stop="abc"), r"stop: must be a tuple of texts"),  # type: ignore[arg-type]
    ],
)
def test_wrong_sampling_is_refused(engine: Engine, sampling: SamplingParams, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        engine.generate("the king", sampling)


def test_without_a_seed_no_two_engines_draw_the_same(engine: Engine, model: Path) -> None:
    sampling = SamplingParams(max_tokens=20)
    with Engine.open(model, ["engine.kv_cache_mb=8"]) as other:
        drawn = [e.generate(TEXTS[0], sampling)[0].answers[0].tokens for e in (engine, other)]
    assert drawn[0] != drawn[1]


def test_only_tokens_of_the_tokenizer_are_drawn_and_told(engine: Engine) -> None:
    """The model has 320 rows, its tokenizer 300 tokens or fewer."""
    assert engine.text.num_ids < engine.text.vocab_size
    sampling = SamplingParams(max_tokens=60, temperature=100, seed=3, logprobs=20, ignore_eos=True)
    answer = engine.generate(TEXTS[0], sampling)[0].answers[0]
    told = [token for row in answer.logprobs for token, _ in row.top]
    assert max(answer.tokens + told) < engine.text.num_ids
    # A prompt may have any of the model's rows, all the same.
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
    (result,) = engine.generate([[319, 5, 319]], asked)
    assert [row.token for row in result.prompt_logprobs] == [5, 319]
    assert max(t for row in result.prompt_logprobs for t, _ in row.top) < engine.text.num_ids


def test_a_long_pause_and_many_long_answers_do_no_harm(model: Path) -> None:
    """Whoever has the engine need not listen all the time; nobody waits for the other to read."""
    settings = ["parallel.tp=2", "engine.kv_cache_mb=8", "engine.timeout_s=8"]
    with Engine.open(model, settings, model.parent / "ranks.log") as engine:
        prompts = [[i % 300] * 120 for i in range(200)]
        asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=20)
        for prompt in prompts:  # more than a socket holds, both ways
            engine._start(prompt, asked)
        time.sleep(10)
        assert len(engine.generate(prompts[:3], asked)) == 3


def test_wrong_settings_are_told_in_a_line(model: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.max_model_len: 500 is more than the 128"):
        Engine.open(model, ["engine.max_model_len=500"])
    with pytest.raises(UserError, match=r"^parallel\.tp: "):
        Engine.open(model, ["parallel.tp=3"])
    with pytest.raises(UserError, match=r"engine\.kv_cache_mb: 0\.01 MiB are 0 blocks"):
        Engine.open(model, ["engine.kv_cache_mb=0.01"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named(model: Path, rank: int) -> None:
    log = model.parent / "ranks.log"
    engine = Engine.open(model, ["parallel.tp=2", "engine.kv_cache_mb=8"], log)
    pids = engine._link._ranks.pids  # type: ignore[attr-defined]
    pieces = engine.stream(TEXTS[0], SamplingParams(max_tokens=100))
    next(pieces)
    os.kill(pids[rank], signal.SIGKILL)
    with pytest.raises(RunError, match=f"rank {rank} was ended by SIGKILL"):
        list(pieces)
    engine.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_stands_still_is_noticed(model: Path) -> None:
    log = model.parent / "ranks.log"
    engine = Engine.open(model, ["parallel.pp=2", "engine.timeout_s=2"], log)
    pids = engine._link._ranks.pids  # type: ignore[attr-defined]
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(RunError, match="rank 0 of 2 failed"):
        engine.generate(TEXTS, GREEDY)
    engine.close()


def test_rounded_sums_are_watched_and_switched_off(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "held_out.txt"
    text.write_text("the king has said to the queen that nobody speaks of the dog. " * 4)
    settings = [
        "parallel.tp=2",
        "parallel.row_reduce=int8",
        "engine.int8_min_kib=0",
        "engine.int8_max_crest=20",
        f"engine.accuracy_guard={text}",
        "engine.kv_cache_mb=8",
    ]
    log = model.parent / "ranks.log"
    for limit, is_lossy in ((0.5, True), (1e-9, False)):
        with Engine.open(model, [*settings, f"engine.accuracy_limit={limit}"], log) as engine:
            while engine.stats.accuracy_loss is None:
                engine._take_in()
            stats = engine.stats
            assert stats.accuracy_exact_loss is not None
            assert stats.accuracy_loss != stats.accuracy_exact_loss
            assert stats.accuracy_loss == pytest.approx(stats.accuracy_exact_loss, rel=0.05)
            assert stats.comm_bytes["tp/int8"] > 0
            if not is_lossy and stats.accuracy_loss <= stats.accuracy_exact_loss:
                continue  # rounding may do good as well, by chance
            engine.generate(TEXTS, GREEDY)
            before = engine.stats
            while engine.stats is before:
                engine._take_in()
            assert engine.stats.is_lossy is is_lossy
            rounded = engine.stats.comm_bytes["tp/int8"] > stats.comm_bytes["tp/int8"]
            assert rounded is is_lossy
