"""Streamed text is the text of all tokens, in whatever parts they come, for all decoders."""

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from megabit.data.tokenizer import train_tokenizer
from megabit.inference.text_stream import INCOMPLETE, TextStream, TokenTexts

TEXT = (
    "Once upon a time 你好世界 there were 👩‍👩‍👧 and 🇩🇪 flags, naïve café, e\u0301,"
    " \u0e01\u0e34\u0e19, a genuine \ufffd sign.\n\tdef f(x): return x  # нет\r\n"
)
BYTE = 3
"""Id of the first of 256 byte tokens of ``fallback``."""


def byte_level() -> Tokenizer:
    tokenizer = train_tokenizer([TEXT * 4], 320)
    tokenizer.add_special_tokens(["<|eot_id|>"])
    tokenizer.add_tokens([AddedToken("<plain é>", special=False)])
    return tokenizer


def pieces() -> dict[str, int]:
    words = ["▁", "a", "b", "▁a", "▁the", "s", ",", "▁▁", "é", "▁你", "."]
    return {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        **{f"<0x{byte:02X}>": BYTE + byte for byte in range(256)},
        **{word: BYTE + 256 + i for i, word in enumerate(words)},
    }


def fallback(decoder: decoders.Decoder) -> Tokenizer:
    """Like Llama 2's: words that begin with ``▁``, and bytes for what is no word."""
    tokenizer = Tokenizer(models.BPE(pieces(), [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def llama() -> Tokenizer:
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    return fallback(decoders.Sequence(steps))


def metaspace() -> Tokenizer:
    return fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def word_pieces() -> Tokenizer:
    words = ["[UNK]", "[SEP]", "hello", "##s", ".", "do", "n't", "wor", "##ld", "'", "你", "##é"]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def suffixes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=120,
        special_tokens=["<unk>", "<end>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


ALL = {f.__name__: f() for f in (byte_level, llama, metaspace, word_pieces, suffixes)}


def stream_of(
    name: str,
    prompt: Sequence[int],
    parts: Sequence[Sequence[int]],
    stop: Sequence[str] = (),
    skip: bool = True,
) -> tuple[list[str], TextStream]:
    stream = TextStream(ALL[name], prompt, stop, skip)
    return [*(stream.add(part) for part in parts), stream.finish()], stream


def decoded(name: str, prompt: Sequence[int], answer: Sequence[int], skip: bool = True) -> str:
    """The text behind that of the prompt; what both share, if that ends within a character."""
    tokenizer = ALL[name]
    before = tokenizer.decode([*prompt], skip_special_tokens=skip)
    both = tokenizer.decode([*prompt, *answer], skip_special_tokens=skip)
    shared = next(n for n in range(len(before), -1, -1) if both.startswith(before[:n]))
    return both[shared:]


@st.composite
def split_ids(
    draw: st.DrawFn, name: str, whole_characters: bool
) -> tuple[list[int], list[list[int]]]:
    """A prompt, and an answer in parts."""
    tokenizer = ALL[name]
    if whole_characters:
        words = [[i] for t, i in pieces().items() if not t.startswith("<0x")]
        characters = st.characters(codec="utf-8", exclude_characters=INCOMPLETE)
        text = st.text(characters, min_size=1, max_size=4).map(
            lambda t: [BYTE + b for b in t.encode()]
        )
        ids = [i for run in draw(st.lists(st.sampled_from(words) | text, max_size=12)) for i in run]
    else:
        last = max(tokenizer.get_vocab().values()) + 3  # some are no tokens
        ids = draw(st.lists(st.integers(0, last), max_size=40))
    marks = sorted(draw(st.lists(st.integers(0, len(ids)), min_size=1, max_size=6)))
    cuts = [*marks, len(ids)]
    return ids[: cuts[0]], [ids[a:b] for a, b in pairwise(cuts)]


def check(name: str, case: tuple[list[int], list[list[int]]], skip: bool) -> None:
    prompt, parts = case
    answer = [token for part in parts for token in part]
    shown, _ = stream_of(name, prompt, parts, skip=skip)
    assert "".join(shown) == decoded(name, prompt, answer, skip)


@given(split_ids("byte_level", whole_characters=False), st.booleans())
@example(([], [[0x20, 0xFF] * 20]), True)
def test_any_bytes(case: tuple[list[int], list[list[int]]], skip: bool) -> None:
    check("byte_level", case, skip)


@given(
    st.lists(
        st.text(max_size=20) | st.sampled_from(["👩‍👩‍👧 你", "e\u0301", "🇩🇪", " ", INCOMPLETE])
    ),
    st.integers(0, 10),
    st.integers(1, 5),
)
@example([INCOMPLETE, "𐀀"], 4, 1)
def test_any_text(words: list[str], prompt: int, step: int) -> None:
    """Never a part of a character, unless the text has U+FFFD."""
    text = "".join(words)
    ids = ALL["byte_level"].encode(text, add_special_tokens=False).ids
    head, rest = ids[:prompt], ids[prompt:]
    shown, _ = stream_of(
        "byte_level", head, [rest[i : i + step] for i in range(0, len(rest), step)]
    )
    before = ALL["byte_level"].decode(head)
    joined = "".join(shown)
    assert text.endswith(joined)
    assert (before + joined).startswith(before[:-1])
    if INCOMPLETE not in text:
        assert all(INCOMPLETE not in piece for piece in shown)
        assert len(before.rstrip(INCOMPLETE)) + len(joined) == len(text)


@pytest.mark.parametrize("name", ["llama", "metaspace"])
def test_spaces_and_single_bytes(name: str) -> None:
    @given(split_ids(name, whole_characters=True), st.booleans())
    def holds(case: tuple[list[int], list[list[int]]], skip: bool) -> None:
        prompt, parts = case
        tokenizer, answer = ALL[name], [token for part in parts for token in part]
        full = tokenizer.decode([*prompt, *answer], skip_special_tokens=skip)
        # Of a prompt that ends within a character, the library shows no byte before it either.
        ends = range(len(prompt), -1, -1)
        before = (tokenizer.decode(prompt[:n], skip_special_tokens=skip) for n in ends)
        head = next(text for text in before if not text or not text.endswith(INCOMPLETE))
        shown, _ = stream_of(name, prompt, parts, skip=skip)
        assert head + "".join(shown) == full

    holds()


@pytest.mark.parametrize("name", ["word_pieces", "suffixes"])
def test_words_that_join(name: str) -> None:
    @given(split_ids(name, whole_characters=False), st.booleans())
    def holds(case: tuple[list[int], list[list[int]]], skip: bool) -> None:
        check(name, case, skip)

    holds()


def test_whole_characters_stay_though_bytes_behind_them_are_none() -> None:
    you = [BYTE + b for b in "你".encode()]
    a = pieces()["a"]
    shown, _ = stream_of("llama", [], [you, you[:2], [a]])
    assert shown == ["你", "", f"{INCOMPLETE}{INCOMPLETE}a", ""]
    assert ALL["llama"].decode([*you, *you[:2], a]) == INCOMPLETE * 5 + "a"


def test_a_character_is_shown_with_its_last_token() -> None:
    tokenizer = ALL["byte_level"]
    ids = tokenizer.encode("x🦜y", add_special_tokens=False).ids
    assert len(ids) == 5  # of the parrot's bytes, the text that it learned of has the first two
    shown, _ = stream_of("byte_level", [], [[i] for i in ids])
    assert shown == ["x", "", "", "🦜", "y", ""]


def test_a_genuine_replacement_character_comes_out() -> None:
    ids = ALL["byte_level"].encode(f"a {INCOMPLETE}", add_special_tokens=False).ids
    shown, _ = stream_of("byte_level", [], [[i] for i in ids])
    assert "".join(shown) == f"a {INCOMPLETE}"
    assert stream_of("byte_level", ids, [])[0] == [""]


def test_special_tokens_are_shown_on_demand() -> None:
    end = ALL["byte_level"].token_to_id("<|eot_id|>")
    ids = ALL["byte_level"].encode("ab", add_special_tokens=False).ids
    assert "".join(stream_of("byte_level", [], [[end], ids, [end]])[0]) == "ab"
    both, _ = stream_of("byte_level", [], [[end], ids, [end]], skip=False)
    assert "".join(both) == "<|eot_id|>ab<|eot_id|>"


def until_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Character by character."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text("aab你", max_size=40),
    st.lists(st.text("aab你", min_size=1, max_size=5), max_size=3),
    st.integers(1, 4),
)
@example("aab", ["aac", "ab"], 1)
@example("abcd", ["abcde", "cd"], 2)
def test_stop_strings(text: str, stop: list[str], step: int) -> None:
    ids = ALL["byte_level"].encode(text, add_special_tokens=False).ids
    shown, stream = stream_of(
        "byte_level", [], [ids[i : i + step] for i in range(0, len(ids), step)], stop
    )
    wanted, found = until_stop(text, stop)
    assert "".join(shown) == wanted
    assert stream.stopped == found


def test_what_may_become_a_stop_string_waits() -> None:
    tokenizer = ALL["byte_level"]
    one = {c: tokenizer.encode(c, add_special_tokens=False).ids for c in "xyUser:"}
    stream = TextStream(tokenizer, [], ["User:", "\n\n"])
    assert stream.add(one["x"]) == "x"
    assert [stream.add(one[c]) for c in "Use"] == ["", "", ""]
    assert stream.add(one["y"]) == "Usey"
    assert [stream.add(one[c]) for c in "User:"] == [""] * 5
    assert stream.stopped == "User:"
    assert (stream.add(one["x"]), stream.finish()) == ("", "")
    unfinished = TextStream(tokenizer, [], ["User:"])
    assert (unfinished.add(one["U"]), unfinished.finish(), unfinished.stopped) == ("", "U", None)
    with pytest.raises(ValueError, match="empty"):
        TextStream(tokenizer, [], ["a", ""])


@pytest.mark.parametrize("name", ["byte_level", "llama"])
@pytest.mark.parametrize("garbage", [False, True])
def test_time_grows_with_the_text_only(name: str, garbage: bool) -> None:
    """Tokens that never make a character must not pile up: 20,000 of them all decoded again for
    each one would take minutes."""
    text = [0xFF, 0xE4] if garbage else b"no end "
    alphabet = ALL["byte_level"].get_vocab()
    table = {
        b: i for i, b in ((i, TokenTexts(ALL["byte_level"]).of(i).bytes) for i in alphabet.values())
    }
    ids = [BYTE + b if name == "llama" else table[bytes([b])] for b in text]
    start = time.monotonic()
    shown, _ = stream_of(name, [], [ids * (20_000 // len(ids))])
    assert len(shown[0]) > 19_000
    assert time.monotonic() - start < 30


def test_texts_of_single_tokens() -> None:
    texts = TokenTexts(ALL["byte_level"])
    for i in range(ALL["byte_level"].get_vocab_size()):
        content = texts.of(i)
        if not content.text.startswith("bytes:"):
            assert content.text.encode() == content.bytes
    ids = ALL["byte_level"].encode(TEXT, add_special_tokens=False).ids
    assert b"".join(texts.of(i).bytes for i in ids).decode() == TEXT
    parrot = ALL["byte_level"].encode("🦜", add_special_tokens=False).ids
    assert texts.of(parrot[0]).text == "bytes:\\xf0\\x9f"
    assert texts.of(ALL["byte_level"].token_to_id("<plain é>")).text == "<plain é>"
    assert texts.of(10**6).bytes == b""
    llama_texts = TokenTexts(ALL["llama"])
    assert llama_texts.of(pieces()["▁the"]).text == " the"
    assert llama_texts.of(pieces()["a"]).text == "a"
    assert llama_texts.of(BYTE + 0xE4).bytes == b"\xe4"
    assert llama_texts.of(1).text == "<s>"
