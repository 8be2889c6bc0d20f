"""Pipelines on shared cores, and long steps from short ones, against what must come out."""

from functools import partial

import pytest

from megabit.pipeline.catalog import make_schedule
from megabit.pipeline.simulate import Costs, simulate
from megabit.plan.timeline import Cores, simulate_on, stretched

NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min"]


def costs_of(schedule, message=0.0) -> Costs:
    stages = schedule.placement.num_stages
    return Costs(
        [1.0 + 0.1 * stage for stage in range(stages)],
        [1.5 + 0.05 * stage for stage in range(stages)],
        [0.75] * stages,
        message,
    )


def made(name: str, microbatches: int, ranks: int = 4):
    return make_schedule(name, ranks, microbatches, 2 if name == "interleaved" else chunks(name))


def chunks(name: str) -> int:
    return 2 if name in ("zb-v", "v-half", "v-min") else 1


@pytest.mark.parametrize("name", NAMES)
def test_cores_for_everybody_are_no_limit(name: str) -> None:
    """Played event by event with a core for each process, a step is what ``simulate`` says."""
    schedule = made(name, 8)
    costs = costs_of(schedule, message=0.25)
    alone = simulate(schedule, costs)
    # One core too few, which four busy ranks would notice, but as many as can ever be busy.
    crowded = simulate_on(schedule, costs, Cores(4, 1))
    assert crowded.ranks == alone.ranks
    barely = simulate_on(schedule, costs, Cores(count=399_999_999, processes=100_000_000))
    assert barely.duration == pytest.approx(alone.duration, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("processes", [1, 3])
def test_one_core_does_all_work_in_turn(name: str, processes: int) -> None:
    """Nothing but the sum of all work counts where somebody can always go on."""
    schedule = made(name, 8)
    costs = costs_of(schedule)
    work = simulate(schedule, costs).busy * processes
    assert simulate_on(schedule, costs, Cores(1, processes)).duration == pytest.approx(work)


@pytest.mark.parametrize("name", NAMES)
def test_two_cores_lie_between(name: str) -> None:
    schedule = made(name, 8)
    costs = costs_of(schedule, message=0.1)
    alone = simulate(schedule, costs)
    shared = simulate_on(schedule, costs, Cores(2, 1))
    assert shared.duration >= max(alone.duration, alone.busy / 2) - 1e-9
    assert shared.duration <= alone.duration + alone.busy / 2
    assert [len(spans) for spans in shared.ranks] == [len(spans) for spans in alone.ranks]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpipe"])
@pytest.mark.parametrize("microbatches", [3, 40, 41, 63])
def test_a_long_step_continues_short_ones(name: str, microbatches: int) -> None:
    make = partial(made, name)
    costs = costs_of(make(1), message=0.25)
    whole = simulate(make(microbatches), costs)
    predicted = stretched(make, microbatches, costs, None)
    # Its middle repeats itself to within what one microbatch takes on the busiest rank.
    busiest = max(sum(span.duration for span in spans) for spans in whole.ranks) / microbatches
    assert abs(predicted.duration - whole.duration) <= 0.5 * busiest
