"""Preparing a corpus: what is held out, when it is rebuilt, and what is never touched."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from megabit.config.schema import DataConfig
from megabit.data import prepare as module
from megabit.data.corpus import DATA_FILES, MANIFEST
from megabit.data.indexed import IndexedDataset, IndexedDatasetWriter
from megabit.data.prepare import CorpusInfo, check_vocab, load_corpus, prepare_corpus
from megabit.data.tokenizer import END_OF_TEXT, train_tokenizer
from megabit.errors import UserError

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away")


def make_source(folder: Path, documents: int = 20, prefix: str = "") -> Path:
    """Text files, each of which has a word of its own."""
    folder.mkdir(exist_ok=True)
    for i in range(documents):
        words = [WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(60)]
        (folder / f"{i:02}.txt").write_text(f"{prefix}unique{i} " + " ".join(words))
    return folder


def settings(tmp_path: Path, **changes: Any) -> DataConfig:
    data = DataConfig(
        text=str(tmp_path / "source"), dir=str(tmp_path / "corpus"), held_out_fraction=0.1
    )
    return replace(data, **changes)


def run(data: DataConfig, vocab_size: int = 300, seed: int = 1) -> tuple[CorpusInfo, list[str]]:
    lines: list[str] = []
    return prepare_corpus(data, vocab_size, seed, lines.append), lines


def texts(corpus: CorpusInfo, dataset: IndexedDataset) -> list[str]:
    tokenizer = corpus.load_tokenizer()
    decoded = []
    for i in range(len(dataset)):
        ids = dataset.document(i).tolist()
        assert ids[-1] == tokenizer.token_to_id(END_OF_TEXT)
        assert ids.count(ids[-1]) == 1
        decoded.append(tokenizer.decode(ids[:-1]))
    return decoded


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(data: DataConfig, message: str, **arguments: int) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run(data, **arguments)
    assert len(caught.value.problems) == 1


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    corpus, _ = run(settings(tmp_path))
    train, held_out = corpus.open_train(), corpus.open_held_out()
    assert (len(train), len(held_out)) == (18, 2)
    original = {path.name: path.read_text() for path in source.iterdir()}
    assert set(texts(corpus, held_out)) == {original[name] for name in corpus.held_out_names}
    assert sorted(texts(corpus, train) + texts(corpus, held_out)) == sorted(original.values())
    assert corpus.train.tokens == train.num_tokens
    assert corpus.held_out.bytes == sum(len(original[n].encode()) for n in corpus.held_out_names)
    assert corpus.train.bytes + corpus.held_out.bytes == sum(map(len, original.values()))


def test_the_tokenizer_has_not_seen_the_held_out_text(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    corpus, _ = run(settings(tmp_path))
    train = [
        path.read_text()
        for path in sorted(source.iterdir())
        if path.name not in corpus.held_out_names
    ]
    assert corpus.tokenizer_path.read_text() == _saved(train, tmp_path)


def _saved(train: list[str], folder: Path) -> str:
    train_tokenizer(train, 300).save(str(folder / "expected.json"))
    return (folder / "expected.json").read_text()


def test_the_folder_holds_exactly_the_corpus(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    run(settings(tmp_path, dir=str(tmp_path / "new" / "deep" / "corpus")))
    assert set(content(tmp_path / "new/deep/corpus")) == {*DATA_FILES, MANIFEST}
    assert [path.name for path in (tmp_path / "new" / "deep").iterdir()] == ["corpus"]


def test_the_manifest_says_it_all(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    corpus, _ = run(settings(tmp_path))
    assert load_corpus(tmp_path / "corpus") == corpus
    assert corpus.vocab_size == corpus.load_tokenizer().get_vocab_size() <= 300
    corpus.verify()
    manifest = json.loads((tmp_path / "corpus" / MANIFEST).read_text())
    assert manifest["made_from"]["seed"] == 1


def test_is_idempotent(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    first, _ = run(settings(tmp_path))
    inode = (tmp_path / "corpus").stat().st_ino
    second, lines = run(settings(tmp_path))
    assert second == first
    assert lines == [f"corpus is up to date: {tmp_path / 'corpus'}"]
    assert (tmp_path / "corpus").stat().st_ino == inode


def test_is_deterministic(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    for name in ("a", "b"):
        run(settings(tmp_path, dir=str(tmp_path / name)))
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_is_rebuilt_when_anything_that_matters_changes(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    data = settings(tmp_path)
    fingerprints = [run(data)[0].fingerprint]
    fingerprints.append(run(data, seed=2)[0].fingerprint)
    fingerprints.append(run(data, vocab_size=280)[0].fingerprint)
    fingerprints.append(run(replace(data, held_out_fraction=0.5))[0].fingerprint)
    fingerprints.append(run(replace(data, text_field="body"))[0].fingerprint)
    (source / "00.txt").write_text("something else")
    fingerprints.append(run(data)[0].fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)
    assert load_corpus(tmp_path / "corpus").fingerprint == fingerprints[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "source"]


@pytest.mark.parametrize("name", DATA_FILES)
def test_a_damaged_corpus_is_rebuilt(tmp_path: Path, name: str) -> None:
    make_source(tmp_path / "source")
    run(settings(tmp_path))
    good = content(tmp_path / "corpus")
    flipped = bytearray(good[name])
    flipped[len(flipped) // 2] ^= 1
    (tmp_path / "corpus" / name).write_bytes(flipped)
    with pytest.raises(UserError, match=f"{name}: is damaged"):
        load_corpus(tmp_path / "corpus").verify()
    run(settings(tmp_path))
    assert content(tmp_path / "corpus") == good


def test_a_failure_leaves_the_old_corpus_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_source(tmp_path / "source")
    run(settings(tmp_path))
    before = content(tmp_path / "corpus")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexedDatasetWriter, "add_document", fail)
    refused(settings(tmp_path), r"data\.dir: cannot write .*corpus \(No space left", seed=2)
    assert content(tmp_path / "corpus") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "source"]


def test_refuses_a_folder_of_other_files(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in (("thesis.tex", "x"), ("manifest.json", "{}"), ("train.bin", "x")):
        (folder / name).write_text(text)
        refused(settings(tmp_path), rf"data\.dir: .* not part of a megabit corpus .*{name}")
        assert content(folder) == {name: text.encode()}
        (folder / name).unlink()
    run(settings(tmp_path))  # an empty folder is fine


def test_refuses_to_delete_files_added_to_a_corpus(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    run(settings(tmp_path))
    (tmp_path / "corpus" / "notes.md").write_text("mine")
    refused(settings(tmp_path), r"such as notes\.md", seed=2)
    assert (tmp_path / "corpus" / "notes.md").read_text() == "mine"


def test_refuses_a_file_for_a_folder(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    (tmp_path / "corpus").write_text("x")
    refused(settings(tmp_path), r"data\.dir: .*corpus is not a folder")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    (tmp_path / "disk").mkdir()
    (tmp_path / "corpus").symlink_to(tmp_path / "disk")
    for seed in (1, 2):
        run(settings(tmp_path), seed=seed)
        assert (tmp_path / "corpus").is_symlink()
        assert (tmp_path / "disk" / MANIFEST).exists()


def test_without_text_the_prepared_corpus_is_used(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    data = settings(tmp_path)
    refused(replace(data, text=None), r"data\.text: is not set and data\.dir=.*holds no corpus")
    corpus, _ = run(data)
    assert run(replace(data, text=None))[0] == corpus
    refused(replace(data, text=None), r"model\.vocab_size: 257 is smaller than", vocab_size=257)


def test_bad_text_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    refused(settings(tmp_path), r"source: does not exist")
    make_source(tmp_path / "source")
    refused(settings(tmp_path), r"model\.vocab_size: must be at least 257", vocab_size=100)
    (tmp_path / "source" / "99.txt").write_bytes(b"\xff")
    refused(settings(tmp_path), r"99\.txt: not UTF-8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_source_that_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "source")
    survey = module._survey

    def survey_then_add(*arguments: Any) -> Any:
        result = survey(*arguments)
        (source / "zz.txt").write_text("new")
        return result

    monkeypatch.setattr(module, "_survey", survey_then_add)
    refused(settings(tmp_path), "source: changed while it was read")


def test_one_text_is_cut_so_that_some_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"Paragraph {i} speaks.\n\n" for i in range(1000)))
    corpus, _ = run(settings(tmp_path, text=str(path)))
    assert 45 <= corpus.train.documents + corpus.held_out.documents <= 50
    assert corpus.held_out.documents == 5
    assert corpus.train.bytes + corpus.held_out.bytes == path.stat().st_size


def test_two_processes_may_prepare_at_once(tmp_path: Path) -> None:
    make_source(tmp_path / "source", documents=40)
    run(settings(tmp_path), seed=7)  # both have to replace it
    script = (
        "import sys\n"
        "from megabit.config.schema import DataConfig\n"
        "from megabit.data.prepare import prepare_corpus\n"
        "data = DataConfig(text=sys.argv[1], dir=sys.argv[2], held_out_fraction=0.1)\n"
        "input()\n"
        "for seed in (1, 2, 3, 3):\n"
        "    prepare_corpus(data, 300, seed, lambda line: None)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "source"), str(tmp_path / "corpus")]
    root = Path(module.__file__).parents[2]
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        for _ in range(2)
    ]
    for process in processes:  # start together, after the imports
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    corpus = load_corpus(tmp_path / "corpus")
    corpus.verify()
    assert corpus.open_train().num_tokens == corpus.train.tokens
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "source"]


def test_both_of_two_processes_keep_the_first_equal_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_source(tmp_path / "source")
    build = module._build

    def build_after_another(*arguments: Any) -> CorpusInfo:
        monkeypatch.setattr(module, "_build", build)
        run(settings(tmp_path))
        return build(*arguments)

    monkeypatch.setattr(module, "_build", build_after_another)
    corpus, _ = run(settings(tmp_path))
    assert load_corpus(tmp_path / "corpus") == corpus
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "source"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "has version 99 but this megabit reads version 1"),
        ({"format": "other"}, "holds no prepared corpus"),
        ({"train": None}, "is damaged"),
        ({"train": {"documents": "1"}}, "is damaged"),
        ({"files": {}}, "is damaged"),
        ({"files": []}, "is damaged"),
        ({"held_out_names": 3}, "is damaged"),
        ({"vocab_size": None}, "is damaged"),
    ],
)
def test_refuses_a_bad_manifest(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    make_source(tmp_path / "source", documents=2)
    run(settings(tmp_path))
    path = tmp_path / "corpus" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        load_corpus(tmp_path / "corpus")


def test_refuses_a_corpus_with_missing_or_short_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no prepared corpus"):
        load_corpus(tmp_path / "corpus")
    make_source(tmp_path / "source", documents=2)
    corpus, _ = run(settings(tmp_path))
    path = tmp_path / "corpus" / "train.bin"
    size = path.stat().st_size
    os.truncate(path, size - 2)
    with pytest.raises(UserError, match=rf"train\.bin: has {size - 2} bytes but .* {size}"):
        load_corpus(tmp_path / "corpus")
    path.unlink()
    with pytest.raises(UserError, match=r"train\.bin: No such file"):
        load_corpus(tmp_path / "corpus")
    with pytest.raises(UserError, match=r"held_out\.idx: has 1 documents .* lists 5"):
        replace(corpus, held_out=replace(corpus.held_out, documents=5)).open_held_out()


def test_check_vocab(tmp_path: Path) -> None:
    make_source(tmp_path / "source", documents=2)
    corpus, _ = run(settings(tmp_path))
    check_vocab(corpus, corpus.vocab_size)
    with pytest.raises(UserError, match=r"model\.vocab_size: 1 is smaller than the \d+ tokens"):
        check_vocab(corpus, 1)


def test_the_corpus_of_another_text_is_not_replaced(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    run(settings(tmp_path))
    before = content(tmp_path / "corpus")
    other = make_source(tmp_path / "other", prefix="other ")
    refused(settings(tmp_path, text=str(other)), "holds the corpus of another text")
    assert content(tmp_path / "corpus") == before


def test_without_text_every_byte_is_checked(tmp_path: Path) -> None:
    """An .idx that moves a document's end, or ids beyond the vocabulary, have the right size."""
    make_source(tmp_path / "source")
    run(settings(tmp_path))
    path = tmp_path / "corpus" / "train.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)
    refused(settings(tmp_path, text=None), "train.bin: is damaged; prepare the corpus again")


def test_a_tokenizer_of_others(tmp_path: Path) -> None:
    """Texts are encoded whole, as its model was trained; its own token ends documents."""
    text = make_source(tmp_path / "source")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+ ?|[^\w]+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>", "</s>"], show_progress=False
    )
    documents = [path.read_text() for path in sorted(text.iterdir())]
    tokenizer.train_from_iterator(documents, trainer)
    path = tmp_path / "theirs.json"
    tokenizer.save(str(path))

    theirs = settings(tmp_path, tokenizer=str(path), end_of_text="</s>")
    corpus, _ = run(theirs)
    assert corpus.end_of_text == load_corpus(corpus.dir).end_of_text == "</s>"
    assert corpus.load_tokenizer().get_vocab() == tokenizer.get_vocab()
    end = tokenizer.token_to_id("</s>")
    found = {tuple(corpus.open_train().document(i).tolist()) for i in range(corpus.train.documents)}
    expected = {(*tokenizer.encode(document).ids, end) for document in documents}
    assert len(found) == 18
    assert found < expected
    assert run(theirs)[0].fingerprint == corpus.fingerprint
    with pytest.raises(UserError, match=r"theirs.json: has no token </x>.*data.end_of_text"):
        run(replace(theirs, end_of_text="</x>"))
    with pytest.raises(UserError, match=r"data.tokenizer: .* tokens, but model.vocab_size=60"):
        run(theirs, vocab_size=60)
    assert run(settings(tmp_path))[0].fingerprint != corpus.fingerprint
