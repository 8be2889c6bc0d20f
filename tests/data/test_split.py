"""Holding out: by content, whole documents, and pieces of a single text."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabit.data.sources import Document
from megabit.data.split import PIECES, corpus_documents, cut, hash_key, held_out_mask
from megabit.errors import UserError


@given(st.integers(2, 300), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_the_number_held_out(count: int, fraction: float) -> None:
    keys = np.random.default_rng(count).integers(0, 2**63, count).astype(np.uint64)
    mask = held_out_mask(keys, fraction)
    assert mask.sum() == min(count - 1, max(1, round(fraction * count)))
    assert keys[mask].max() <= keys[~mask].min()


def test_the_key_follows_the_seed_and_the_text_only() -> None:
    key = hash_key(Document("a", "text"), 1)
    assert key == hash_key(Document("b", "text"), 1)
    assert key != hash_key(Document("a", "text"), 2)
    assert key != hash_key(Document("a", "Text"), 1)


@given(st.text("ab \n", max_size=400))
def test_pieces_add_up_to_the_text(text: str) -> None:
    pieces = cut(Document("a.txt", text))
    assert len(pieces) <= PIECES
    if text and not text.isspace():
        assert "".join(piece.text for piece in pieces) == text
        assert not any(piece.text.isspace() for piece in pieces)
    assert len({piece.name for piece in pieces}) == len(pieces)


def test_cuts_between_paragraphs_where_there_are_enough() -> None:
    text = "".join(f"Line one of {i}\nline two.\n\n" for i in range(500))
    pieces = cut(Document("a.txt", text))
    assert len(pieces) == pytest.approx(PIECES, abs=5)
    assert all(piece.text.endswith("two.\n\n") for piece in pieces)
    assert pieces[0].name == "a.txt#1"


def test_cuts_between_lines_where_paragraphs_are_few() -> None:
    pieces = cut(Document("a.txt", "Title\n\n" + "a line of text\n" * 500))
    assert len(pieces) == pytest.approx(PIECES, abs=5)


def test_only_a_single_document_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree\n\n")
    assert [d.name for d in corpus_documents(tmp_path, "text")] == [f"a.txt#{i}" for i in (1, 2, 3)]
    (tmp_path / "b.txt").write_text("four\n\nfive")
    assert [d.name for d in corpus_documents(tmp_path, "text")] == ["a.txt", "b.txt"]


def test_refuses_a_single_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only one line\n")
    with pytest.raises(UserError, match=r"a\.txt: is one document of one line"):
        list(corpus_documents(tmp_path / "a.txt", "text"))
