"""From settings to who computes what: every schedule, a schedule of the user's, wrong ones."""

import dataclasses
import re
from pathlib import Path

import pytest

from megabit.config import SCHEDULE_CHUNKS, Config, find_problems, load_config
from megabit.errors import UserError
from megabit.pipeline.actions import Backward, Exchange, InputGradient
from megabit.pipeline.balance import balance, estimate_part_costs
from megabit.pipeline.catalog import GENERATORS
from megabit.pipeline.placement import Placement
from megabit.pipeline.plan import plan_stages

V_SHAPED = ("zb-v", "v-half", "v-min")
SPLIT = ("zb-h1", *V_SHAPED)
USERS = """
from megabit.pipeline.actions import Backward, Forward, Schedule
from megabit.pipeline.placement import Placement


def mine(ranks, microbatches, chunks):
    placement = Placement.loop(ranks, chunks)
    order = [Forward(i, c) for c in range(chunks) for i in range(microbatches)]
    order += [Backward(i, c) for c in reversed(range(chunks)) for i in range(microbatches)]
    return Schedule(placement, microbatches, [order] * ranks)


def forgetful(ranks, microbatches, chunks):
    schedule = mine(ranks, microbatches, chunks)
    return Schedule(schedule.placement, microbatches, [order[:-1] for order in schedule.ranks])


def stuck(ranks, microbatches, chunks):
    order = [*map(Backward, range(microbatches)), *map(Forward, range(microbatches))]
    return Schedule(Placement.loop(ranks), microbatches, [order] * ranks)


def failing(ranks, microbatches, chunks):
    raise ValueError(f"needs {chunks + 1} chunks")


def small(ranks, microbatches, chunks):
    return mine(ranks, microbatches - 1, chunks)


def nothing(ranks, microbatches, chunks):
    return None


def garbled(ranks, microbatches, chunks):
    return Schedule(Placement.loop(ranks), microbatches, [[Forward("0")]] * ranks)


not_a_function = 3
"""


def config_of(*chosen: str) -> Config:
    config = load_config(["model.num_hidden_layers=12", "train.global_batch_size=24", *chosen])
    assert find_problems(config) == []
    return config


def test_the_schedules_that_the_configuration_knows_are_those_that_are_made() -> None:
    assert [*SCHEDULE_CHUNKS] == [*GENERATORS]
    for name, chunks in SCHEDULE_CHUNKS.items():
        for count in (1, 2, 3):
            if count == chunks or (name == "interleaved" and count > 1):
                GENERATORS[name](2, 3, count)
            elif name != "interleaved":
                with pytest.raises(ValueError, match=f"must have {chunks} stage"):
                    GENERATORS[name](2, 3, count)


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "vpp"),
    [
        *SCHEDULE_CHUNKS.items(),
        *(("interleaved", vpp) for vpp in (3, 4)),
    ],
)
def test_the_plan_of_every_schedule(name: str, vpp: int, pp: int) -> None:
    config = config_of(f"parallel.schedule={name}", f"parallel.pp={pp}", f"parallel.vpp={vpp}")
    plan = plan_stages(config, dp=2)
    if vpp == SCHEDULE_CHUNKS[name]:  # as many as there are if nobody says
        assert plan == plan_stages(config_of(f"parallel.schedule={name}", f"parallel.pp={pp}"), 2)
    placement = plan.schedule.placement
    assert placement == (Placement.v(pp) if name in V_SHAPED else Placement.loop(pp, vpp))
    assert plan.schedule.microbatches == 24 // 4 // 2
    assert plan.layers_per_stage == balance(placement, 12, estimate_part_costs(config))
    # Ranks' own stages are those of the placement, and together all layers of the model.
    layers: list[int] = []
    for rank in range(pp):
        own = plan.of_rank(rank)
        assert own == tuple(plan.layouts[stage] for stage in placement.stages[rank])
        layers += [layer for layout in own for layer in layout.layers]
    assert sorted(layers) == [*range(12)]
    assert plan.of_rank(0)[0].embedding
    assert plan.of_rank(placement.rank_of(pp * vpp - 1))[-1].head
    actions = [action for rank in plan.schedule.ranks for action in rank]
    assert any(isinstance(action, Exchange) for action in actions) == (pp > 1)
    assert any(isinstance(action, InputGradient) for action in actions) == (name in SPLIT)
    assert any(isinstance(action, Backward) for action in actions) == (name not in SPLIT)


@pytest.mark.parametrize(
    ("chosen", "layouts"),
    [
        (("parallel.pp=4",), ([3, 4, 5, 0], [0, 6, 6, 0])),
        (
            ("parallel.pp=2", "parallel.vpp=2", "parallel.schedule=interleaved"),
            ([3, 4, 5, 0], [0, 0, 12, 0], [0, 0, 0, 12]),
        ),
        (
            ("parallel.pp=2", "parallel.vpp=2", "parallel.schedule=zb-v"),
            ([3, 4, 5, 0], [0, 0, 12, 0], [5, 1, 0, 6]),
        ),
    ],
)
def test_an_explicit_layout_is_kept(chosen: tuple[str, ...], layouts: list[list[int]]) -> None:
    """Also one with empty stages, at either end too."""
    for counts in layouts:
        config = config_of(f"parallel.layers_per_stage={counts}", *chosen)
        assert plan_stages(config, dp=1).layers_per_stage == counts


@pytest.mark.parametrize(
    ("chosen", "counts", "rank", "stages"),
    [
        (("parallel.pp=3",), [6, 0, 6], 1, "stage 1"),
        (
            ("parallel.pp=2", "parallel.vpp=2", "parallel.schedule=zb-v"),
            *([12, 0, 0, 0], 1, "stages 1, 2"),
        ),
        (
            ("parallel.pp=3", "parallel.vpp=2", "parallel.schedule=interleaved"),
            *([4, 0, 4, 4, 0, 0], 1, "stages 1, 4"),
        ),
    ],
)
def test_a_rank_that_would_hold_nothing(
    chosen: tuple[str, ...], counts: list[int], rank: int, stages: str
) -> None:
    config = config_of(f"parallel.layers_per_stage={counts}", *chosen)
    assert problems_of(config) == [
        f"parallel.layers_per_stage: {counts} leaves pipeline rank {rank} without any layer "
        f"({stages}); it needs one"
    ]


def test_a_layout_for_another_number_of_stages() -> None:
    """As a program may ask for it, whose settings nobody has checked."""
    config = load_config(["parallel.schedule=zb-v", "parallel.pp=2", "parallel.vpp=2"])
    parallel = dataclasses.replace(config.parallel, layers_per_stage=[2, 2])
    config = dataclasses.replace(config, parallel=parallel)
    assert problems_of(config) == [
        "parallel.layers_per_stage: [2, 2] is for 2 stages, and parallel.schedule=zb-v has 4 "
        "(parallel.pp · parallel.vpp)"
    ]


# Schedules of the user's.


@pytest.fixture
def users(tmp_path: Path) -> Path:
    path = tmp_path / "schedules.py"
    path.write_text(USERS)
    return path


def problems_of(config: Config) -> list[str]:
    with pytest.raises(UserError) as caught:
        plan_stages(config, dp=1)
    for problem in caught.value.problems:
        assert "\n" not in problem
    return [*caught.value.problems]


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_function_of_the_users(users: Path, vpp: int) -> None:
    config = config_of(f"parallel.schedule={users}:mine", "parallel.pp=3", f"parallel.vpp={vpp}")
    plan = plan_stages(config, dp=1)
    assert plan.schedule.placement == Placement.loop(3, vpp)
    assert plan.schedule.microbatches == 6
    assert any(isinstance(action, Exchange) for action in plan.schedule.ranks[0])
    assert sum(plan.layers_per_stage) == 12


def test_a_function_in_a_module(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(users.parent)
    users.rename(users.with_name("schedules_of_mine.py"))
    config = config_of("parallel.schedule=schedules_of_mine:mine", "parallel.pp=2")
    assert plan_stages(config, dp=1).schedule.placement == Placement.loop(2)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("failing", r"called with \(2, 6, 1\), it raises ValueError: needs 2 chunks"),
        ("nothing", "returns NoneType, must return a megabit.pipeline.actions.Schedule"),
        ("small", "was asked for 6 microbatches, returns a schedule of 5"),
        ("missing", ".*schedules.py has no function 'missing'"),
        ("not_a_function", ".*schedules.py has no function 'not_a_function'"),
        ("garbled", "returns what cannot be read: "),
    ],
)
def test_a_function_that_does_not_work(users: Path, function: str, problem: str) -> None:
    name = f"{users}:{function}"
    (found,) = problems_of(config_of(f"parallel.schedule={name}", "parallel.pp=2"))
    assert re.match(f"parallel.schedule: {re.escape(name)}: {problem}", found)


@pytest.mark.parametrize("function", ["forgetful", "stuck"])
def test_a_schedule_that_would_not_end_is_not_run(users: Path, function: str) -> None:
    """What is wrong is told by rank and compute, a line each."""
    name = f"{users}:{function}"
    problems = problems_of(config_of(f"parallel.schedule={name}", "parallel.pp=2"))
    assert 1 <= len(problems) <= 6
    for problem in problems:
        assert problem.startswith(f"parallel.schedule: {name}: ")
    assert any("rank 0" in problem for problem in problems)


def test_what_is_not_there(tmp_path: Path) -> None:
    for name, problem in (
        (f"{tmp_path}/none.py:mine", f"there is no file {tmp_path}/none.py"),
        ("no_such_module_here:mine", "cannot import no_such_module_here"),
    ):
        (found,) = problems_of(config_of(f"parallel.schedule={name}", "parallel.pp=2"))
        assert found.startswith(f"parallel.schedule: {name}: {problem}")
