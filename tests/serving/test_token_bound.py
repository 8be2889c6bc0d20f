"""No text has fewer tokens than its bound says, whatever the tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megabit.data.tokenizer import train_tokenizer
from megabit.serving.token_bound import TokenBound
from tests.serving.served import TEXT

LONG = "<|" + "é" * 30 + "|>"


def of_bytes() -> Tokenizer:
    return train_tokenizer([TEXT], 400)


def with_long_tokens() -> Tokenizer:
    tokenizer = of_bytes()
    tokenizer.add_special_tokens([AddedToken(LONG, normalized=False)])
    tokenizer.encode_special_tokens = False
    return tokenizer


def like_llama_2() -> Tokenizer:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é"]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


def of_normal_forms() -> Tokenizer:
    tokenizer = of_bytes()
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


TOKENIZERS = {make.__name__: make() for make in (of_bytes, with_long_tokens, like_llama_2)}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    parts=st.lists(st.sampled_from([" ", "a", "the ", "é", "北", "🙂", "\n", LONG]))
    | st.lists(st.text())
)
@settings(deadline=None, max_examples=60)
def test_bound(name: str, parts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    text = "".join(parts)
    assert TokenBound.of(tokenizer).fewest(text) <= len(tokenizer.encode(text).ids)


def test_bounds_are_close() -> None:
    """Of all tokens the longest is what counts."""
    tokenizer = of_bytes()
    longest = max(map(len, tokenizer.get_vocab()))
    assert TokenBound.of(tokenizer).bytes_per_token == longest
    assert TokenBound.of(with_long_tokens()).bytes_per_token == 64
    assert TokenBound.of(like_llama_2()).bytes_per_token == 6
    text = "x" * 1000
    assert 1000 // longest <= TokenBound.of(tokenizer).fewest(text) <= 1000


def test_tokenizers_that_lose_text_have_more_room() -> None:
    tokenizer = of_normal_forms()
    kept = TokenBound.of(of_bytes()).bytes_per_token
    assert TokenBound.of(tokenizer).bytes_per_token > kept
    tokenizer = of_bytes()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert TokenBound.of(tokenizer).bytes_per_token > kept
    tokenizer = of_bytes()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert TokenBound.of(tokenizer).bytes_per_token > kept


def test_lone_surrogates_are_no_mistake() -> None:
    assert TokenBound.of(of_bytes()).fewest("\ud800") == 1
