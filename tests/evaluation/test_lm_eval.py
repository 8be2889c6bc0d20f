"""Tasks of lm-evaluation-harness: local ones, of each kind of request, at several layouts."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, processors

from megabit.data.corpus import CorpusInfo
from megabit.errors import UserError
from megabit.evaluation.continuations import Request, score_continuations
from megabit.evaluation.lm_eval_adapter import MegabitLM
from megabit.evaluation.lm_eval_tasks import TaskResult, load_tasks, run_tasks
from megabit.evaluation.opening import model_tokenizer
from megabit.inference.model_text import ModelTokenizer
from megabit.interop.opening import open_source
from megabit.launch import run_ranks
from tests.evaluation.saved_models import LENGTH, load, save_model, settings_of
from tests.training.tiny import tiny_corpus

CHOICES = [
    {"question": "the quick brown", "choices": ["fox", "dog", "sea"], "label": 0},
    {"question": "a lazy dog and", "choices": ["runs away", "home", "the sea", "fox"], "label": 1},
    {"question": "away from", "choices": ["home", "see"], "label": 0},
    {"question": "to see the", "choices": ["sea", "dog jumps over the fox"], "label": 1},
    {"question": "", "choices": ["the", "quick"], "label": 0},
]
TEXTS = [
    {"text": "the quick brown fox jumps over a lazy dog. " * 3},
    {"text": "sea"},
    {"text": "home and away"},
]
PROMPTS = [
    {"prompt": "the quick brown", "answer": "x"},
    {"prompt": "a lazy dog and runs away from home to see the sea " * 3, "answer": "y"},
    {"prompt": "z", "answer": "z"},
]
TASKS: dict[str, dict[str, Any]] = {
    "tiny_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
    "tiny_answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["a"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
DOCUMENTS = {"tiny_choices": CHOICES, "tiny_texts": TEXTS, "tiny_answers": PROMPTS}


def write_tasks(folder: Path) -> Path:
    """A YAML file and documents of each task."""
    folder.mkdir()
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS[name]))
        content = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.fixture(scope="module", autouse=True)
def local_only(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """No hub, and no cache of documents that outlives the tests."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, corpus: CorpusInfo) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "saved", corpus)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "tasks")


@pytest.fixture(scope="module")
def lm(model: Path) -> MegabitLM:
    runner, shapes = load(model, settings_of(model))
    return MegabitLM(runner, model_tokenizer(open_source(model)), shapes)


# Whole tasks.


def results_in_ranks(
    model: Path, loaded: Any, settings: Sequence[str], ranks: int
) -> list[dict[str, TaskResult]]:
    config = settings_of(model, *settings, ranks=ranks)

    def run() -> dict[str, TaskResult]:
        runner, shapes = load(model, config)
        return run_tasks(runner, model_tokenizer(open_source(model)), shapes, loaded)

    return run_ranks(run, ranks)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [((), 2), (("parallel.tp=2", "parallel.pp=2"), 4)],
    ids=["dp2", "tp2-pp2"],
)
def test_tasks_have_the_same_results_at_every_layout(
    model: Path, tasks: Path, settings: tuple[str, ...], ranks: int
) -> None:
    loaded = load_tasks([], tasks)
    (expected,) = results_in_ranks(model, loaded, (), 1)
    assert expected.keys() == TASKS.keys()
    assert {name: result.documents for name, result in expected.items()} == {
        "tiny_choices": 5,
        "tiny_texts": 3,
        "tiny_answers": 3,
    }
    assert results_in_ranks(model, load_tasks([], tasks), settings, ranks) == [expected] * ranks


def test_the_metrics_are_those_of_the_likelihoods(model: Path, tasks: Path, lm: MegabitLM) -> None:
    runner, shapes = load(model, settings_of(model))
    tokenizer = model_tokenizer(open_source(model))
    names = [str(tasks / "tiny_choices.yaml"), "tiny_texts"]
    found = run_tasks(runner, tokenizer, shapes, load_tasks(names, tasks))

    right = right_for_its_length = 0
    for row in CHOICES:
        pairs = [(row["question"], f" {choice}") for choice in row["choices"]]
        logs = [log for log, _ in lm.loglikelihood(instances(pairs))]
        lengths = [len(choice) for choice in row["choices"]]
        right += logs.index(max(logs)) == row["label"]
        of_length = [log / length for log, length in zip(logs, lengths, strict=True)]
        right_for_its_length += of_length.index(max(of_length)) == row["label"]
    metrics = found["tiny_choices"].metrics
    assert metrics == {"acc": right / 5, "acc_norm": right_for_its_length / 5}

    logs = lm.loglikelihood_rolling(instances([(row["text"],) for row in TEXTS]))
    size = sum(len(row["text"].encode()) for row in TEXTS)
    bits = found["tiny_texts"].metrics["bits_per_byte"]
    assert bits == pytest.approx(-sum(logs) / math.log(2) / size, rel=1e-12)  # fp64


def test_a_limit(model: Path, tasks: Path) -> None:
    runner, shapes = load(model, settings_of(model))
    tokenizer = model_tokenizer(open_source(model))
    found = run_tasks(runner, tokenizer, shapes, load_tasks(["tiny_texts"], tasks), limit=2)
    assert found["tiny_texts"].documents == 2


# Requests.


def instances(arguments: Sequence[tuple[Any, ...]], kind: str = "loglikelihood") -> list[Instance]:
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def test_spaces_of_a_context_go_to_the_continuation(lm: MegabitLM) -> None:
    whole = lm.tok_encode("the quick brown")
    context, continuation = lm._encode_pair("the quick ", "brown")
    assert (context, context + continuation) == (lm.tok_encode("the quick"), whole)
    pairs = [("the quick ", "brown"), ("the quick", " brown")]
    one, other = lm.loglikelihood(instances(pairs))
    assert one == other


def test_an_empty_context_is_the_end_of_a_text(lm: MegabitLM, model: Path) -> None:
    runner, shapes = load(model, settings_of(model))
    ids = lm.tok_encode("fox")
    (found,) = lm.loglikelihood(instances([("", "fox")]))
    (expected,) = score_continuations(runner, [Request([lm.eot_token_id], ids)], shapes)
    assert found == expected


def test_a_rolling_likelihood_predicts_each_token_once(lm: MegabitLM, model: Path) -> None:
    """With as much context as the model sees, also in the last window."""
    runner, shapes = load(model, settings_of(model))
    text = "the quick brown fox jumps over a lazy dog and runs. " * 2
    stream = [lm.eot_token_id, *lm.tok_encode(text)]
    count = len(stream) - 1
    assert LENGTH < count < 3 * LENGTH
    assert count % LENGTH
    parts = []
    for start in range(0, count, LENGTH):
        stop = min(start + LENGTH, count)
        first = min(start, max(0, stop - LENGTH))  # the last window begins earlier
        parts.append(Request(stream[first : start + 1], stream[start + 1 : stop + 1]))
    expected = sum(found.log for found in score_continuations(runner, parts, shapes))
    (found,) = lm.loglikelihood_rolling(instances([(text,)]))
    # The windows are in microbatches of another shape: fp32 sums in another order.
    assert found == pytest.approx(expected, rel=1e-6)


def generate(lm: MegabitLM, prompt: str, **settings: Any) -> str:
    (text,) = lm.generate_until(instances([(prompt, settings)], "generate_until"))
    return text


def test_an_answer_ends_before_its_stop_sequence(lm: MegabitLM) -> None:
    whole = generate(lm, "the quick", max_gen_toks=10)
    assert len(whole) > 3
    assert generate(lm, "the quick", max_gen_toks=10, until=[]) == whole
    stop = whole[2:4]
    assert generate(lm, "the quick", max_gen_toks=10, until=stop) == whole.split(stop)[0]
    assert (
        generate(lm, "the quick", max_gen_toks=1)
        == whole[: len(generate(lm, "the quick", max_gen_toks=1))]
    )
    assert generate(lm, "", max_gen_toks=3) == generate(lm, "", max_gen_toks=3, temperature=0.0)


def test_a_long_prompt_leaves_room_for_the_answer(lm: MegabitLM) -> None:
    prompt = "the quick brown fox jumps over a lazy dog and runs away from home to see the sea " * 3
    ids = lm.tok_encode(prompt)
    kept = lm._tokenizer.decode(ids[-(LENGTH - 6) :])
    assert lm.tok_encode(kept) == ids[-(LENGTH - 6) :]
    assert generate(lm, prompt, max_gen_toks=6) == generate(lm, kept, max_gen_toks=6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True, "temperature": 1.0}, "asks for sampled answers"),
        ({"max_gen_toks": LENGTH}, f"asks for answers of {LENGTH} tokens"),
    ],
)
def test_answers_that_are_not_given(lm: MegabitLM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(lm, "the quick", **settings)


def test_a_continuation_that_is_too_long(lm: MegabitLM) -> None:
    with pytest.raises(UserError, match="the model can score 1 to 24"):
        lm.loglikelihood(instances([("the", " quick fox" * 30)]))


@pytest.mark.parametrize(
    ("names", "folder", "message"),
    [
        (["nothing.yaml"], None, "there is no file nothing.yaml"),
        (["broken.yaml"], None, "cannot load broken.yaml"),
        ([], "nothing", "nothing is no folder"),
    ],
)
def test_tasks_that_cannot_be_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    folder: str | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("task: broken\ndataset_path: json\noutput_type: unknown\n")
    with pytest.raises(UserError, match=message) as caught:
        load_tasks(names, None if folder is None else Path(folder))
    assert len(caught.value.problems) == 1


# Against the harness' own Hugging Face model.


@pytest.mark.slow
def test_texts_are_encoded_as_by_its_hugging_face_model(
    model: Path, corpus: CorpusInfo, tmp_path: Path
) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import BitNetConfig, BitNetForCausalLM, PreTrainedTokenizerFast

    # A tokenizer that puts a token before each text, as many of others do.
    spec = Tokenizer.from_file(str(corpus.tokenizer_path))
    spec.add_special_tokens(["<s>"])
    begin = spec.token_to_id("<s>")
    spec.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    for tokenizer, first in ((spec, begin), (Tokenizer.from_file(str(corpus.tokenizer_path)), 0)):
        end = "<|endoftext|>"
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        theirs = HFLM(
            pretrained=BitNetForCausalLM(
                BitNetConfig(
                    vocab_size=310,
                    hidden_size=32,
                    intermediate_size=48,
                    num_hidden_layers=1,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=LENGTH,
                )
            ),
            tokenizer=PreTrainedTokenizerFast(
                tokenizer_file=str(path),
                eos_token=end,
                bos_token=tokenizer.id_to_token(first),
            ),
        )
        runner, shapes = load(model, settings_of(model))
        ours = MegabitLM(runner, ModelTokenizer(tokenizer, path, end, first), shapes)
        assert (ours.eot_token_id, ours.prefix_token_id) == (
            theirs.eot_token_id,
            theirs.prefix_token_id,
        )
        pairs = [
            ("the quick", " brown"),
            ("the quick  \n", "brown fox"),
            ("see", "sea"),
            ("dog<|endoftext|>", " and runs"),
            ("<s>away", " home"),
        ]
        for pair in pairs:
            assert ours._encode_pair(*pair) == theirs._encode_pair(*pair)
        for text in ("", "the sea", " the sea", "<s>the sea", "<|endoftext|>sea"):
            assert ours.tok_encode(text) == theirs.tok_encode(text)
            plain = theirs.tok_encode(text, add_special_tokens=False)
            assert ours.tok_encode(text, add_special_tokens=False) == plain
