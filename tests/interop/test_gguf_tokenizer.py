"""The tokenizer in a GGUF file: a reader makes the same tokens of every text, or it is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from megabit.config import ModelConfig
from megabit.data.tokenizer import train_tokenizer
from megabit.errors import UserError
from megabit.interop.gguf_export import export_gguf
from megabit.interop.gguf_tokenizer import LLAMA_3_PATTERN, GgufTokenizer, read_tokenizer
from tests.interop.gguf_tokenizers import TEXTS, llama_3_tokenizer, own_tokenizer
from tests.interop.random_source import RandomSource

MODEL = ModelConfig(
    vocab_size=420,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=1,
    hidden_act="silu",
)


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def source_of(path: Path, vocab_size: int = MODEL.vocab_size, **files: Any) -> RandomSource:
    """``files``: JSON values or texts, by name with an underscore for the dot."""
    assets = {"tokenizer.json": path}
    for key, value in files.items():
        name = ".".join(key.rsplit("_", 1))
        assets[name] = path.with_name(name)
        text = value if isinstance(value, str) else json.dumps(value)
        assets[name].write_text(text, encoding="utf-8")
    return RandomSource(replace(MODEL, vocab_size=vocab_size), assets=assets)


def rebuild(path: Path) -> Tokenizer:
    """A tokenizer made of nothing but what the GGUF file says."""
    fields = gguf.GGUFReader(path).fields

    def value(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"].contents()

    assert value("model") == "gpt2"
    tokens, types = value("tokens"), value("token_type")
    vocab = {token: i for i, token in enumerate(tokens) if types[i] == gguf.TokenType.NORMAL}
    merges = [tuple(merge.split(" ")) for merge in value("merges")]
    is_llama = value("pre") == "llama-bpe"
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    vocab.update({token: tokens.index(token) for token in special})
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=is_llama))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_llama)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA_3_PATTERN), "isolated"), byte_level]
        )
        if is_llama
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


@pytest.mark.parametrize("make", [own_tokenizer, llama_3_tokenizer])
def test_the_same_ids_from_what_the_file_says(
    make: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    original = make()
    source = source_of(save(original, tmp_path), config_json={"eos_token_id": 1, "bos_token_id": 0})
    export_gguf(source, tmp_path / "m.gguf", "TQ2_0")
    rebuilt = rebuild(tmp_path / "m.gguf")
    assert max(len(original.encode(text).ids) for text in TEXTS) > 50
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text, add_special_tokens=False).ids == ids
        assert rebuilt.decode(ids) == text


def test_a_tokenizer_of_ours(tmp_path: Path) -> None:
    """It has no files that name its special tokens."""
    original = own_tokenizer()
    found = read_tokenizer(source_of(save(original, tmp_path)))
    count = original.get_vocab_size()
    assert count < MODEL.vocab_size  # else no padding is seen
    assert found.pre == "gpt-2"
    assert found.tokens[:count] == [original.id_to_token(i) for i in range(count)]
    assert found.tokens[count:] == [f"[PAD{i}]" for i in range(count, MODEL.vocab_size)]
    normal, control, unused = (
        int(kind) for kind in (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED)
    )
    assert found.types == [
        control,
        *[normal] * (count - 1),
        *[unused] * (MODEL.vocab_size - count),
    ]
    assert (found.bos, found.eos, found.eot, found.pad) == (0, 0, None, None)
    assert (found.add_bos, found.add_eos, found.chat_template) == (False, False, None)


def test_a_tokenizer_like_llama_3(tmp_path: Path) -> None:
    source = source_of(
        save(llama_3_tokenizer(), tmp_path),
        config_json={"bos_token_id": 0, "eos_token_id": [1, 2]},
        tokenizer_config_json={
            "bos_token": {"content": "<|begin_of_text|>"},
            "pad_token": "<|end_of_text|>",
            "chat_template": "not this one",
        },
        chat_template_jinja="{{ messages }}",
    )
    found = read_tokenizer(source)
    assert found.pre == "llama-bpe"
    assert (found.bos, found.eos, found.eot, found.pad) == (0, 1, 2, 1)
    assert (found.add_bos, found.add_eos) == (True, False)
    assert found.chat_template == "{{ messages }}"


def test_all_of_it_is_in_the_file(tmp_path: Path) -> None:
    source = source_of(
        save(llama_3_tokenizer(), tmp_path),
        tokenizer_config_json={
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "pad_token": "<|end_of_text|>",
            "chat_template": "{{ messages }}",
        },
    )
    expected = read_tokenizer(source)
    export_gguf(source, tmp_path / "m.gguf", "I2_S")
    fields = gguf_fields(tmp_path / "m.gguf")
    found = GgufTokenizer(
        pre=fields["tokenizer.ggml.pre"],
        tokens=fields["tokenizer.ggml.tokens"],
        types=fields["tokenizer.ggml.token_type"],
        merges=fields["tokenizer.ggml.merges"],
        bos=fields["tokenizer.ggml.bos_token_id"],
        eos=fields["tokenizer.ggml.eos_token_id"],
        eot=fields["tokenizer.ggml.eot_token_id"],
        pad=fields["tokenizer.ggml.padding_token_id"],
        add_bos=fields["tokenizer.ggml.add_bos_token"],
        add_eos=fields["tokenizer.ggml.add_eos_token"],
        chat_template=fields["tokenizer.chat_template"],
    )
    assert found == expected


def gguf_fields(path: Path) -> dict[str, Any]:
    class Fields(gguf.GGUFReader):
        def _build_tensors(self, *_: Any) -> None:
            """The package knows no I2_S."""

    return {key: field.contents() for key, field in Fields(path).fields.items()}


def test_added_tokens_that_are_not_special(tmp_path: Path) -> None:
    tokenizer = own_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    found = read_tokenizer(source_of(save(tokenizer, tmp_path)))
    assert found.types[found.tokens.index("<tool>")] == gguf.TokenType.USER_DEFINED


def test_settings_for_batches_do_not_matter(tmp_path: Path) -> None:
    tokenizer = own_tokenizer()
    expected = read_tokenizer(source_of(save(tokenizer, tmp_path)))
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(4)
    assert read_tokenizer(source_of(save(tokenizer, tmp_path))) == expected


def test_padding_never_repeats_a_token(tmp_path: Path) -> None:
    """A reader of a file with one text twice ends the process."""
    tokenizer = own_tokenizer()
    tokenizer.add_special_tokens(["[PAD419]", "[[PAD419]]"])
    found = read_tokenizer(source_of(save(tokenizer, tmp_path)))
    assert len(set(found.tokens)) == MODEL.vocab_size


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({}, {}, 0),
        ({}, {"eos_token_id": 5}, 5),
        ({}, {"eos_token_id": [7, 5]}, 7),
        ({"eos_token": "a"}, {"eos_token_id": 5}, "a"),
        ({"eos_token": None}, {"eos_token_id": None}, 0),
    ],
)
def test_which_token_ends_a_text(
    tmp_path: Path, settings: dict[str, Any], config: dict[str, Any], expected: int | str
) -> None:
    tokenizer = own_tokenizer()
    source = source_of(
        save(tokenizer, tmp_path), tokenizer_config_json=settings, config_json=config
    )
    eos = tokenizer.token_to_id(expected) if isinstance(expected, str) else expected
    assert read_tokenizer(source).eos == eos


# What is refused


def without_end(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = TemplateProcessing(
        single="$A a", special_tokens=[("a", tokenizer.token_to_id("a"))]
    )


def change_model(**options: Any) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        for name, value in options.items():
            setattr(tokenizer.model, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: setattr(t, "normalizer", normalizers.NFC()), "has a normalizer"),
        (change_model(dropout=0.1), "has a dropout"),
        (change_model(byte_fallback=True), "has a byte_fallback"),
        (change_model(ignore_merges=True), "has ignore_merges True"),
        (
            lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
            "cuts a text into words by another rule",
        ),
        (
            lambda t: setattr(
                t,
                "pre_tokenizer",
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ),
            "cuts a text into words by another rule",
        ),
        (
            lambda t: setattr(
                t,
                "pre_tokenizer",
                pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                    ]
                ),
            ),
            "cuts a text into words by another rule",
        ),
        (
            lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
            "cuts a text into words by another rule",
        ),
        (
            lambda t: t.add_tokens([AddedToken("<t>", lstrip=True)]),
            "'<t>' is single_word, lstrip or rstrip",
        ),
        (without_end, "can be added to a text"),
        (lambda t: t.add_special_tokens([f"<{i}>" for i in range(200)]), "(model.vocab_size)"),
    ],
)
def test_a_tokenizer_that_readers_would_get_wrong(
    tmp_path: Path, change: Callable[[Tokenizer], None], expected: str
) -> None:
    tokenizer = own_tokenizer()
    change(tokenizer)
    refused(source_of(save(tokenizer, tmp_path)), "tokenizer.json: ", expected)


@pytest.mark.parametrize("change", [{"behavior": "removed"}, {"invert": True}])
def test_llama_3_s_pattern_used_in_another_way(tmp_path: Path, change: dict[str, Any]) -> None:
    tokenizer = llama_3_tokenizer()
    settings = {"behavior": "isolated", "invert": False, **change}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3_PATTERN), **settings),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    source = source_of(save(tokenizer, tmp_path), config_json={"eos_token_id": 1})
    refused(source, "tokenizer.json: ", "cuts a text into words by another rule")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not a tokenizer"),
        ("[]", "not a tokenizer"),
        (
            json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}),
            "is of type WordLevel",
        ),
    ],
)
def test_a_file_that_is_no_such_tokenizer(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    refused(source_of(path), "tokenizer.json: ", expected)


def test_a_tokenizer_without_merges(tmp_path: Path) -> None:
    path = save(train_tokenizer(["abc"], 257), tmp_path)
    refused(source_of(path), "tokenizer.json: ", "has no merges")


def test_a_tokenizer_that_does_not_know_all_bytes(tmp_path: Path) -> None:
    tokenizer = own_tokenizer()
    vocab = tokenizer.get_vocab()
    del vocab["~"]
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokenizer.model = models.BPE(vocab, merges)
    refused(source_of(save(tokenizer, tmp_path)), "tokenizer.json: ", "lacks tokens for some bytes")


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"random-model: has no tokenizer\.json"):
        export_gguf(RandomSource(MODEL), tmp_path / "m.gguf", "TQ2_0")
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_ends_a_text(tmp_path: Path) -> None:
    refused(source_of(save(llama_3_tokenizer(), tmp_path)), "tokenizer.json: ", "ends a text")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config_json": {"eos_token": "<none>"}}, "has no token '<none>'"),
        ({"tokenizer_config_json": {"bos_token": 3}}, "has no token 3"),
        ({"config_json": {"eos_token_id": 400}}, "has no token with the id 400"),
        ({"config_json": {"bos_token_id": -1}}, "has no token with the id -1"),
        ({"config_json": {"eos_token_id": [1 << 40]}}, f"has no token with the id {1 << 40}"),
        ({"config_json": {"eos_token_id": True}}, "has no token with the id True"),
        ({"config_json": "{"}, "config.json: is not JSON"),
        ({"tokenizer_config_json": []}, "tokenizer_config.json: must hold a JSON object"),
    ],
)
def test_special_tokens_that_are_not_there(
    tmp_path: Path, files: dict[str, Any], expected: str
) -> None:
    refused(source_of(save(own_tokenizer(), tmp_path), **files), "", expected)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"\xff\xfe")
    refused(source_of(path), "tokenizer.json: ", "not UTF-8 (invalid start byte at byte 0)")
    path.unlink()
    refused(source_of(path), "tokenizer.json: ", "cannot read it (No such file or directory)")


def refused(source: RandomSource, *expected: str) -> None:
    with pytest.raises(UserError) as caught:
        read_tokenizer(source)
    (problem,) = caught.value.problems
    assert "\n" not in problem
    assert all(part in problem for part in expected)
