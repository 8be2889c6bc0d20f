"""Which samples a step takes, as sums and by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabit.config import load_config
from megabit.data.step_plan import SampleWindows, StepPlan


def plan_of(*settings: str) -> StepPlan:
    return StepPlan.of(load_config(list(settings)))


def test_without_a_ramp_all_steps_are_alike() -> None:
    plan = plan_of("train.steps=7", "train.global_batch_size=16", "data.seq_length=32")
    assert [plan.batch_size(step) for step in range(7)] == [16] * 7
    assert [plan.samples_before(step) for step in range(4)] == [0, 16, 32, 48]
    assert plan.total_tokens == 7 * 16 * 32


def test_the_ramp_is_cut_into_equal_parts_by_tokens() -> None:
    plan = plan_of(
        "train.global_batch_size=32",
        "train.batch_ramp_start=8",
        "train.batch_ramp_increment=8",
        "train.batch_ramp_tokens=1440",
        "data.seq_length=10",
        "train.steps=30",
    )
    # Thirds of 480 tokens: six steps of 80, three of 160, two of 240.
    assert plan.ramp == (8,) * 6 + (16,) * 3 + (24,) * 2
    assert plan.batch_size(11) == 32
    assert plan.tokens_before(11) == 1440
    assert plan.total_tokens == 1440 + 19 * 320
    assert plan.batch_sizes == (8, 16, 24, 32)


@given(st.lists(st.integers(1, 9), max_size=6).map(sorted), st.integers(1, 12), st.integers(0, 400))
def test_steps_for_is_the_least_number_that_consumes_so_many(
    ramp: list[int], size: int, tokens: int
) -> None:
    plan = StepPlan(tuple(ramp), size, 5, steps=0)
    steps = plan.steps_for(tokens)
    assert plan.tokens_before(steps) >= tokens
    assert steps == 0 or plan.tokens_before(steps - 1) < tokens


def test_a_run_may_be_given_in_tokens() -> None:
    plan = plan_of("train.tokens=100000", "train.global_batch_size=16", "data.seq_length=32")
    assert plan.steps == 196  # 195.3 steps of 512 tokens


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=5))
def test_positions_skip_what_is_left_out(windows: list[tuple[int, int]]) -> None:
    pairs = [edge for start, length in windows for edge in (start, start + length)]
    left_out = SampleWindows.of(pairs)
    gone = {n for start, length in windows for n in range(start, start + length)}
    kept = [n for n in range(200) if n not in gone]
    assert [left_out.sample(position) for position in range(100)] == kept[:100]


def test_windows_that_touch_become_one() -> None:
    left_out = SampleWindows.of([10, 20]).adding([(20, 30), (5, 12)])
    assert left_out.windows == ((5, 30),)


@pytest.mark.parametrize("position", [0, 3])
def test_nothing_left_out_changes_nothing(position: int) -> None:
    assert SampleWindows().sample(position) == position
