"""Log probabilities in the two forms that the OpenAI API has for them."""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from megabit.inference.messages import TokenLogprobs
from megabit.serving.prompts import TextSide

_LOWEST = -9999.0
"""Instead of −∞, which JSON cannot write; that of the API itself."""


class LegacyLogprobs:
    """Of ``/v1/completions``: lists side by side, one entry for each token of one answer.

    Offsets count characters of the text; a token that completes no character adds none.
    """

    def __init__(self, text: TextSide) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of_prompt(self, first: int, rest: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Those of a prompt; its first token has none."""
        token = self._text.token(first)
        head: dict[str, list[Any]] = {
            "tokens": [token.text],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._next_offset(token.bytes)],
        }
        return {key: head[key] + values for key, values in self.of(rest).items()}

    def of(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Those of the next tokens."""
        told: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for entry in tokens:
            token = self._text.token(entry.token)
            told["tokens"].append(token.text)
            told["token_logprobs"].append(_finite(entry.logprob))
            top: dict[str, float] = {}
            # Several tokens may have the same text; the likeliest comes first.
            for other, logprob in (*entry.top, (entry.token, entry.logprob)):
                top.setdefault(self._text.token(other).text, _finite(logprob))
            told["top_logprobs"].append(top)
            told["text_offset"].append(self._next_offset(token.bytes))
        return told

    def _next_offset(self, content: bytes) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(content))
        return offset


def chat_logprobs(text: TextSide, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Of ``/v1/chat/completions``: an object for each token."""
    return [
        {**_entry(text, t.token, t.logprob), "top_logprobs": [_entry(text, *o) for o in t.top]}
        for t in tokens
    ]


def _entry(text: TextSide, token_id: int, logprob: float) -> dict[str, Any]:
    token = text.token(token_id)
    return {"token": token.text, "logprob": _finite(logprob), "bytes": list(token.bytes)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
