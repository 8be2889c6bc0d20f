"""``POST /v1/completions``: a text, or token ids, continued."""

from collections.abc import AsyncGenerator
from typing import Any

from megabit.inference.messages import SamplingParams
from megabit.serving.answers import Piece
from megabit.serving.api_error import ApiError
from megabit.serving.generation import Generation, Wanted
from megabit.serving.openai_types import CompletionRequest, SamplingFields
from megabit.serving.service import Service
from megabit.serving.token_logprobs import LegacyLogprobs

_DEFAULT_MAX_TOKENS = 16


def sampling_of(
    fields: SamplingFields, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """What the engine is told; ``max_tokens`` depends on the prompt."""
    return SamplingParams(
        temperature=fields.drawn_at,
        top_k=max(0, fields.top_k or 0),
        top_p=1.0 if fields.top_p is None else float(fields.top_p),
        min_p=float(fields.min_p or 0.0),
        repetition_penalty=float(fields.repetition_penalty or 1.0),
        presence_penalty=float(fields.presence_penalty or 0.0),
        frequency_penalty=float(fields.frequency_penalty or 0.0),
        seed=fields.seed,
        n=fields.n or 1,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
    )


def wanted_of(service: Service, request: CompletionRequest) -> Wanted:
    """Raises ApiError: nothing is asked for."""
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(
            400, "max_tokens is 0, so there is nothing to answer; or set echo.", param="max_tokens"
        )
    service.text.check_ids(request.stop_token_ids or (), "stop_token_ids")
    sampling = sampling_of(request, request.logprobs, request.logprobs if request.echo else None)
    return Wanted(
        request.prompt,
        sampling,
        request.max_tokens,
        _DEFAULT_MAX_TOKENS,
        first_token_s=request.first_token_timeout,
    )


class CompletionWriter:
    """Puts a generation that has been started into the API's form."""

    def __init__(
        self, service: Service, request: CompletionRequest, generation: Generation
    ) -> None:
        self._service = service
        self._request = request
        self._generation = generation
        answers = len(generation.prompts) * (request.n or 1)
        self._logprobs = [
            LegacyLogprobs(service.text) if request.logprobs is not None else None
            for _ in range(answers)
        ]
        self._echoed = [False] * answers

    async def whole(self) -> dict[str, Any]:
        """The answer in one. Raises ApiError: it cannot be completed."""
        texts = [""] * len(self._echoed)
        ends: list[Piece | None] = [None] * len(texts)
        logprobs: list[dict[str, list[Any]] | None] = [None] * len(texts)
        async for piece in self._generation.pieces():
            new_text, new_logprobs = self._new(piece)
            texts[piece.choice] += new_text
            if new_logprobs is not None:
                logprobs[piece.choice] = _joined(logprobs[piece.choice], new_logprobs)
            if piece.finish is not None:
                ends[piece.choice] = piece
        choices = [
            _choice(index, text, logprobs[index], ends[index]) for index, text in enumerate(texts)
        ]
        return {**self._head(), "choices": choices, "usage": self._generation.usage}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer piece by piece."""
        async for piece in self._generation.pieces():
            text, logprobs = self._new(piece)
            if text or piece.finish is not None:
                end = piece if piece.finish is not None else None
                yield {**self._head(), "choices": [_choice(piece.choice, text, logprobs, end)]}
        if self._request.includes_usage:
            yield {**self._head(), "choices": [], "usage": self._generation.usage}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "object": "text_completion",
            "created": self._generation.created,
            "model": self._service.model_name,
        }

    def _new(self, piece: Piece) -> tuple[str, dict[str, list[Any]] | None]:
        """Text and log probabilities of a piece, behind those of the prompt if it is the first."""
        text, tokens = piece.text, piece.logprobs
        logprobs = self._logprobs[piece.choice]
        told: dict[str, list[Any]] | None = None
        if self._request.echo and not self._echoed[piece.choice]:
            self._echoed[piece.choice] = True
            number = piece.choice // (self._request.n or 1)
            prompt = self._generation.prompts[number]
            text = prompt.text + text
            if logprobs is not None:
                rest = self._generation.prompt_logprobs.get(number, ())
                told = logprobs.of_prompt(prompt.ids[0], rest)
        if logprobs is not None:
            told = _joined(told, logprobs.of(tokens))
        return text, told


def _joined(
    first: dict[str, list[Any]] | None, second: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    if first is None:
        return second
    return {key: first[key] + second[key] for key in second}


def _choice(
    index: int, text: str, logprobs: dict[str, list[Any]] | None, end: Piece | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if end is None else end.finish,
        "stop_reason": None if end is None else end.stop_reason,
    }
