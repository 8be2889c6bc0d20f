"""``POST /v1/chat/completions``: the next message of a dialogue."""

from collections.abc import AsyncGenerator
from typing import Any

from megabit.serving.answers import Piece
from megabit.serving.api_error import ApiError
from megabit.serving.completions import sampling_of
from megabit.serving.generation import Generation, Wanted
from megabit.serving.openai_types import ChatRequest
from megabit.serving.service import Service
from megabit.serving.token_logprobs import chat_logprobs


def wanted_of(service: Service, request: ChatRequest) -> Wanted:
    """Raises ApiError: nothing is asked for."""
    if request.longest_answer == 0:
        raise ApiError(400, "max_tokens is 0, so there is nothing to answer.", param="max_tokens")
    service.text.check_ids(request.stop_token_ids or (), "stop_token_ids")
    messages = [
        {"role": "system" if m.role == "developer" else m.role, "content": m.text}
        for m in request.messages
    ]
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return Wanted(
        (),
        sampling_of(request, logprobs, None),
        request.longest_answer,
        None,
        messages=messages,
        first_token_s=request.first_token_timeout,
    )


class ChatWriter:
    """Puts a generation that has been started into the API's form."""

    def __init__(self, service: Service, request: ChatRequest, generation: Generation) -> None:
        self._service = service
        self._request = request
        self._generation = generation
        self._answers = request.n or 1

    async def whole(self) -> dict[str, Any]:
        """The answer in one. Raises ApiError: it cannot be completed."""
        texts = [""] * self._answers
        logprobs: list[list[dict[str, Any]]] = [[] for _ in texts]
        ends: list[Piece | None] = [None] * self._answers
        async for piece in self._generation.pieces():
            texts[piece.choice] += piece.text
            logprobs[piece.choice] += chat_logprobs(self._service.text, piece.logprobs)
            if piece.finish is not None:
                ends[piece.choice] = piece
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": self._told(logprobs[index]),
                **_end(ends[index]),
            }
            for index, text in enumerate(texts)
        ]
        head = self._head("chat.completion")
        return {**head, "choices": choices, "usage": self._generation.usage}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer piece by piece; the first one of each names the role."""
        for index in range(self._answers):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)
        async for piece in self._generation.pieces():
            if piece.text or piece.finish is not None:
                delta = {"content": piece.text} if piece.text else {}
                told = self._told(chat_logprobs(self._service.text, piece.logprobs))
                end = piece if piece.finish is not None else None
                yield self._chunk(piece.choice, delta, told, end)
        if self._request.includes_usage:
            head = self._head("chat.completion.chunk")
            yield {**head, "choices": [], "usage": self._generation.usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "object": kind,
            "created": self._generation.created,
            "model": self._service.model_name,
        }

    def _chunk(
        self, index: int, delta: dict[str, str], logprobs: Any, end: Piece | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **_end(end)}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _told(self, logprobs: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": logprobs, "refusal": None} if self._request.logprobs else None


def _end(piece: Piece | None) -> dict[str, Any]:
    return {
        "finish_reason": None if piece is None else piece.finish,
        "stop_reason": None if piece is None else piece.stop_reason,
    }
