"""Answers under way, and what is new of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megabit.inference.messages import TokenLogprobs
from megabit.inference.text_stream import TextStream
from megabit.serving.engine_client import Job
from megabit.serving.prompts import Prompt

TIMEOUT = "timeout"
"""``stop_reason`` of answers that ``server.request_timeout_s`` has cut."""


@dataclass(frozen=True)
class Piece:
    """What is new of one answer."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish: str | None = None
    """``stop`` or ``length``."""
    stop_reason: str | int | None = None
    """The stop text or token that ended it, or ``TIMEOUT``."""


@dataclass(eq=False)
class Answer:
    stream: TextStream
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of tokens whose text is not shown yet."""
    tokens: int = 0
    last_at: float | None = None
    is_done: bool = False


@dataclass(eq=False)
class Asked:
    """One prompt, and its answers."""

    number: int
    prompt: Prompt
    job: Job
    answers: list[Answer]
    first_at: float | None = None
    cached_tokens: int = 0

    @property
    def answered(self) -> int:
        """Tokens."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def is_done(self) -> bool:
        return all(answer.is_done for answer in self.answers)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """One for each answer."""
    of_answer: dict[int, Piece] = {}
    for piece in pieces:
        before = of_answer.get(piece.choice)
        if before is not None:
            text, logprobs = before.text + piece.text, before.logprobs + piece.logprobs
            piece = replace(piece, text=text, logprobs=logprobs)
        of_answer[piece.choice] = piece
    return list(of_answer.values())
