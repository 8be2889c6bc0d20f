"""The byte-level tokenizer: exact round trips, determinism, and segments that change nothing."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megabit.data import tokenizer as module
from megabit.data.tokenizer import END_OF_TEXT, encode_documents, load_tokenizer, train_tokenizer
from megabit.errors import UserError

TEXTS = ["To be, or not to be: that is the question.\n" * 3, "Words, words, words.\n\n  Äöü 你好"]
END_OF_TEXT_ID = 0
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


@settings(deadline=None)
@given(text=TEXT | st.text("a \n\t'\u00a0\x1c<|endoftext|>"))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = encode_documents(tokenizer, [text])
    assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text
    assert (ids == END_OF_TEXT_ID).nonzero()[0].tolist() == [len(ids) - 1]


def test_end_of_text_is_id_0_and_cannot_be_forged(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for each in (tokenizer, load_tokenizer(tmp_path / "tokenizer.json")):
        assert END_OF_TEXT_ID not in each.encode(f"a{END_OF_TEXT}b").ids
        assert each.decode(each.encode(f"a{END_OF_TEXT}b").ids) == f"a{END_OF_TEXT}b"


def test_training_is_deterministic() -> None:
    assert train_tokenizer(TEXTS, 300).to_str() == train_tokenizer(iter(TEXTS), 300).to_str()


def test_a_short_text_gives_fewer_tokens() -> None:
    assert train_tokenizer(["ab"], 5000).get_vocab_size() == 258
    assert train_tokenizer(TEXTS, 257).get_vocab_size() == 257


def test_refuses_a_vocabulary_below_the_bytes() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size: must be at least 257 .*not 256"):
        train_tokenizer(TEXTS, 256)


@settings(deadline=None)
@given(text=TEXT | st.text("ab1 \n\t'.\u00a0\u2028\x1c"), chars=st.integers(1, 5))
def test_segments_tokenize_like_the_whole(tokenizer: Tokenizer, text: str, chars: int) -> None:
    segments = list(module._segments(text, chars))
    assert "".join(segments) == text
    ids = [i for segment in segments for i in tokenizer.encode(segment).ids]
    assert ids == tokenizer.encode(text).ids


def test_long_and_many_texts_stay_apart(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARS", 25)
    monkeypatch.setattr(module._segments, "__defaults__", (10,))
    texts = ["", "one two three four five six seven eight nine", "a", "", "b c", "ten" * 30]
    encoded = [ids.tolist() for ids in encode_documents(tokenizer, texts)]
    assert encoded == [[*tokenizer.encode(text).ids, END_OF_TEXT_ID] for text in texts]


def test_refuses_what_is_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot read it \(No such file"):
        load_tokenizer(path)
    for content in (b"{}", b"not json", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
            load_tokenizer(path)
    path.write_text(train_tokenizer(TEXTS, 257).to_str().replace("endoftext", "eos"))
    with pytest.raises(UserError, match=r"has no token <\|endoftext\|>"):
        load_tokenizer(path)
