"""``megabit eval``: what it prints and writes, at which layouts, and what it refuses."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megabit.checkpoint import Manifest
from megabit.data.corpus import CorpusInfo
from megabit.data.prepare import prepare_corpus
from megabit.evaluation.text_loss import evaluate_text
from megabit.evaluation.text_sets import held_out_set
from megabit.interop.huggingface import export_huggingface
from megabit.interop.opening import open_source
from tests.command import megabit, refused
from tests.evaluation.saved_models import BATCH, LENGTH, load, save_model, settings_of
from tests.training.tiny import tiny, tiny_corpus, write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a corpus with two validation sets, a model that was trained on it, and other texts."""
    folder = tmp_path_factory.mktemp("eval")
    corpus = tiny_corpus(folder)
    (folder / "lines.txt").write_text("the quick dog sees the sea. " * 20)
    write_texts(folder / "more", documents=2, words=30)
    validation = [str(folder / "lines.txt"), str(folder / "more")]
    data = replace(tiny().data, dir=str(corpus.dir), validation=validation)
    prepare_corpus(data, 300, 1234, lambda line: None)
    config = {
        "data": {"dir": str(corpus.dir), "validation": validation},
        "train": {"micro_batch_size": BATCH},
    }
    save_model(folder / "model", corpus, {"config": config})
    return folder


def corpus_in(folder: Path) -> CorpusInfo:
    from megabit.data.corpus import load_corpus

    return load_corpus(folder / "corpus")


def rows(lines: list[str]) -> dict[str, list[str]]:
    """The table of texts, by name."""
    start = [line.split()[:1] == ["set"] for line in lines].index(True)
    return {line.split()[0]: line.split()[1:] for line in lines[start + 1 :]}


def test_the_texts_of_the_run(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    code, lines, err = megabit("eval", folder / "model", "--json", out)
    assert (code, err) == (0, [])
    written = json.loads(out.read_text())
    assert written["model"] == str(folder / "model")
    assert written["layout"] == {"tp": 1, "pp": 1, "dp": 1}
    assert [*written["sets"]] == [*rows(lines)] == ["held_out", "lines", "more"]
    assert written["tasks"] == {}
    for name, (tokens, loss, perplexity, bits) in rows(lines).items():
        result = written["sets"][name]
        assert int(tokens.replace(",", "")) == result["tokens"]
        assert loss == f"{result['loss']:.4f}"
        assert perplexity == f"{result['perplexity']:.4g}"
        assert bits == f"{result['bits_per_byte']:.4f}"
    runner, _ = load(folder / "model", settings_of(folder / "model"))
    expected = evaluate_text(runner, held_out_set(corpus_in(folder), LENGTH), BATCH)
    assert written["sets"]["held_out"]["loss"] == expected.loss
    assert len({result["loss"] for result in written["sets"].values()}) == 3


@pytest.mark.slow
def test_ranks_of_torchrun_have_the_same_results(folder: Path, tmp_path: Path) -> None:
    """Of texts and of a task, to the last bit."""
    task = tmp_path / "task.yaml"
    data = tmp_path / "task.jsonl"
    data.write_text('{"text": "the quick fox"}\n{"text": "sea and sea"}\n')
    task.write_text(
        "task: texts\ndataset_path: json\ntest_split: test\noutput_type: loglikelihood_rolling\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: bits_per_byte}]\n"
    )
    asked = ["eval", folder / "model", "--text", folder / "lines.txt", "--tasks", task, "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        assert megabit(*asked, tmp_path / "one.json")[0] == 0
        layout = ("parallel.tp=2", "--nproc-per-node", 2)
        assert megabit(*asked, tmp_path / "two.json", *layout)[0] == 0
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two.pop("layout") == {"tp": 2, "pp": 1, "dp": 1}
    assert one.pop("layout") == {"tp": 1, "pp": 1, "dp": 1}
    assert one == two
    assert one["tasks"]["texts"]["documents"] == 2
    assert one["tasks"]["texts"]["metrics"]["bits_per_byte"] > 0


def test_any_text(folder: Path) -> None:
    texts = ["--text", folder / "lines.txt", "--text", folder / "more"]
    code, lines, err = megabit("eval", folder / "model", *texts)
    assert (code, err) == (0, [])
    of_run = rows(megabit("eval", folder / "model")[1])
    assert rows(lines) == {name: of_run[name] for name in ("lines", "more")}


def test_a_limit_and_a_batch_size(folder: Path) -> None:
    _, lines, _ = megabit("eval", folder / "model", "--limit", 2, "--batch-size", 1)
    assert rows(lines)["held_out"][0] == str(2 * LENGTH)


def test_a_shorter_window(folder: Path) -> None:
    whole = rows(megabit("eval", folder / "model")[1])["held_out"]
    short = rows(megabit("eval", folder / "model", "data.seq_length=8")[1])["held_out"]
    assert whole[0] == short[0]
    assert whole[1] != short[1]


def test_a_model_of_hugging_face(folder: Path, tmp_path: Path) -> None:
    """It knows of no corpus, but has its tokenizer."""
    export_huggingface(
        open_source(folder / "model"), tmp_path / "hf", "offline", "autobitlinear", "float32"
    )
    text = ("--text", folder / "lines.txt")
    code, lines, _ = megabit("eval", tmp_path / "hf", *text)
    assert code == 0
    # The export has the same codes and scales; microbatches of other shapes, to four digits.
    ours = rows(megabit("eval", folder / "model", "--batch-size", 1, *text)[1])
    assert rows(lines) == ours
    assert "does not say which text it was trained on" in refused("eval", tmp_path / "hf")


def test_a_model_that_was_never_ternary(folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "dense", corpus_in(folder), {"imported dense": True})
    _, lines, _ = megabit("eval", tmp_path / "dense", "--limit", 1)
    assert any("was not trained as a ternary model" in line for line in lines)


# What is refused.


def test_an_unfinished_quantization_ramp(folder: Path, tmp_path: Path) -> None:
    early = save_model(tmp_path / "early", corpus_in(folder), {"quantization_share": 0.4})
    message = (
        f"{early}: was saved at λ = 0.4 of its quantization ramp: it is not ternary yet; train on, "
        "or use a later checkpoint"
    )
    assert refused("eval", early) == message
    for kind in ("hf", "gguf", "safetensors"):
        assert refused("export", kind, early, tmp_path / "out") == message
    assert not (tmp_path / "out").exists()
    code, _, _ = megabit("ckpt", "show", early)  # it is a checkpoint, and in order
    assert code == 0
    late = save_model(tmp_path / "late", corpus_in(folder), {"quantization_share": 1.0})
    assert megabit("eval", late, "--limit", 1)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.hidden_size=64"], r"model.hidden_size: the model in .* has 32, not 64"),
        (["data.seq_length=48"], r"data.seq_length: 48 is more than the 24 positions"),
        (["parallel.tp=2"], r"world size: 1 ranks do not fit"),
        (["parallel.tp=3", "--nproc-per-node", "3"], r"parallel.tp: 3 does not divide"),
        (["--text", "nothing.txt"], r"--text: nothing.txt does not exist"),
        (["--text", "a/x.txt", "--text", "b/x.md"], r"--text: a/x.txt and b/x.md have the same"),
        (["--tasks", "nothing.yaml"], r"--tasks: there is no file nothing.yaml"),
        (["--include-path", "nothing"], r"--include-path: nothing is no folder"),
        (["--json", "no/where.json"], r"--json: no/where.json cannot be written: there is no"),
        (["data.dir=nowhere"], r"data.dir: nowhere: holds no prepared corpus.*; give a text"),
    ],
)
def test_what_does_not_fit(folder: Path, arguments: list[str], message: str) -> None:
    assert re.search(message, refused("eval", folder / "model", *arguments))


def test_results_that_are_there_already(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    message = refused("eval", folder / "model", "--json", tmp_path / "old.json")
    assert message == f"--json: {tmp_path / 'old.json'} exists already; name a new file"
    assert (tmp_path / "old.json").read_text() == "{}"


def test_another_corpus(folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", corpus_in(folder), {"corpus": "0" * 64})
    assert "is not the corpus that" in refused("eval", other, f"data.dir={folder / 'corpus'}")


def test_a_damaged_checkpoint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    (weights,) = [
        tmp_path / "model" / name
        for name in Manifest.read(tmp_path / "model").files
        if name.endswith(".safetensors")
    ]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert weights.name in refused("eval", tmp_path / "model")
