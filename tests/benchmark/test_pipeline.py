"""The benchmark of pipeline schedules: what it gives to the simulator, and what it reports."""

import pytest

from megabit.benchmark import pipeline
from megabit.benchmark.pipeline import measured_costs, with_schedule
from megabit.config import SCHEDULE_CHUNKS, Config, load_config
from megabit.errors import UserError
from megabit.pipeline.actions import Backward
from megabit.pipeline.catalog import make_schedule
from megabit.pipeline.simulate import Costs, simulate

TINY = (
    *("model.hidden_size=32", "model.intermediate_size=48", "model.vocab_size=64"),
    *("model.num_hidden_layers=4", "data.seq_length=16", "parallel.pp=2"),
    *("train.global_batch_size=8", "train.micro_batch_size=2"),
)


def config(*settings: str) -> Config:
    return load_config([*TINY, *settings])


@pytest.mark.parametrize(("name", "chunks"), SCHEDULE_CHUNKS.items())
def test_costs_are_found_again_in_a_timeline(name: str, chunks: int) -> None:
    """Of stages that take differently long; a fused backward counts as input gradient."""
    schedule = make_schedule(name, 2, 6, chunks)
    stages = range(2 * chunks)
    costs = Costs(
        [1.0 + stage for stage in stages], [2.0 + stage for stage in stages], [0.5 for _ in stages]
    )
    timeline = simulate(schedule, costs)
    found = measured_costs(timeline, schedule)
    is_fused = any(isinstance(compute, Backward) for compute in schedule.computes(0))
    moved = 0.5 if is_fused else 0.0
    assert found.forward == pytest.approx(costs.forward)
    assert found.input_gradient == pytest.approx([b + moved for b in costs.input_gradient])
    assert found.weight_gradient == pytest.approx([w - moved for w in costs.weight_gradient])
    assert simulate(schedule, found).duration == pytest.approx(timeline.duration)


def test_a_schedule_brings_the_stages_that_it_needs() -> None:
    configured = config("parallel.layers_per_stage=[3,1]")
    assert with_schedule(configured, "zb-h1").parallel.layers_per_stage == [3, 1]
    v_shaped = with_schedule(configured, "zb-v").parallel
    assert (v_shaped.chunks, v_shaped.layers_per_stage) == (2, None)
    with pytest.raises(UserError, match=r"parallel\.pp: 6 stages"):
        with_schedule(config("parallel.pp=3"), "zb-v")


def test_a_run() -> None:
    begun: list[str] = []
    result = pipeline.run(config(), ["1f1b", "zb-v"], steps=2, report=begun.append)
    assert begun == ["one process", "1f1b", "zb-v"]
    assert result.one_process_tokens_per_s > 0
    for name, own in result.schedules.items():
        schedule = make_schedule(name, 2, 4, SCHEDULE_CHUNKS[name])
        assert len(own.layers_per_stage) == 2 * SCHEDULE_CHUNKS[name]
        assert sum(own.layers_per_stage) == 4
        assert own.simulated_s > 0
        assert own.bubble > 0
        assert len(own.seconds) == 2
        assert result.tokens_per_s(name) > 0
        assert own.even_bubble == simulate(schedule).bubble
