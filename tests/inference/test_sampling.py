"""Draws: their frequencies, their filters, and that a row's is its own in any batch."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megabit.inference.messages import SamplingParams
from megabit.inference.noise import NOISE_BITS, noise_seed
from megabit.inference.sampling import RowSampling, logprobs_of, sample

VOCAB = 1031
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5},
    {"temperature": 1.1, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
)


def row(
    noise: int = 0, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = (), **settings: Any
):
    return RowSampling(SamplingParams(**settings), noise, prompt, answer)


def normal(rows: int, vocab: int = VOCAB, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 3


def tokens(logits: Tensor, *rows: RowSampling, num_ids: int | None = None) -> list[int]:
    found = sample(logits, rows, num_ids)
    assert None not in found
    return [token for token in found if token is not None]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")  # elementwise functions are cut at other places then
@pytest.mark.parametrize("vocab", [VOCAB, 40_003])
def test_a_row_is_drawn_the_same_in_any_batch(vocab: int) -> None:
    logits = normal(20, vocab)
    logits[3] = logits[3].round()  # with equal logits
    rows = [row(noise_seed(7, 0, i), (i, 5), (8, 8, i), **KINDS[i % len(KINDS)]) for i in range(20)]

    def draw(which: list[int]) -> list[int | None]:
        return sample(logits[which], [rows[i] for i in which])

    alone = [draw([i])[0] for i in range(20)]
    assert None not in alone
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(2)).tolist()
    for which in (list(range(20)), shuffled, shuffled[:7], [3, 3, 4, 5]):
        assert draw(which) == [alone[i] for i in which]


def test_greedy_is_the_first_of_the_largest() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 1.0, 0.0, 9.0]])
    greedy = row(temperature=0.0)
    assert tokens(logits, greedy, greedy) == [1, 3]
    assert tokens(logits, greedy, greedy, num_ids=3) == [1, 0]


def frequencies(logits: Tensor, draws: int = 4000, **settings: Any) -> dict[int, float]:
    rows = [row(noise_seed(3, 1, i), **settings) for i in range(draws)]
    counts = Counter(tokens(logits.expand(draws, -1), *rows))
    return {token: count / draws for token, count in sorted(counts.items())}


def expected(logits: Tensor, keep: list[int], temperature: float = 1.0) -> dict[int, float]:
    kept = (logits[keep].double() / temperature).softmax(0).tolist()
    return dict(zip(keep, kept, strict=True))


PROBABILITIES = torch.tensor([0.05, 0.4, 0.25, 0.02, 0.18, 0.1])


@pytest.mark.parametrize(
    ("settings", "keep"),
    [
        pytest.param({"temperature": 1.0}, [0, 1, 2, 3, 4, 5], id="plain"),
        pytest.param({"temperature": 2.0}, [0, 1, 2, 3, 4, 5], id="hot"),
        pytest.param({"top_k": 3}, [1, 2, 4], id="top-k"),
        pytest.param({"top_p": 0.6}, [1, 2], id="top-p"),
        pytest.param({"top_p": 0.66}, [1, 2, 4], id="top-p-more"),
        pytest.param({"min_p": 0.2}, [1, 2, 4, 5], id="min-p"),
        pytest.param({"top_k": 2, "top_p": 0.6}, [1], id="top-p-of-top-k"),
        pytest.param({"top_k": 2, "top_p": 0.62}, [1, 2], id="top-p-of-top-k-more"),
        pytest.param({"min_p": 0.3, "top_p": 0.7}, [1, 2], id="top-p-of-min-p"),
    ],
)
def test_tokens_are_drawn_as_often_as_is_likely(settings: dict[str, Any], keep: list[int]) -> None:
    logits = PROBABILITIES.log() + 3
    found = frequencies(logits, **settings)
    wanted = expected(logits, keep, settings.get("temperature", 1.0))
    assert found.keys() == wanted.keys()
    for token, probability in wanted.items():
        # 4,000 draws: 5 standard deviations.
        assert abs(found[token] - probability) < 5 * math.sqrt(0.25 / 4000), token


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.999999}, {"top_k": 6}])
def test_the_ends_of_the_noise_are_the_ends_of_the_vocabulary(settings: dict[str, Any]) -> None:
    logits = torch.zeros(1, 6)
    last = (1 << NOISE_BITS) - 1
    assert tokens(logits, row(0, **settings)) == [0]
    assert tokens(logits, row(last, **settings)) == [5]


def test_top_p_of_a_flat_distribution_needs_more_than_the_first_look() -> None:
    logits = torch.zeros(1, 5000)
    last = (1 << NOISE_BITS) - 1
    assert tokens(logits, row(last, top_p=0.5)) == [2499]  # equal ones go by id
    assert tokens(logits, row(last, top_k=30)) == [29]


def test_tokens_that_are_no_ids_are_never_drawn() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 6:] = 50
    drawn = {
        token
        for i in range(200)
        for settings in ({}, {"top_k": 7}, {"top_p": 0.9})
        for token in tokens(logits, row(noise_seed(1, 0, i), **settings), num_ids=6)
    }
    assert drawn == set(range(6))


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9999, -math.inf]])
    assert tokens(logits, row(1 << 62, temperature=1e-300)) == [1]
    hot = Counter(
        tokens(
            logits.expand(3000, -1),
            *(row(noise_seed(1, 0, i), temperature=1e30) for i in range(3000)),
        )
    )
    assert set(hot) == {0, 1, 2}
    assert min(hot.values()) > 850  # a third each, within 5 standard deviations


def test_penalties_are_those_of_the_papers() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, 1.9]])

    def after(
        prompt: tuple[int, ...] = (), answer: tuple[int, ...] = (), **settings: Any
    ) -> list[int]:
        """The order of tokens, likeliest first."""
        order = []
        left = logits.clone()
        for _ in range(4):
            token = tokens(left, row(0, prompt, answer, temperature=0.0, **settings))[0]
            order.append(token)
            left[0, token] = -100.0
        return order

    assert after() == [0, 3, 1, 2]
    assert after(prompt=(0,), repetition_penalty=1.2)[0] == 3  # 2 / 1.2 < 1.9
    assert after(answer=(0,), repetition_penalty=1.2)[0] == 3
    assert after(prompt=(0,), presence_penalty=1.0)[0] == 0  # of answers only
    assert after(answer=(0,), presence_penalty=0.3)[0] == 3
    assert after(answer=(0, 0, 3), frequency_penalty=0.2)[0] == 3  # 1.6 < 1.7
    assert after(answer=(0, 0, 3, 3), frequency_penalty=0.2)[0] == 0
    assert after(answer=(99, -1), presence_penalty=1.0) == [0, 3, 1, 2]  # no columns
    negative = torch.tensor([[-1.0, -1.1]])
    assert tokens(negative, row(0, (0,), temperature=0.0, repetition_penalty=1.2)) == [1]


def test_penalties_do_not_change_logits_or_other_rows() -> None:
    logits = normal(2)
    before = logits.clone()
    found = tokens(
        logits,
        row(temperature=0.0),
        row(0, (), (int(logits[1].argmax()),), temperature=0.0, presence_penalty=50.0),
    )
    assert torch.equal(logits, before)
    assert found[0] == int(logits[0].argmax())
    assert found[1] == int(logits[1].topk(2).indices[1])


def test_equal_logprobs_are_in_the_order_of_ids() -> None:
    logprobs = torch.tensor([[0.0, 1.0, 2.0, 1.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    first, second = logprobs_of(logprobs, [0, 4], 3)
    assert first.top == ((2, 2.0), (1, 1.0), (3, 1.0))
    assert second.top == ((0, 5.0), (1, 4.0), (2, 3.0))
    assert (first.token, first.logprob, second.logprob) == (0, 0.0, 1.0)
    assert [len(p.top) for p in logprobs_of(logprobs, [0, 4], 99)] == [5, 5]
    assert logprobs_of(logprobs, [0, 4], 0)[0].top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_fail_their_row_only(bad: float) -> None:
    logits = normal(3)
    logits[1, 17] = bad
    rows = [row(7), row(7, top_k=3), row(7, temperature=0.0)]
    drawn = sample(logits, rows)
    assert drawn[1] is None
    assert drawn[::2] == sample(logits[::2], rows[::2])


def test_noise_differs_by_seed_answer_and_position() -> None:
    noise = [noise_seed(s, i, p) for s in (0, 1, -5, 1 << 70) for i in range(3) for p in range(50)]
    assert len(set(noise)) == len(noise)
    assert all(0 <= n < 1 << NOISE_BITS for n in noise)
    assert noise_seed(1, 2, 3) == noise_seed(1, 2, 3)
