"""When a guard measures, what it asks for, and what it makes of the answers."""

import math

import pytest

from megabit.inference.accuracy_guard import AccuracyGuard, cut_windows, held_out_loss
from megabit.inference.messages import (
    AddRequest,
    PromptLogprobs,
    TokenLogprobs,
    Tokens,
    decode,
    encode,
)

WINDOWS = [[1, 2, 3], [4, 5]]


def new_guard(limit: float = 0.01) -> AccuracyGuard:
    return AccuracyGuard(WINDOWS, interval_s=60, limit=limit)


def answer_to(request: AddRequest, loss: float) -> PromptLogprobs:
    """As an engine gives it: nothing of the first token."""
    return PromptLogprobs(request.id, tuple(TokenLogprobs(t, -loss) for t in request.prompt[1:]))


def measure(guard: AccuracyGuard, now: float, loss: float) -> None:
    assert guard.due(now)
    requests = guard.begin(now)
    done = [guard.receive(answer_to(request, loss)) for request in requests]
    assert done == [False, True]


def measured(exact: float, lossy: float, limit: float = 0.01) -> AccuracyGuard:
    guard = new_guard(limit)
    measure(guard, 0, exact)
    measure(guard, 0, lossy)
    return guard


# The verdict


@pytest.mark.parametrize(
    ("lossy", "expected"),
    [
        (2.0, True),
        (1.5, True),  # better is fine
        (2.019, True),
        (2.021, False),
        (math.inf, False),
        (math.nan, False),
    ],
)
def test_rounded_sums_may_cost_one_percent(lossy: float, expected: bool) -> None:
    assert measured(2.0, lossy).verdict is expected


def test_the_limit_itself_is_allowed() -> None:
    assert measured(2.0, 2.5, limit=0.25).verdict is True
    assert measured(2.0, math.nextafter(2.5, 3), limit=0.25).verdict is False


@pytest.mark.parametrize("exact", [math.nan, math.inf])
def test_a_model_that_is_broken_anyway(exact: float) -> None:
    """Its answers have no finite loss, with exact sums or without."""
    guard = new_guard()
    guard.take(exact, lossy=False)
    assert guard.verdict is None
    for lossy in (math.nan, math.inf):
        guard.take(lossy, lossy=True)
        assert guard.verdict is False


# Turns


def test_exact_once_then_rounded_after_each_interval() -> None:
    guard = new_guard()
    assert guard.verdict is None
    assert not guard.is_lossy_turn
    measure(guard, 100, 2.0)
    assert guard.verdict is None
    assert guard.is_lossy_turn
    measure(guard, 101, 2.01)  # at once
    assert guard.verdict is True
    assert not guard.due(160.9)
    assert guard.is_lossy_turn
    measure(guard, 161, 2.0)
    assert not guard.due(220.9)
    measure(guard, 221, 2.03)
    assert (guard.exact_loss, guard.loss) == (2.0, 2.03)
    assert guard.verdict is False
    assert not guard.due(10**9)  # nothing to measure any more


def test_a_turn_that_is_under_way_is_not_begun_again() -> None:
    guard = new_guard()
    first, second = guard.begin(0)
    assert guard.is_under_way
    assert not guard.due(1000)
    assert not guard.receive(answer_to(second, 1.0))
    assert not guard.due(1000)
    assert guard.exact_loss is None
    assert guard.receive(answer_to(first, 1.0))
    assert not guard.is_under_way
    assert guard.due(0)


@pytest.mark.parametrize("finish", ["error", "abort"])
def test_a_request_that_fails_ends_the_turn_without_a_result(finish: str) -> None:
    guard = new_guard()
    first, second = guard.begin(0)
    guard.receive(Tokens(first.id, 0, (), finish=finish))  # type: ignore[arg-type]
    assert not guard.is_under_way
    assert not guard.due(59)
    assert not guard.receive(answer_to(second, 1.0))  # too late
    assert guard.exact_loss is None
    measure(guard, 60, 2.0)
    assert guard.exact_loss == 2.0


def test_an_answer_of_an_earlier_turn_does_not_count() -> None:
    guard = new_guard()
    old, failed = guard.begin(0)
    guard.receive(Tokens(failed.id, 0, (), finish="error"))
    new = guard.begin(60)
    assert not guard.receive(answer_to(old, 99.0))
    for request in new:
        guard.receive(answer_to(request, 1.0))
    assert guard.exact_loss == 1.0


def test_the_token_that_ends_a_request_changes_nothing() -> None:
    guard = new_guard()
    first, second = guard.begin(0)
    assert not guard.receive(answer_to(first, 1.0))
    assert not guard.receive(Tokens(first.id, 0, (7,), finish="length"))
    assert not guard.receive(Tokens(second.id, 0, (7,), finish="length"))
    assert guard.receive(answer_to(second, 1.0))


# Requests


def test_requests_are_ordinary_ones_with_ids_of_their_own() -> None:
    guard = new_guard()
    requests = guard.begin(0)
    assert [request.prompt for request in requests] == [(1, 2, 3), (4, 5)]
    for request in requests:
        assert (request.sampling.prompt_logprobs, request.sampling.max_tokens) == (0, 1)
        assert guard.owns(request.id)
        assert decode(encode(request)) == request
    assert not guard.owns("cmpl-1")
    for request in requests:
        guard.receive(answer_to(request, 1.0))
    assert not {request.id for request in requests} & {r.id for r in guard.begin(1)}


def test_the_loss_is_a_mean_over_tokens_not_windows() -> None:
    long = PromptLogprobs("a", tuple(TokenLogprobs(0, -1.0) for _ in range(3)))
    short = PromptLogprobs("b", (TokenLogprobs(0, -5.0),))
    assert held_out_loss([long, short]) == held_out_loss([short, long]) == 2.0


@pytest.mark.parametrize("logprob", [-math.inf, math.inf, math.nan])
def test_a_logprob_that_is_not_finite_is_an_infinite_loss(logprob: float) -> None:
    tokens = (TokenLogprobs(0, -1.0), TokenLogprobs(0, logprob), TokenLogprobs(0, -math.inf))
    assert held_out_loss([PromptLogprobs("a", tokens)]) == math.inf


def test_a_text_is_cut_into_windows() -> None:
    tokens = list(range(10))
    assert cut_windows(tokens, 4, 9) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert cut_windows(tokens, 4, 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert cut_windows(tokens, 3, 9) == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]  # one alone has no loss
    assert cut_windows([1], 4, 9) == cut_windows([], 4, 9) == []
