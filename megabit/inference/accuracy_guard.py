"""Whether rounded sums over TP still give the model's loss on a text that was held out.

One rank decides, by the engine's own answers: now and then it gives the engine the text as ordinary
requests for the log probabilities of a prompt, once with exact sums, then with rounded ones. What
to do with ``verdict`` is the engine's business: all ranks must hear of it before the same step.

The engine must compute the windows without the prefix cache, as blocks that were computed with
rounded sums would spoil the exact loss, and the other way round; and, for the exact loss, send all
sums exactly in the steps that have tokens of them.
"""

import math
from collections.abc import Iterable, Sequence

from megabit.inference.messages import AddRequest, PromptLogprobs, SamplingParams, Tokens

PREFIX = "accuracy-guard/"
"""Of the ids of its requests."""


class AccuracyGuard:
    """Measures the loss of ``windows`` in turns: exact once, then with rounded sums every
    ``interval_s``, until the loss has risen by more than ``limit``, a share of the exact one.

    A turn: ``due`` → ``begin`` → ``receive`` of all answers. Times are those of any one clock.
    """

    def __init__(self, windows: Sequence[Sequence[int]], interval_s: float, limit: float) -> None:
        """``windows``: of two tokens or more, and short enough to be prompts."""
        assert min(map(len, windows), default=0) > 1, "the text was not cut by cut_windows"
        self.windows = tuple(tuple(window) for window in windows)
        self.interval_s = interval_s
        self.limit = limit
        self.exact_loss: float | None = None
        """Mean loss of a token, in nats; None before it is known."""
        self.loss: float | None = None
        """The same, as the sums at present have it: of the last turn with rounded sums."""
        self._turn = 0
        self._began: float | None = None
        self._missing: set[str] = set()
        self._answers: dict[str, PromptLogprobs] = {}

    @property
    def verdict(self) -> bool | None:
        """Whether sums may be rounded; None as long as nothing is known. False is for good: what
        is not used any more cannot be measured."""
        if self.exact_loss is None or self.loss is None:
            return None
        within = self.loss <= self.exact_loss * (1 + self.limit)  # not with NaN
        return within and math.isfinite(self.loss)

    @property
    def is_lossy_turn(self) -> bool:
        """Whether the turn that is under way, or else the next one, is with rounded sums."""
        return self.exact_loss is not None

    @property
    def is_under_way(self) -> bool:
        return bool(self._missing)

    def due(self, now: float) -> bool:
        """Whether a turn is to begin: at once the first one, and the one after the exact one."""
        if self.is_under_way or self.verdict is False:
            return False
        return self._began is None or now - self._began >= self.interval_s

    def begin(self, now: float) -> list[AddRequest]:
        """Begin a turn: the requests that the engine must answer."""
        self._began = now
        self._turn += 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        requests = [
            AddRequest(f"{PREFIX}{self._turn}/{number}", window, sampling)
            for number, window in enumerate(self.windows)
        ]
        self._missing = {request.id for request in requests}
        self._answers = {}
        return requests

    @staticmethod
    def owns(request_id: str) -> bool:
        """Whether the answer to this request is for a guard, and not for a client."""
        return request_id.startswith(PREFIX)

    def receive(self, answer: PromptLogprobs | Tokens) -> bool:
        """Take in an answer to one of its requests; whether it was the last one of the turn.

        A request that failed ends the turn without a result; it is due again after
        ``interval_s``.
        """
        if answer.id not in self._missing:
            return False
        if isinstance(answer, Tokens):
            if answer.finish in ("error", "abort"):
                self._missing = set()
            return False
        self._missing.remove(answer.id)
        self._answers[answer.id] = answer
        if self._missing:
            return False
        self.take(held_out_loss(self._answers.values()), self.is_lossy_turn)
        return True

    def take(self, loss: float, lossy: bool) -> None:
        """Note the loss of a turn."""
        if lossy:
            self.loss = loss
        else:
            self.exact_loss, self._began = loss, None


def held_out_loss(answers: Iterable[PromptLogprobs]) -> float:
    """Mean loss of a token, in nats, over all windows; infinity if one is not finite. The order of
    answers does not matter."""
    losses = [-token.logprob for answer in answers for token in answer.logprobs]
    if not losses or not all(map(math.isfinite, losses)):
        return math.inf
    return math.fsum(losses) / len(losses)


def cut_windows(tokens: Sequence[int], length: int, most: int) -> list[tuple[int, ...]]:
    """``tokens`` of a text → up to ``most`` windows of ``length`` tokens, from its beginning; the
    last may be shorter. None of fewer than two tokens, as the first has no loss."""
    starts = range(0, len(tokens), length)[:most]
    windows = [tuple(tokens[start : start + length]) for start in starts]
    return [window for window in windows if len(window) > 1]
