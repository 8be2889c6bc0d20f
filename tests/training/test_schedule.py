"""Schedules against closed forms, against what BitNet's authors published, and at their edges."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabit.config import OptimConfig
from megabit.data.step_plan import StepPlan
from megabit.training.schedule import (
    Hyperparameters,
    hyperparameters,
    quantization_share,
    warmup_tokens,
)

# 700 M parameters in the Training Tips: table 2, and the points read off figure 1(c).
PUBLISHED = OptimConfig(
    lr=[1.5e-3, 1e-3], weight_decay=[0.1, 0.0], switch=0.5, warmup_steps=375, min_lr=3e-5
)
STEPS, BATCH = 100_000, 2**20
TOTAL, WARMUP = STEPS * BATCH, 375 * BATCH

ONE = OptimConfig(lr=[1e-3], weight_decay=[0.1], min_lr=1e-4, decay_fraction=0.2)
KINDS = ("linear", "cosine", "wsd", "constant")
SHAPES = ("linear", "cosine", "sqrt")


def published(step: int, optim: OptimConfig = PUBLISHED) -> Hyperparameters:
    return hyperparameters(optim, step * BATCH, TOTAL, WARMUP, BATCH)


def rate(consumed: int, **changes: Any) -> float:
    """Of a run of 1000 tokens after a warm-up of 200, with a decay from 800 on."""
    return hyperparameters(replace(ONE, **changes), consumed, 1000, 200, 10).lr


# The published curve


@pytest.mark.parametrize(
    ("step", "lr", "weight_decay"),
    [(49_900, 7.69e-4, 0.1), (50_000, 5.165e-4, 0.0), (STEPS - 1, 3e-5, 0.0)],
)
def test_published_points(step: int, lr: float, weight_decay: float) -> None:
    values = published(step)
    assert values.lr == pytest.approx(lr, rel=3e-3)  # a point is read off a figure to 0.3 %
    assert values.weight_decay == weight_decay


def test_two_lines_with_virtual_peaks() -> None:
    for step in (375, 1000, 49_999, 50_000, 80_000, STEPS - 1):
        peak = 1.5e-3 if step < 50_000 else 1e-3
        line = 3e-5 + (peak - 3e-5) * (STEPS - step) / (STEPS - 375)
        assert published(step).lr == pytest.approx(line, rel=1e-12)


def test_warm_up_rises_evenly_to_the_first_peak() -> None:
    rates = [published(step).lr for step in range(376)]
    expected = [1.5e-3 * (step + 1) / 375 for step in range(375)]
    assert rates == pytest.approx([*expected, 1.5e-3], rel=1e-12)  # one rounding or two


def test_weight_decay_changes_with_the_rate_at_the_switch() -> None:
    before, after = published(49_999), published(50_000)
    assert (before.weight_decay, after.weight_decay) == (0.1, 0.0)
    assert after.lr < 0.7 * before.lr


def test_two_cosines_take_weight_decay_with_them() -> None:
    """Half of either cosine is left in the middle of a run, a half of 1/√2 at an eighth."""
    optim = replace(
        PUBLISHED, schedule="two_stage_cosine", weight_decay=[0.1, 0.02], switch=0.5, min_lr=0.0
    )
    quarter = (1 + math.sqrt(0.5)) / 2
    for consumed, lr, weight_decay in (
        (0, 1.5e-3, 0.1),
        (250, 1.5e-3 * quarter, 0.1 * quarter),
        (500, 0.5e-3, 0.01),
        (750, 1e-3 * (1 - quarter), 0.02 * (1 - quarter)),
        (1000, 0.0, 0.0),
    ):
        values = hyperparameters(optim, consumed, 1000, 0, 10)
        assert values.lr == pytest.approx(lr, abs=1e-15)
        assert values.weight_decay == pytest.approx(weight_decay, abs=1e-15)
    warming = hyperparameters(optim, 0, 1000, 100, 10)
    assert warming.lr == pytest.approx(1.5e-4, rel=1e-12)
    assert warming.weight_decay == 0.1


@pytest.mark.parametrize("kind", ["two_stage_linear", "two_stage_cosine"])
@pytest.mark.parametrize("switch", [0.0, 1.0])
def test_a_switch_at_an_end_leaves_one_stage(kind: Any, switch: float) -> None:
    """With ``switch=0`` there is only the second stage, with 1 only the first; a single number is
    that of both."""
    optim = replace(PUBLISHED, schedule=kind, switch=switch)
    used = 1 - int(switch)
    alone = replace(optim, lr=[optim.lr[used]], weight_decay=[optim.weight_decay[used]])
    for step in (0, 375, 40_000, 60_000, STEPS - 1):
        other = list(PUBLISHED.lr)
        other[1 - used] = 123.0  # of the stage that never comes
        assert published(step, replace(optim, lr=other)) == published(step, optim)
        assert published(step, alone) == published(step, optim)


# The others


@pytest.mark.parametrize(
    ("changes", "points"),
    [
        ({"schedule": "linear"}, {200: 1e-3, 400: 7.75e-4, 600: 5.5e-4, 1000: 1e-4}),
        (
            {"schedule": "cosine"},
            {200: 1e-3, 400: 1e-4 + 9e-4 * (2 + math.sqrt(2)) / 4, 600: 5.5e-4, 1000: 1e-4},
        ),
        ({"schedule": "constant"}, {200: 1e-3, 600: 1e-3, 990: 1e-3}),
        ({"schedule": "wsd"}, {200: 1e-3, 800: 1e-3, 850: 7.75e-4, 900: 5.5e-4, 1000: 1e-4}),
        (
            {"schedule": "wsd", "decay_shape": "cosine"},
            {800: 1e-3, 850: 1e-4 + 9e-4 * (2 + math.sqrt(2)) / 4, 900: 5.5e-4, 1000: 1e-4},
        ),
        (
            {"schedule": "wsd", "decay_shape": "sqrt"},
            {800: 1e-3, 850: 5.5e-4, 900: 1e-4 + 9e-4 * (1 - math.sqrt(0.5)), 1000: 1e-4},
        ),
        ({"schedule": "wsd", "decay_fraction": 0.0}, {200: 1e-3, 990: 1e-3}),
        # A decay that is to begin within the warm-up begins at its end.
        ({"schedule": "wsd", "decay_fraction": 1.0}, {200: 1e-3, 600: 5.5e-4, 1000: 1e-4}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if "schedule" in value else "",
)
def test_closed_forms(changes: dict[str, Any], points: dict[int, float]) -> None:
    for consumed, lr in points.items():
        assert rate(consumed, **changes) == pytest.approx(lr, rel=1e-12)
    values = hyperparameters(replace(ONE, **changes), 900, 1000, 200, 10)
    assert values.weight_decay == 0.1


@pytest.mark.parametrize("kind", [*KINDS, "two_stage_linear", "two_stage_cosine"])
def test_every_warm_up_is_the_same(kind: Any) -> None:
    """Continuous at its end: the last step of it has the peak, as the first one after it."""
    rates = [rate(consumed, schedule=kind) for consumed in range(0, 210, 10)]
    assert rates == pytest.approx([*(1e-3 * i / 20 for i in range(1, 21)), 1e-3], rel=1e-12)


def test_a_warm_up_that_ends_within_a_step_stops_at_the_peak() -> None:
    values = hyperparameters(ONE, 90, 1000, 95, 10)
    assert values.lr == 1e-3


@pytest.mark.parametrize("steps", [1, 374, 375])
def test_a_run_that_ends_within_the_warm_up(steps: int) -> None:
    optim = replace(PUBLISHED, switch=1.0)
    rates = [hyperparameters(optim, step * 8, steps * 8, 375 * 8, 8).lr for step in range(steps)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(1.5e-3 * steps / 375, rel=1e-12)


@given(
    steps=st.integers(1, 200),
    batch=st.integers(1, 5000),
    warmup=st.integers(0, 250),
    switch=st.floats(0, 1),
    decay=st.floats(0, 1),
    kind=st.sampled_from([*KINDS, "two_stage_linear", "two_stage_cosine"]),
    shape=st.sampled_from(SHAPES),
)
def test_after_the_warm_up_rates_only_fall(
    steps: int, batch: int, warmup: int, switch: float, decay: float, kind: Any, shape: Any
) -> None:
    optim = replace(
        PUBLISHED, schedule=kind, switch=switch, decay_fraction=decay, decay_shape=shape
    )
    values = [
        hyperparameters(optim, step * batch, steps * batch, warmup * batch, batch)
        for step in range(steps)
    ]
    rates = [value.lr for value in values[warmup:]]
    assert rates == sorted(rates, reverse=True)
    assert all(PUBLISHED.min_lr <= lr <= 1.5e-3 for lr in rates)
    rising = [value.lr for value in values[:warmup]]
    assert all(0 < lr <= 1.5e-3 for lr in rising)
    decays = [value.weight_decay for value in values]
    assert decays == sorted(decays, reverse=True)
    assert all(0 <= decay <= 0.1 for decay in decays)


@given(steps=st.integers(2, 300), switch=st.integers(0, 100), warmup=st.integers(0, 20))
def test_tokens_say_the_same_as_steps(steps: int, switch: int, warmup: int) -> None:
    """Of steps that are all alike, whatever their size: the schedule is one of progress."""
    optim = replace(PUBLISHED, switch=switch / 100)
    for step in (0, steps // 3, steps // 2, steps - 1):
        one, many = (
            hyperparameters(optim, step * n, steps * n, warmup * n, n) for n in (1, 48_384)
        )
        assert one.lr == pytest.approx(many.lr, rel=1e-12)
        assert one.weight_decay == many.weight_decay
        is_second = step >= Fraction(switch, 100) * steps
        assert one.weight_decay == PUBLISHED.weight_decay[is_second]


# Warm-up and λ in tokens


def test_warm_up_in_steps_follows_the_batch_ramp() -> None:
    plan = StepPlan(ramp=(2, 4), global_batch_size=8, seq_length=10, steps=20)
    assert warmup_tokens(replace(ONE, warmup_steps=3), plan) == (2 + 4 + 8) * 10
    assert warmup_tokens(replace(ONE, warmup_steps=0), plan) == 0
    # 1500 tokens in all; a fraction goes before steps.
    assert plan.total_tokens == 1500
    assert warmup_tokens(replace(ONE, warmup_steps=3, warmup_fraction=0.1), plan) == 150
    assert warmup_tokens(replace(ONE, warmup_steps=3, warmup_fraction=0.0), plan) == 0


def test_quantization_fades_in_along_a_line() -> None:
    shares = [quantization_share(0.5, consumed, 100) for consumed in range(0, 101, 10)]
    assert shares == [0.0, 0.2, 0.4, 0.6, 0.8, *[1.0] * 6]
    assert [quantization_share(0.0, consumed, 100) for consumed in (0, 50, 100)] == [1.0] * 3


@given(percent=st.integers(0, 50), total=st.integers(1, 10**13))
def test_it_is_exactly_one_from_the_end_of_the_ramp_on(percent: int, total: int) -> None:
    """Where decimals of binary numbers end a little later: ``0.1 * 30`` is more than 3."""
    end = -(-percent * total // 100)
    ramp = percent / 100
    assert quantization_share(ramp, end, total) == 1.0
    assert quantization_share(ramp, total, total) == 1.0
    if end:
        assert quantization_share(ramp, end - 1, total) < 1.0
        assert quantization_share(ramp, 0, total) == 0.0
