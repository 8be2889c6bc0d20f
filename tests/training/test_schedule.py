"""The two-stage schedule against what BitNet's authors published, and at its edges."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabit.config import OptimConfig
from megabit.training.schedule import two_stage

# 700 M parameters in the Training Tips: table 2, and the points read off figure 1(c).
PUBLISHED = OptimConfig(
    lr=[1.5e-3, 1e-3], weight_decay=[0.1, 0.0], switch=0.5, warmup_steps=375, min_lr=3e-5
)
STEPS = 100_000


@pytest.mark.parametrize(
    ("step", "lr", "weight_decay"),
    [(49_900, 7.69e-4, 0.1), (50_000, 5.165e-4, 0.0), (STEPS - 1, 3e-5, 0.0)],
)
def test_published_points(step: int, lr: float, weight_decay: float) -> None:
    values = two_stage(PUBLISHED, step, STEPS)
    assert values.lr == pytest.approx(lr, rel=3e-3)  # a point is read off a figure to 0.3 %
    assert values.weight_decay == weight_decay


def test_warm_up_rises_evenly_to_the_first_peak() -> None:
    rates = [two_stage(PUBLISHED, step, STEPS).lr for step in range(376)]
    expected = [1.5e-3 * (step + 1) / 375 for step in range(375)]
    assert rates == pytest.approx([*expected, 1.5e-3], rel=1e-12)  # one rounding or two


def test_weight_decay_changes_with_the_rate_at_the_switch() -> None:
    before, after = (two_stage(PUBLISHED, step, STEPS) for step in (49_999, 50_000))
    assert (before.weight_decay, after.weight_decay) == (0.1, 0.0)
    assert after.lr < 0.7 * before.lr


@pytest.mark.parametrize("switch", [0.0, 1.0])
def test_a_switch_at_an_end_leaves_one_stage(switch: float) -> None:
    """With ``switch=0`` there is only the second stage, with 1 only the first."""
    optim = replace(PUBLISHED, switch=switch)
    used = 1 - int(switch)
    for step in (0, 375, 40_000, 60_000, STEPS - 1):
        other = list(PUBLISHED.lr)
        other[1 - used] = 123.0  # of the stage that never comes
        assert two_stage(replace(optim, lr=other), step, STEPS) == two_stage(optim, step, STEPS)
        assert two_stage(optim, step, STEPS).weight_decay == PUBLISHED.weight_decay[used]


@pytest.mark.parametrize("steps", [1, 374, 375])
def test_a_run_that_ends_within_the_warm_up(steps: int) -> None:
    rates = [two_stage(replace(PUBLISHED, switch=1.0), step, steps).lr for step in range(steps)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(1.5e-3 * steps / 375, rel=1e-12)


@given(
    steps=st.integers(1, 200),
    warmup=st.integers(0, 250),
    switch=st.floats(0, 1),
)
def test_after_the_warm_up_rates_only_fall(steps: int, warmup: int, switch: float) -> None:
    optim = replace(PUBLISHED, warmup_steps=warmup, switch=switch)
    rates = [two_stage(optim, step, steps).lr for step in range(warmup, steps)]
    assert rates == sorted(rates, reverse=True)
    assert all(PUBLISHED.min_lr <= rate <= 1.5e-3 for rate in rates)
