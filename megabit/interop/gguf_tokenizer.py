"""A byte-level BPE tokenizer as GGUF files describe one.

What a GGUF file holds is the vocabulary, the merges and the *name* of the rule that cuts a text
into words before merging; the reader has a rule of that name built in. So only tokenizers whose
rule is exactly one of the two here are written: under a near name, or under ``default``, a reader
would make other tokens of some texts, and nobody would be told.

- ``gpt-2``: the rule of GPT-2, built into ``tokenizers`` as ``ByteLevel``. megabit's own tokenizers
  have it.
- ``llama-bpe``: Llama 3's pattern. bitnet-b1.58-2B-4T has this tokenizer. Readers take a word that
  is a token as that token, whatever the merges say (``ignore_merges``), with this rule only.

Sources: ``tokenizers``, ``tokenizer.json``; llama.cpp, ``src/llama-vocab.cpp``,
``conversion/base.py``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from megabit.checkpoint.source import ModelSource
from megabit.errors import UserError
from megabit.files import read_text
from megabit.interop.gguf_special_tokens import SpecialTokens, chat_template, read_json

LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types of GGUF files: of the vocabulary, special, added by hand, and of no use."""


@dataclass(frozen=True)
class GgufTokenizer:
    """The values of the ``tokenizer.*`` keys of a GGUF file."""

    pre: str
    tokens: list[str]
    """By id; as many as the model has rows in its embedding."""
    types: list[int]
    merges: list[str]
    """Two tokens and a space between them, the most frequent pair first."""
    bos: int
    eos: int
    eot: int | None
    pad: int | None
    add_bos: bool
    """Whether a text begins with ``bos`` unless its reader is told otherwise."""
    add_eos: bool
    chat_template: str | None


def read_tokenizer(source: ModelSource) -> GgufTokenizer:
    """The tokenizer that travels with a model.

    Raises:
        UserError: there is none, or it cannot be written to a GGUF file so that a reader makes the
            same tokens of a text.
    """
    path = source.assets.get("tokenizer.json")
    if path is None:
        raise UserError(
            f"{source.path}: has no tokenizer.json, and nothing can run a GGUF file without a "
            "tokenizer; put the one that the model was trained with beside it"
        )
    tokenizer = _load(path)
    spec = json.loads(tokenizer.to_str())
    pre = _word_rule(path, spec)
    settings = read_json(source.assets, "tokenizer_config.json")
    tokens, types = _vocabulary(path, tokenizer, spec["added_tokens"], source.model.vocab_size)
    special = SpecialTokens(path, tokenizer, settings, read_json(source.assets, "config.json"))
    eos = special.eos()
    bos = special.find("bos")
    if bos is None:  # a reader would take token 11, GPT-2's comma
        bos = eos
    add_bos, add_eos = _added_to_texts(path, tokenizer, bos, eos)
    return GgufTokenizer(
        pre=pre,
        tokens=tokens,
        types=types,
        merges=_merges(path, spec["model"]["merges"]),
        bos=bos,
        eos=eos,
        eot=special.eot(eos),
        pad=special.named("pad"),
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template=chat_template(source.assets, settings),
    )


def _load(path: Path) -> Tokenizer:
    text = read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: not a tokenizer ({error})") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _word_rule(path: Path, spec: Mapping[str, Any]) -> str:
    """The name of the rule that cuts a text into words, after all else was found to be right."""
    model = spec["model"]
    if model["type"] != "BPE":
        raise UserError(f"{path}: is of type {model['type']}; GGUF export takes byte-level BPE")
    options = {
        "normalizer": spec["normalizer"],
        "dropout": model["dropout"],
        "byte_fallback": model["byte_fallback"],
        "continuing_subword_prefix": model["continuing_subword_prefix"],
        "end_of_word_suffix": model["end_of_word_suffix"],
    }
    for name, value in options.items():
        if value:
            raise UserError(f"{path}: has a {name}, which readers of GGUF do not apply")
    rule = spec["pre_tokenizer"] or {"type": None}
    steps = rule["pretokenizers"] if rule["type"] == "Sequence" else [rule]
    if len(steps) == 1 and _is_byte_level(steps[0], cuts=True):
        name, ignores_merges = "gpt-2", False
    elif len(steps) == 2 and _is_llama_3(steps[0]) and _is_byte_level(steps[1], cuts=False):
        name, ignores_merges = "llama-bpe", True
    else:
        raise UserError(
            f"{path}: cuts a text into words by another rule than GPT-2's and Llama 3's; readers "
            "of GGUF know rules by name, and megabit knows these two names only"
        )
    if model["ignore_merges"] != ignores_merges:
        raise UserError(
            f"{path}: has ignore_merges {model['ignore_merges']}; readers of GGUF take it as "
            f"{ignores_merges} with the rule {name}"
        )
    return name


def _is_byte_level(step: Mapping[str, Any], cuts: bool) -> bool:
    """Bytes as characters; with ``cuts``, after cutting by GPT-2's rule."""
    return (
        step["type"] == "ByteLevel"
        and not step["add_prefix_space"]
        and bool(step["use_regex"]) == cuts
    )


def _is_llama_3(step: Mapping[str, Any]) -> bool:
    return (
        step["type"] == "Split"
        and step["pattern"] == {"Regex": LLAMA_3_PATTERN}
        and step["behavior"] == "Isolated"
        and not step["invert"]
    )


def _vocabulary(
    path: Path, tokenizer: Tokenizer, added: list[dict[str, Any]], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Tokens and their types by id. Rows of the embedding that no token has are padding."""
    by_id: dict[int, str] = {}
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id >= vocab_size:
            raise UserError(
                f"{path}: token {token!r} has the id {token_id}; the model's vocabulary has "
                f"{vocab_size} tokens (model.vocab_size)"
            )
        if token_id in by_id:
            raise UserError(f"{path}: {by_id[token_id]!r} and {token!r} have the id {token_id}")
        by_id[token_id] = token
    taken = set(by_id.values())
    if not taken.issuperset(ByteLevel.alphabet()):
        raise UserError(f"{path}: lacks tokens for some bytes, so it is not byte-level BPE")
    kinds = {entry["id"]: CONTROL if entry["special"] else USER_DEFINED for entry in added}
    for entry in added:
        if entry["single_word"] or entry["lstrip"] or entry["rstrip"]:
            raise UserError(
                f"{path}: token {entry['content']!r} is single_word, lstrip or rstrip, which "
                "readers of GGUF do not apply"
            )
    tokens, types = [], []
    for token_id in range(vocab_size):
        if token_id in by_id:
            tokens.append(by_id[token_id])
            types.append(kinds.get(token_id, NORMAL))
        else:
            padding = f"[PAD{token_id}]"
            while padding in taken:  # a reader takes no text twice
                padding = f"[{padding}]"
            tokens.append(padding)
            types.append(UNUSED)
    return tokens, types


def _merges(path: Path, pairs: list[list[str]]) -> list[str]:
    if not pairs:
        raise UserError(f"{path}: has no merges, and readers of GGUF need some")
    if any(" " in token for pair in pairs for token in pair):
        raise UserError(f"{path}: has a merge with a space in it, so it is not byte-level BPE")
    return [" ".join(pair) for pair in pairs]


def _added_to_texts(path: Path, tokenizer: Tokenizer, bos: int, eos: int) -> tuple[bool, bool]:
    """Whether the tokenizer puts ``bos`` before and ``eos`` behind a text."""
    text = tokenizer.encode("a", add_special_tokens=False).ids
    around = {
        (add_bos, add_eos): [bos] * add_bos + text + [eos] * add_eos
        for add_bos in (False, True)
        for add_eos in (False, True)
    }
    found = tokenizer.encode("a", add_special_tokens=True).ids
    for added, ids in around.items():
        if ids == found:
            return added
    raise UserError(
        f"{path}: makes {found} of 'a', whose own tokens are {text}; in a GGUF file, only the "
        f"first token of texts (here {bos}) and the last ({eos}) can be added to a text"
    )
