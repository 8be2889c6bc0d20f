"""How few tokens a text can have, without tokenizing it.

A tokenizer of some megabytes of text runs for seconds, in which nothing else of its process does.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_LOSSY = 4
"""Tokenizers that may drop or shorten text: so many times as much text is let through. Unicode's
normal forms shorten it to a third at most."""


@dataclass(frozen=True)
class TokenBound:
    """A token stands for so many bytes of UTF-8 at most."""

    bytes_per_token: int

    @staticmethod
    def of(tokenizer: Tokenizer) -> "TokenBound":
        parts: dict[str, Any] = json.loads(tokenizer.to_str())
        vocab = tokenizer.get_vocab()
        added = {token["content"] for token in parts.get("added_tokens") or ()}
        is_bytes = _is_byte_level(parts, vocab)
        # A character of a token of bytes is a byte, whatever its own UTF-8.
        longest = max(
            (len(t if is_bytes and t not in added else t.encode()) for t in vocab), default=1
        )
        keeps_all = _cuts_nothing(parts) and (is_bytes or _falls_back_to_bytes(parts, vocab))
        return TokenBound(longest if keeps_all else longest * _LOSSY)

    def fewest(self, text: str) -> int:
        """Tokens that ``text`` has, or more."""
        # UTF-8 has a byte or more for each character, and 0 for none of them.
        size = len(text.encode("utf-8", errors="replace"))
        return -(-size // self.bytes_per_token)


def _cuts_nothing(parts: Mapping[str, Any]) -> bool:
    # A token that strips takes the spaces beside it along, however many.
    added = parts.get("added_tokens") or ()
    strips = any(token["lstrip"] or token["rstrip"] for token in added)
    return parts.get("truncation") is None and not strips


def _is_byte_level(parts: Mapping[str, Any], vocab: Mapping[str, int]) -> bool:
    """Whether each byte of a text is a character of a token: as in GPT-2, Llama 3, megabit."""
    cuts = _steps(parts.get("pre_tokenizer"), "pretokenizers")
    return (
        parts["model"]["type"] == "BPE"
        and parts.get("normalizer") is None
        and bool(cuts)
        and cuts[-1]["type"] == "ByteLevel"
        and all(cut["type"] == "Split" and cut["behavior"] != "Removed" for cut in cuts[:-1])
        and vocab.keys() >= set(ByteLevel.alphabet())
    )


def _falls_back_to_bytes(parts: Mapping[str, Any], vocab: Mapping[str, int]) -> bool:
    """Whether what has no token of its own is one for each byte: as in Llama 2."""
    cuts = _steps(parts.get("pre_tokenizer"), "pretokenizers")
    return (
        parts["model"]["type"] == "BPE"
        and bool(parts["model"].get("byte_fallback"))
        and all(_grows(step) for step in _steps(parts.get("normalizer"), "normalizers"))
        and all(cut["type"] == "Metaspace" for cut in cuts)
        and vocab.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    )


def _grows(normalizer: Mapping[str, Any]) -> bool:
    """Whether it makes no text shorter."""
    if normalizer["type"] != "Replace":
        return bool(normalizer["type"] == "Prepend")
    old = normalizer["pattern"].get("String")
    return old is not None and len(normalizer["content"].encode()) >= len(old.encode())


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(part, dict):
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]
