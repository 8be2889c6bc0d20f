"""Evaluation gives the same bits at every layout, whatever it is that is asked for."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megabit.data.corpus import CorpusInfo
from megabit.errors import UserError
from megabit.evaluation.continuations import Likelihood, Request, score_continuations
from megabit.evaluation.greedy import continue_greedily
from megabit.evaluation.text_loss import Evaluation, evaluate_text
from megabit.evaluation.text_sets import held_out_set
from megabit.launch import run_ranks
from tests.evaluation.saved_models import LENGTH, load, save_model, settings_of
from tests.training.tiny import tiny_corpus


@dataclass(frozen=True)
class Answers:
    """All that is compared, by ``==``."""

    text: Evaluation
    part: Evaluation
    """On some windows only."""
    likelihoods: list[Likelihood]
    generated: list[list[int]] | str
    """Or why not."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, corpus: CorpusInfo) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "saved", corpus)


def requests() -> list[Request]:
    """Of many lengths, some of them too long for the model; several microbatches on each rank."""
    choose = random.Random(7)

    def ids(count: int) -> list[int]:
        return [choose.randrange(300) for _ in range(count)]

    return [Request(ids(choose.randint(1, LENGTH)), ids(choose.randint(1, 9))) for _ in range(31)]


def is_done(tokens: list[int]) -> bool:
    """So that rows of a microbatch end at different times."""
    return tokens[-1] % 3 == 0


def answers_in_ranks(
    model: Path, corpus: CorpusInfo, settings: Sequence[str], ranks: int
) -> list[Answers]:
    config = settings_of(model, *settings, ranks=ranks)

    def run() -> Answers:
        runner, shapes = load(model, config)
        held_out = held_out_set(corpus, LENGTH)
        asked = requests()
        prompts = [r.context[:15] for r in asked[:10]]
        generated: list[list[int]] | str
        try:
            generated = continue_greedily(runner, prompts, 8, is_done, shapes, num_ids=290)
        except UserError as error:
            generated = str(error)
        return Answers(
            evaluate_text(runner, held_out, shapes.batch_size),
            evaluate_text(runner, held_out, shapes.batch_size, limit=4),
            score_continuations(runner, asked, shapes),
            generated,
        )

    return run_ranks(run, ranks)


@pytest.fixture(scope="module")
def expected(model: Path, corpus: CorpusInfo) -> Answers:
    """Of one process."""
    (answers,) = answers_in_ranks(model, corpus, (), 1)
    return answers


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        (("parallel.tp=2",), 2),
        (("parallel.pp=2",), 2),
        ((), 2),
        ((), 3),
        (("parallel.tp=2", "parallel.pp=2"), 4),
    ],
    ids=["tp2", "pp2", "dp2", "dp3", "tp2-pp2"],
)
def test_every_layout_and_rank_has_the_same_bits(
    model: Path, corpus: CorpusInfo, expected: Answers, settings: tuple[str, ...], ranks: int
) -> None:
    assert answers_in_ranks(model, corpus, settings, ranks) == [expected] * ranks


@pytest.mark.parametrize(
    ("settings", "ranks", "why"),
    [
        (
            ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.row_reduce=exact16"),
            2,
            "parallel.sequence_parallel: answers are generated without; set it to false",
        ),
        pytest.param(
            ("parallel.tp=4", "parallel.sequence_parallel=true"),
            4,
            "parallel.sequence_parallel: answers are generated without; set it to false",
            marks=pytest.mark.slow,
        ),
        (
            ("parallel.pp=2", "parallel.schedule=zb-v", "parallel.layers_per_stage=[0,1,0,1]"),
            2,
            "parallel.schedule: answers are generated with one stage on each rank; leave it out, "
            "and parallel.layers_per_stage",
        ),
    ],
    ids=["tp2-sp", "tp4-sp", "zb-v"],
)
def test_layouts_of_training_have_them_too_but_generate_nothing(
    model: Path,
    corpus: CorpusInfo,
    expected: Answers,
    settings: tuple[str, ...],
    ranks: int,
    why: str,
) -> None:
    found = answers_in_ranks(model, corpus, settings, ranks)
    assert found == [replace(expected, generated=why)] * ranks


def test_bf16_has_the_same_bits_too(model: Path, corpus: CorpusInfo, expected: Answers) -> None:
    (alone,) = answers_in_ranks(model, corpus, ("precision.compute=bfloat16",), 1)
    assert alone.text != expected.text
    layout = ("precision.compute=bfloat16", "parallel.tp=2")
    assert answers_in_ranks(model, corpus, layout, 4) == [alone] * 4


def test_what_is_compared_is_not_trivial(expected: Answers) -> None:
    assert len(set(expected.likelihoods)) == 31
    assert {likelihood.is_greedy for likelihood in expected.likelihoods} == {False}
    assert len({len(tokens) for tokens in expected.generated}) > 1
    assert expected.text.num_tokens > expected.part.num_tokens == 4 * LENGTH
