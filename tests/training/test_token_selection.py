"""Which target tokens count: against a sort in plain Python."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megabit.training.token_selection import num_selected, select_tokens


def by_python(scores: Tensor, mask: Tensor, ratio: float) -> Tensor:
    selected = torch.zeros_like(mask)
    for sample, (row, kept) in enumerate(zip(scores.tolist(), mask.tolist(), strict=True)):
        targets = [i for i, is_target in enumerate(kept) if is_target]
        targets.sort(key=lambda i: (-row[i], i))
        count = math.ceil(Fraction(str(ratio)) * len(targets))
        selected[sample, targets[:count]] = True
    return selected


@given(
    batch=st.integers(1, 4),
    length=st.integers(1, 40),
    percent=st.integers(1, 100),
    seed=st.integers(0, 1000),
)
def test_the_highest_scores_of_each_sample(
    batch: int, length: int, percent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, (batch, length), generator=generator).float()  # many are equal
    scores[scores == -3] = -math.inf
    share = torch.rand((batch, 1), generator=generator)
    mask = torch.rand((batch, length), generator=generator) < share
    selected = select_tokens(scores, mask, percent / 100)
    assert torch.equal(selected, by_python(scores, mask, percent / 100))
    assert torch.equal(selected.sum(-1), num_selected(mask, percent / 100))


def test_by_hand() -> None:
    scores = torch.tensor([[1.0, 9.0, 3.0, 3.0, 3.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    mask = torch.tensor([[True, False, True, True, True], [False] * 5])
    expected = torch.tensor([[False, False, True, True, False], [False] * 5])
    assert torch.equal(select_tokens(scores, mask, 0.5), expected)
    assert num_selected(mask, 0.5).tolist() == [2, 0]


@pytest.mark.parametrize(
    ("targets", "ratio", "count"),
    [(30, 0.1, 3), (10, 0.7, 7), (3, 0.5, 2), (1, 0.01, 1), (7, 1.0, 7), (0, 0.5, 0)],
)
def test_a_share_is_rounded_up_and_nothing_else(targets: int, ratio: float, count: int) -> None:
    """``0.1 * 30`` is more than 3 in binary."""
    mask = torch.arange(40) < targets
    assert num_selected(mask, ratio) == count


def test_samples_are_judged_by_themselves() -> None:
    """Microbatches of any size select the same."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((8, 16), generator=generator)
    mask = torch.rand((8, 16), generator=generator) < 0.7
    whole = select_tokens(scores, mask, 0.3)
    parts = [select_tokens(s, m, 0.3) for s, m in zip(scores.split(2), mask.split(2), strict=True)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_score_that_is_not_a_number_is_selected() -> None:
    """So that the step's loss is none either, and the step is skipped."""
    scores = torch.tensor([[1.0, 2.0, math.nan, 4.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert select_tokens(scores, mask, 0.25).tolist() == [[False, False, True, False]]
