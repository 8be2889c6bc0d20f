"""Which tokens begin, end and fill texts, from the small files that travel with a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megabit.data.tokenizer import END_OF_TEXT
from megabit.errors import UserError
from megabit.files import read_text
from megabit.interop import json_fields

END_OF_TURN = "<|eot_id|>"
"""What ends an answer in Llama 3's dialogues; a second token to stop at."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of a model's special tokens.

    ``tokenizer_config.json`` names them, ``config.json`` numbers them; where both do, the first is
    what a tokenizer library goes by. Without either it is a tokenizer of megabit's own.
    """

    path: Path
    tokenizer: Tokenizer
    settings: Mapping[str, Any]
    config: Mapping[str, Any]

    def find(self, role: str) -> int | None:
        """The id of the ``bos`` or ``eos`` token."""
        named = self.named(role)
        return next(iter(self._numbers(role)), None) if named is None else named

    def named(self, role: str) -> int | None:
        """The id of the token that ``tokenizer_config.json`` calls ``bos``, ``eos`` or ``pad``."""
        token = self.settings.get(f"{role}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            return None
        token_id = self.tokenizer.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise UserError(
                f"{self.path}: has no token {token!r}, the {role}_token of tokenizer_config.json"
            )
        return token_id

    def eos(self) -> int:
        """The token that ends a text."""
        found = self.find("eos")
        if found is None:
            found = self.tokenizer.token_to_id(END_OF_TEXT)
        if found is None:
            raise UserError(
                f"{self.path}: nothing says which token ends a text; it takes an eos_token in "
                f"tokenizer_config.json, an eos_token_id in config.json or a token {END_OF_TEXT}"
            )
        return found

    def eot(self, eos: int) -> int | None:
        """The token that ends an answer, if it is not ``eos``."""
        candidates = [self.tokenizer.token_to_id(END_OF_TURN), *self._numbers("eos")]
        return next((c for c in candidates if c is not None and c != eos), None)

    def _numbers(self, role: str) -> list[int]:
        value = self.config.get(f"{role}_token_id")
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        for number in numbers:
            if type(number) is not int or not self._has(number):
                raise UserError(
                    f"{self.path}: has no token with the id {number!r}, the {role}_token_id of "
                    "config.json"
                )
        return numbers

    def _has(self, token_id: int) -> bool:
        """The library raises on numbers that are no 32-bit ids."""
        return 0 <= token_id < 1 << 31 and self.tokenizer.id_to_token(token_id) is not None


def chat_template(assets: Mapping[str, Path], settings: Mapping[str, Any]) -> str | None:
    """The jinja2 template that travels with a model.

    Args:
        settings: its ``tokenizer_config.json``.
    """
    if "chat_template.jinja" in assets:
        return read_text(assets["chat_template.jinja"])
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None


def read_json(assets: Mapping[str, Path], name: str) -> dict[str, Any]:
    """A JSON object; empty if the model has no such file."""
    return json_fields.read_json(assets[name]) if name in assets else {}
