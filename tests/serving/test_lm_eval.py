"""lm-evaluation-harness as a client: its ``local-completions`` finds what ``megabit eval`` does."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from megabit.evaluation.lm_eval_adapter import MegabitLM
from megabit.evaluation.opening import model_tokenizer
from megabit.interop.opening import open_source
from tests.evaluation.saved_models import LENGTH, load, save_model, settings_of
from tests.evaluation.test_lm_eval import CHOICES, PROMPTS, TASKS, TEXTS, write_tasks
from tests.serving.served import Server, started
from tests.training.tiny import tiny_corpus


@pytest.fixture(scope="module", autouse=True)
def local_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No hub, and no cache of documents that outlives the tests."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return save_model(folder / "saved", tiny_corpus(folder))


@pytest.fixture(scope="module")
def server(model: Path, folder: Path) -> Iterator[Server]:
    command = ["-m", "megabit", "serve", str(model), "server.port=0", "parallel.tp=2"]
    with started(command, folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def samples(model: Path, server: Server, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the harness was told, by task."""
    PreTrainedTokenizerFast(
        tokenizer_file=str(model / "assets" / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        split_special_tokens=True,
    ).save_pretrained(folder / "tokenizer")
    tasks = write_tasks(folder / "tasks")
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{server.url}/v1/completions",
            "model": model.name,
            "tokenizer": str(folder / "tokenizer"),
            "max_length": LENGTH,
            "num_concurrent": 3,
            "batch_size": 2,
        },
        tasks=[*TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    ordered: dict[str, list[dict[str, Any]]] = {
        name: sorted(rows, key=lambda row: row["doc_id"]) for name, rows in found["samples"].items()
    }
    return ordered


@pytest.fixture(scope="module")
def lm(model: Path) -> MegabitLM:
    """The trainer's forward pass, without a server, at another layout."""
    runner, shapes = load(model, settings_of(model))
    return MegabitLM(runner, model_tokenizer(open_source(model)), shapes)


def instances(arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance("loglikelihood", {}, args, i) for i, args in enumerate(arguments)]


# A logit less the normalizer, both rounded to fp32, against their difference in another order: of
# numbers below 8, some tokens of which are added up.
ROUNDING = 1e-5


def test_likelihoods_of_choices(samples: dict[str, Any], lm: MegabitLM) -> None:
    pairs = [(row["question"], f" {choice}") for row in CHOICES for choice in row["choices"]]
    expected = lm.loglikelihood(instances(pairs))
    # The harness keeps each document's answers in the order of its choices.
    told = [pair for row in samples["tiny_choices"] for (pair,) in row["resps"]]
    assert [is_greedy for _, is_greedy in told] == [is_greedy for _, is_greedy in expected]
    assert [log for log, _ in told] == pytest.approx([log for log, _ in expected], abs=ROUNDING)
    assert len(told) == len(pairs) == 13


def test_likelihoods_of_texts(samples: dict[str, Any], lm: MegabitLM) -> None:
    texts = [(row["text"],) for row in TEXTS]
    expected = lm.loglikelihood_rolling(instances(texts))
    told = [float(row["resps"][0][0]) for row in samples["tiny_texts"]]
    # The first text is longer than the model; a client that must leave room for an answer cuts it
    # into other windows.
    assert told[1:] == pytest.approx(expected[1:], abs=ROUNDING)
    assert told[0] == pytest.approx(expected[0], rel=0.1)


def test_answers(samples: dict[str, Any], lm: MegabitLM) -> None:
    options = TASKS["tiny_answers"]["generation_kwargs"]
    pairs = [(row["prompt"], options) for row in PROMPTS]
    expected = lm.generate_until(instances(pairs))
    told = [row["resps"][0][0] for row in samples["tiny_answers"]]
    assert [told[0], told[2]] == [expected[0], expected[2]]  # the second is cut, as above
    assert all(told)
