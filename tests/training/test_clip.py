"""What gradients are scaled by."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabit.training.clip import gradient_factor


def in_circulation(norm: float, threshold: float) -> float:
    return min(2.0, 1 + (1 - norm / threshold))


@pytest.mark.parametrize(
    ("norm", "limit", "boost", "factor"),
    [
        (0.5, 1.0, 1.0, 1.0),
        (1.0, 1.0, 1.0, 1.0),
        (4.0, 1.0, 1.0, 0.25),
        (4.0, 0.5, 2.0, 0.125),
        (0.8, 1.0, 2.0, 1.25),
        (0.1, 1.0, 2.0, 2.0),
        (0.0, 1.0, 2.0, 1.0),
        (5e-324, 1.0, 1.0, 1.0),
        (7.0, 0.0, 1.0, 1.0),
        (7.0, 0.0, 2.0, 1.0),
    ],
)
def test_by_hand(norm: float, limit: float, boost: float, factor: float) -> None:
    assert gradient_factor(norm, limit, boost) == factor


@given(
    norm=st.floats(1e-300, 1e300),
    limit=st.floats(1e-3, 1e3),
    boost=st.floats(1.0, 4.0),
)
def test_it_never_climbs_and_never_exceeds_the_limit(
    norm: float, limit: float, boost: float
) -> None:
    factor = gradient_factor(norm, limit, boost)
    assert 0 <= factor <= boost
    assert factor > 0 or norm > 1e290 * limit  # what is left is smaller than any number
    assert factor * norm <= limit * (1 + 1e-12)


def test_the_formula_in_circulation_is_its_tangent() -> None:
    """Equal in value and slope where no scaling is needed, 0 at twice the threshold, and below 0
    beyond."""
    near = 1e-4
    for threshold in (0.5, 1.0, 3.0):
        for norm in (threshold * (1 - near), threshold, threshold * (1 + near)):
            difference = gradient_factor(norm, threshold, 2.0) - in_circulation(norm, threshold)
            assert 0 <= difference <= 1.01 * near**2  # the next term of the Taylor series
        assert math.isclose(in_circulation(2 * threshold, threshold), 0, abs_tol=1e-12)
        assert in_circulation(10 * threshold, threshold) < 0
        assert gradient_factor(10 * threshold, threshold, 2.0) == pytest.approx(0.1)
