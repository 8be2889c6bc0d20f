"""From tokens to text as they come: only text that no later token can change.

A token may hold part of a UTF-8 character, which decodes to U+FFFD until the rest is there; how a
token reads may depend on the one before it (``▁`` at the beginning is no space); and what may turn
out to be the beginning of a stop string must not be shown yet. A few recent tokens are decoded for
each new one, however long the text is.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

INCOMPLETE = "\ufffd"

_PROMPT_TOKENS = 6
"""Of the prompt, that the answer's first token is read after."""
_CHARACTER = 4
"""Bytes of the longest character, so tokens of the longest one that is not whole."""
_GARBAGE = 8
"""Tokens that are no character yet: at least some of them will never be."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TextStream:
    """The text of one answer.

    All pieces together are what ``Tokenizer.decode`` makes of prompt and answer, behind the
    prompt's text, up to the stop string whose last character comes first; it makes no difference
    in which parts tokens are added. One exception: where single bytes are tokens
    (``ByteFallback``), the library makes U+FFFD of whole characters, too, if bytes right behind
    them are none; here, what is whole stays.

    Args:
        prompt_ids: tokens before the answer; only the last few matter.
        stop: not empty strings.
        skip_special_tokens: leave out tokens that the tokenizer calls special.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._tokenizer = tokenizer
        self._skipped = _special_ids(tokenizer) if skip_special_tokens else frozenset[int]()
        self._context, self._pending = self._split_prompt(prompt_ids)
        self._prefix = self._decode(self._context)
        self._of_prompt = self._new_text()
        """What ``_pending`` began as."""
        self._stop = _StopStrings(stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.found

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these make final; nothing behind a stop string."""
        return "".join(self._stop.add(self._add(token)) for token in token_ids)

    def finish(self) -> str:
        """The rest, now that no token comes any more."""
        rest = self._without_prompt(self._new_text())
        self._context, self._pending, self._prefix = [], [], ""
        return self._stop.add(rest) + self._stop.finish()

    def _add(self, token: int) -> str:
        if token in self._skipped or self._tokenizer.id_to_token(token) is None:
            return ""
        self._pending.append(token)
        text = self._new_text()
        count = len(self._pending)
        if text.endswith(INCOMPLETE):
            count, text = self._final_part(text)
            if not count:
                return ""
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._prefix = self._decode(self._context)
        return self._without_prompt(text)

    def _new_text(self) -> str:
        """What pending tokens add."""
        text = self._decode([*self._context, *self._pending])
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        return self._decode(self._pending)  # the exception above

    def _final_part(self, text: str) -> tuple[int, str]:
        """Of pending tokens that end in no character, how many no later one can change."""
        count = len(self._pending)
        if count >= _GARBAGE:
            whole = self._decode(self._pending)
            for cut in range(count - 1, count - _CHARACTER - 1, -1):
                first, rest = map(self._decode, (self._pending[:cut], self._pending[cut:]))
                if first + rest == whole and text.endswith(rest):
                    return cut, text[: len(text) - len(rest)]
        return 0, ""

    def _without_prompt(self, text: str) -> str:
        """Bytes at the end of the prompt that were no character may have become part of one."""
        before, self._of_prompt = self._of_prompt, ""
        pairs = enumerate(zip(before, text, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(before), len(text)))
        return text[same:]

    def _split_prompt(self, prompt_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The end of the prompt: whole characters, and tokens that may be part of one."""
        recent: list[int] = []
        for token in reversed(prompt_ids):
            if len(recent) == _PROMPT_TOKENS + 2 * _CHARACTER:
                break
            if token not in self._skipped and self._tokenizer.id_to_token(token) is not None:
                recent.insert(0, token)
        # Before a character that is not whole may be a genuine U+FFFD.
        for cut in range(min(2 * _CHARACTER, len(recent)) + 1):
            context, rest = recent[: len(recent) - cut], recent[len(recent) - cut :]
            for more in range(_CHARACTER):
                part = context[-(_PROMPT_TOKENS + more) :]
                if not self._decode(part).endswith(INCOMPLETE):
                    return part, rest
        return recent[-_PROMPT_TOKENS:], []

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


class _StopStrings:
    """Passes text on, but what is, or may become, a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        if self.found is not None or not text:
            return ""
        text = self._held + text
        matches = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            self._held = ""
            return text[:at]
        held = max((self._beginning(text, s) for s in self._stop), default=0)
        shown = len(text) - held
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """Characters at the end of ``text`` that ``stop`` begins with."""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class TokenText:
    """How one token reads by itself."""

    text: str
    """If it is part of a character, as in the OpenAI API: ``bytes:\\xe4\\xbd``."""
    bytes: bytes


class TokenTexts:
    """Texts of single tokens, for log probabilities.

    Args:
        tokenizer: of any kind; those of ``ByteLevel`` and ``ByteFallback`` give exact bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        kinds = _decoder_kinds(tokenizer)
        self._byte_of = _byte_of_character() if "ByteLevel" in kinds else {}
        self._has_bytes = "ByteFallback" in kinds

    def of(self, token_id: int) -> TokenText:
        """Of an id without a token: the empty text."""
        content = self._bytes(token_id)
        try:
            return TokenText(content.decode(), content)
        except UnicodeDecodeError:
            return TokenText("bytes:" + "".join(f"\\x{b:02x}" for b in content), content)

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_of and all(c in self._byte_of for c in token):
            return bytes(self._byte_of[c] for c in token)
        if self._has_bytes and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        # Behind another one, so that a space at its beginning is kept.
        once: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice: str = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return (twice.removeprefix(once) if twice.startswith(once) else once).encode()


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Names of the steps of its decoder."""
    if tokenizer.decoder is None:
        return set()
    found, todo = set[str](), [json.loads(tokenizer.decoder.__getstate__())]
    while todo:
        step = todo.pop()
        found.add(step["type"])
        todo += step.get("decoders", [])
    return found


def _byte_of_character() -> dict[str, int]:
    """How byte-level tokens are spelled: printable bytes of Latin-1 as they are, the others as
    characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
    assert table.keys() == set(ByteLevel.alphabet())
    return table
