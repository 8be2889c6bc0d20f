"""Prompts as token ids, without keeping others waiting."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megabit.errors import UserError
from megabit.inference.model_text import ModelText
from megabit.inference.text_stream import TextStream, TokenText
from megabit.serving.api_error import ApiError
from megabit.serving.token_bound import TokenBound

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

    Long texts are tokenized, and chats rendered, in threads: others are answered meanwhile. Few of
    them, as a tokenizer lets nothing else of its process run; that ``fewest_tokens`` is asked first
    keeps that short.
    """

    def __init__(self, model: ModelText) -> None:
        self._model = model
        self._bound = TokenBound.of(model.tokenizer)
        self._tokenizing = ThreadPoolExecutor(2, "tokenize")
        self._rendering = ThreadPoolExecutor(1, "render")  # a template renders one chat at a time

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self._model.end_ids

    async def prompts(self, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[Prompt]:
        """Each with at least one token. Raises ApiError: 400, an id is no token of the model."""
        if sum(map(len, prompts)) < _LITTLE:
            return self._all(prompts)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, self._all, prompts)

    def fewest_tokens(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], messages: Messages | None
    ) -> tuple[int, str]:
        """That the longest prompt, or else a dialogue, has at least, without tokenizing it; and
        the name of the field that it is."""
        if messages is not None:
            # Templates may strip what is around a message.
            return sum(self._bound.fewest(m["content"].strip()) for m in messages), "messages"
        fewest = (self._bound.fewest(p) if isinstance(p, str) else len(p) for p in prompts)
        return max(fewest, default=0), "prompt"

    async def chat(self, messages: Messages) -> Prompt:
        """A dialogue as the model has learned to read it. Raises ApiError: 400, not this one."""
        loop = asyncio.get_running_loop()
        try:
            ids = await loop.run_in_executor(self._rendering, self._model.encode_chat, messages)
        except UserError as error:
            raise ApiError(400, str(error), param="messages", code="chat_template") from None
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
