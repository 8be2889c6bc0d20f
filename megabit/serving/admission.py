"""Who may wait. Asked before a prompt is tokenized, so that a full server spends nothing on it."""

import time
from collections import deque
from dataclasses import dataclass

from megabit.config.serving import ServerConfig
from megabit.serving.api_error import ApiError

_CHARS_PER_TOKEN = 4
"""Of text, about; only until the prompt has been tokenized."""

_WINDOW_S = 30.0
_LONGEST_RETRY_S = 60.0


@dataclass(eq=False)
class Place:
    """What one HTTP request takes of the queue until the engine has it."""

    requests: int
    tokens: int


class Admission:
    """Counts what waits: requests that the engine has not got yet, and their prompts' tokens.

    Synchronous, and so without a gap between looking and taking. Whoever comes when nobody waits
    is let in whatever its size: it would not fit later either.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._max_requests = config.max_waiting_requests
        self._max_tokens = config.max_waiting_tokens
        self.requests = 0
        self.tokens = 0
        self._handed_over: deque[float] = deque()

    def enter(self, requests: int, text_chars: int, tokens: int, free: int) -> Place:
        """Take a place for prompts of so much text and so many tokens, together.

        Args:
            free: sequences that the engine would take at once.

        Raises:
            ApiError: 429.
        """
        place = Place(requests, tokens + -(-text_chars // _CHARS_PER_TOKEN))
        self._check(place, free)
        self.requests += place.requests
        self.tokens += place.tokens
        return place

    def measured(self, place: Place, tokens: int, free: int) -> None:
        """The prompts have been tokenized. Raises ApiError: 429, and the place is given back."""
        exact = Place(place.requests, tokens)
        self.leave(place)
        self._check(exact, free)
        place.requests, place.tokens = exact.requests, exact.tokens
        self.requests += place.requests
        self.tokens += place.tokens

    def leave(self, place: Place) -> None:
        """Give back all that is left of it."""
        self.requests -= place.requests
        self.tokens -= place.tokens
        place.requests = place.tokens = 0

    def handed_over(self, place: Place, tokens: int) -> None:
        """One of its prompts is with the engine."""
        self.given_up(place, tokens)
        self._handed_over.append(time.monotonic())
        self._forget_old()

    def given_up(self, place: Place, tokens: int) -> None:
        """One of its prompts waits no longer."""
        place.requests -= 1
        place.tokens -= tokens
        self.requests -= 1
        self.tokens -= tokens

    def retry_after(self) -> float:
        """Seconds in which, as fast as lately, what waits now will be with the engine."""
        self._forget_old()
        if not self._handed_over:
            return 1.0
        rate = len(self._handed_over) / max(1.0, time.monotonic() - self._handed_over[0])
        return min(_LONGEST_RETRY_S, max(1.0, self.requests / rate))

    def _forget_old(self) -> None:
        while self._handed_over and self._handed_over[0] < time.monotonic() - _WINDOW_S:
            self._handed_over.popleft()

    def _check(self, place: Place, free: int) -> None:
        if self.requests == 0 or self.requests + place.requests <= free:
            return
        if self.requests + place.requests > self._max_requests + free:
            raise self._full(f"{self.requests} requests wait already")
        if self.tokens + place.tokens > self._max_tokens:
            raise self._full(f"{self.tokens} prompt tokens wait already")

    def _full(self, why: str) -> ApiError:
        return ApiError(
            429,
            f"The server is full: {why}. Try again later.",
            code="queue_full",
            retry_after=self.retry_after(),
        )
