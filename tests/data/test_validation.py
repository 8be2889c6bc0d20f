"""Validation sets: prepared once, beside the corpus, with its tokenizer."""

from dataclasses import replace
from pathlib import Path

import pytest

from megabit.config.schema import DataConfig
from megabit.data.corpus import CorpusInfo, load_corpus
from megabit.data.prepare import prepare_corpus
from megabit.data.tokenizer import END_OF_TEXT
from megabit.data.validation import load_validation, set_names
from megabit.errors import UserError
from tests.training.tiny import write_texts


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    write_texts(tmp_path / "text")
    write_texts(tmp_path / "more", documents=3, words=20)
    (tmp_path / "lines.jsonl").write_text('{"text": "the sea"}\n{"text": "a dog"}\n')
    return DataConfig(
        text=str(tmp_path / "text"),
        dir=str(tmp_path / "corpus"),
        validation=[str(tmp_path / "more"), str(tmp_path / "lines.jsonl")],
    )


def prepare(data: DataConfig) -> tuple[CorpusInfo, list[str]]:
    lines: list[str] = []
    return prepare_corpus(data, 300, 1, lines.append), lines


def test_each_text_is_a_set(data: DataConfig, tmp_path: Path) -> None:
    corpus, _ = prepare(data)
    tokenizer = corpus.load_tokenizer()
    lines = load_validation(corpus, "lines")
    dataset = lines.open()
    texts = []
    for number in range(len(dataset)):
        ids = dataset.document(number).tolist()
        assert ids.pop() == tokenizer.token_to_id(END_OF_TEXT)
        texts.append(tokenizer.decode(ids))
    assert texts == ["the sea", "a dog"]
    assert (lines.split.documents, lines.split.bytes) == (2, 12)
    assert lines.split.tokens == dataset.num_tokens
    more = load_validation(corpus, "more")
    assert more.split.documents == 3
    assert more.split.bytes == sum(len(f.read_bytes()) for f in (tmp_path / "more").iterdir())
    assert sorted(path.name for path in (tmp_path / "corpus" / "validation").iterdir()) == [
        "lines",
        "more",
    ]


def test_a_set_is_prepared_once(data: DataConfig, tmp_path: Path) -> None:
    first, _ = prepare(data)
    folders = [first.dir / "validation" / name for name in ("more", "lines")]
    before = [folder.stat().st_ino for folder in folders]
    again, lines = prepare(data)
    assert again == first
    assert [line for line in lines if "validation" in line] == [
        "validation set is up to date: more",
        "validation set is up to date: lines",
    ]
    assert [folder.stat().st_ino for folder in folders] == before
    prepare(replace(data, text=None))  # nor is the text of the corpus needed for it
    assert [folder.stat().st_ino for folder in folders] == before


def test_a_set_is_prepared_again_when_its_text_changes(data: DataConfig, tmp_path: Path) -> None:
    corpus, _ = prepare(data)
    old = load_validation(corpus, "lines")
    (tmp_path / "lines.jsonl").write_text('{"text": "a fox"}\n')
    prepare(data)
    new = load_validation(corpus, "lines")
    assert (new.split.documents, new.split.bytes) == (1, 5)
    assert new.fingerprint != old.fingerprint
    assert load_corpus(corpus.dir) == corpus
    prepare(replace(data, text_field="text"))
    assert load_validation(corpus, "lines").fingerprint == new.fingerprint


def test_a_corpus_that_is_rebuilt_has_its_sets_rebuilt(data: DataConfig, tmp_path: Path) -> None:
    corpus, _ = prepare(data)
    old = load_validation(corpus, "more")
    (tmp_path / "text" / "00.txt").write_text("quite another text, with other words in it")
    rebuilt, _ = prepare(data)
    assert rebuilt.fingerprint != corpus.fingerprint
    assert load_validation(rebuilt, "more").fingerprint != old.fingerprint


@pytest.mark.parametrize("name", ["text.bin", "text.idx", "manifest.json"])
def test_a_damaged_set_is_prepared_again(data: DataConfig, name: str) -> None:
    corpus, _ = prepare(data)
    damaged = corpus.dir / "validation" / "more" / name
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1] + bytes([good[-1] ^ 1]) if name != "manifest.json" else b"{")
    if name == "manifest.json":
        # Nobody can tell that it is a set of ours any more, so nothing is deleted.
        with pytest.raises(UserError, match="holds files that are not part of a megabit corpus"):
            prepare(data)
        damaged.unlink()
        return
    prepare(data)
    assert damaged.read_bytes() == good


def test_files_of_the_user_are_never_replaced(data: DataConfig) -> None:
    corpus, _ = prepare(data)
    (corpus.dir / "validation" / "more" / "notes.md").write_text("mine")
    with pytest.raises(UserError, match=r"such as validation/more/notes.md"):
        prepare(data)
    assert (corpus.dir / "validation" / "more" / "notes.md").read_text() == "mine"


def test_a_text_that_is_missing_is_told_before_anything_is_written(data: DataConfig) -> None:
    with pytest.raises(UserError, match=r"nothing\.txt: does not exist") as caught:
        prepare(replace(data, validation=["nothing.txt"]))
    assert len(caught.value.problems) == 1
    assert not Path(data.dir).exists()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["a/x.txt", "b/x.jsonl"], "a/x.txt and b/x.jsonl have the same name, x"),
        (["a/x.txt", "a/x.txt"], "have the same name, x"),
        (["held_out.txt"], "cannot be a set named 'held_out'"),
        (["a/.txt"], "cannot be a set named '.txt'"),
    ],
)
def test_names_that_are_refused(paths: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        set_names(paths)
    assert len(caught.value.problems) == 1


def test_a_set_is_named_after_its_file_or_folder() -> None:
    assert set_names(["a/wiki.valid.txt", "texts/", "b.d/"]) == {
        "wiki.valid": Path("a/wiki.valid.txt"),
        "texts": Path("texts"),
        "b": Path("b.d"),
    }
    with pytest.raises(UserError, match="holds no prepared validation set"):
        load_validation(CorpusInfo(Path("no"), "", 1, *[None] * 2, (), {}), "x")  # type: ignore[arg-type]
