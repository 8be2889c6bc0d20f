"""Prompts as token ids, without keeping others waiting."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megabit.errors import UserError
from megabit.inference.model_text import ModelText
from megabit.inference.text_stream import TextStream, TokenText
from megabit.serving.api_error import ApiError

Messages = Sequence[Mapping[str, str]]

_LITTLE = 2048
"""Characters or ids: less work than to hand it to a thread."""


@dataclass(frozen=True)
class Prompt:
    """What one engine request continues."""

    ids: tuple[int, ...]
    text: str


class TextSide:
    """Everything that knows text; the engine knows token ids only.

    Long texts are tokenized, and chats rendered, in threads: others are answered meanwhile.
    """

    def __init__(self, model: ModelText) -> None:
        self._model = model
        self._rendering = asyncio.Lock()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self._model.end_ids

    async def prompts(self, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[Prompt]:
        """Each with at least one token. Raises ApiError: 400, an id is no token of the model."""
        if sum(map(len, prompts)) < _LITTLE:
            return self._all(prompts)
        return await asyncio.to_thread(self._all, prompts)

    async def chat(self, messages: Messages) -> Prompt:
        """A dialogue as the model has learned to read it. Raises ApiError: 400, not this one."""
        async with self._rendering:  # a template renders one chat at a time
            try:
                ids = await asyncio.to_thread(self._model.encode_chat, messages)
            except UserError as error:
                text = str(error)
                raise ApiError(400, text, param="messages", code="chat_template") from None
        return Prompt(tuple(ids), "")

    def token(self, token_id: int) -> TokenText:
        """How one token reads."""
        return self._model.token_texts.of(token_id)

    def stream(self, prompt: Prompt, stop: Sequence[str]) -> TextStream:
        """For an answer to ``prompt``."""
        return self._model.stream(prompt.ids, stop)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError: 400, one of them is no token of the model."""
        limit = self._model.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < limit):
            wrong = next(i for i in ids if not 0 <= i < limit)
            raise ApiError(
                400,
                f"{param}: {wrong} is no token of the model; ids are 0 to {limit - 1}.",
                param=param,
                code="invalid_token_id",
            )

    def _all(self, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[Prompt]:
        return [self._prompt(prompt) for prompt in prompts]

    def _prompt(self, prompt: str | Sequence[int]) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(tuple(self._model.encode(prompt)), prompt)
        self.check_ids(prompt, "prompt")
        ids = tuple(prompt) or (self._model.begin_id,)
        return Prompt(ids, self._model.decode(ids, skip_special_tokens=False))
