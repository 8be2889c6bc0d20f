"""Pipeline schedules on this machine: how fast they train, and whether the simulator is right.

The same configuration runs with each schedule in turn, and once in one process, which speed is a
ratio to. In each step the ranks' timelines are put together; what stages took in it, as means of
the microbatches, is given to the simulator, which should find the same bubble.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from time import perf_counter

import torch

from megabit.benchmark.measure import WARMUP, random_batch
from megabit.benchmark.run import TIMEOUT_S
from megabit.config import Config, ParallelConfig, find_problems
from megabit.errors import UserError
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.pipeline.actions import (
    Backward,
    Compute,
    Forward,
    InputGradient,
    Schedule,
    WeightGradient,
)
from megabit.pipeline.simulate import Costs, peak_activations, simulate
from megabit.pipeline.timeline import Timeline
from megabit.training.step import TrainingState, train_step
from megabit.training.timeline import gather_timeline


@dataclass(frozen=True)
class ScheduleResult:
    """What one schedule did; what is no list is a median over its steps."""

    layers_per_stage: list[int]
    seconds: list[float]
    """Of each whole step."""
    pipeline_s: float
    """Seconds in the schedule, from the first start to the last end."""
    simulated_s: float
    bubble: float
    """As measured: idle time for each unit of computing time."""
    simulated_bubble: float
    even_bubble: float
    """As simulated with equal stages and F = B = W."""
    peak_activations: float
    """The largest of the ranks', in microbatches."""


@dataclass(frozen=True)
class Comparison:
    """Of all schedules, by name."""

    tokens: int
    """Of a step."""
    one_process_s: list[float]
    """Each step of one process with one thread."""
    schedules: dict[str, ScheduleResult]

    @property
    def one_process_tokens_per_s(self) -> float:
        return self.tokens / median(self.one_process_s)

    def tokens_per_s(self, name: str) -> float:
        """Of the median step with that schedule."""
        return self.tokens / median(self.schedules[name].seconds)


def with_schedule(config: Config, name: str) -> Config:
    """``config`` with that schedule, and as many stages on a rank as it has by default.

    Raises:
        UserError: it does not fit.
    """
    parallel = dataclasses.replace(config.parallel, schedule=name, vpp=None)
    if parallel.chunks != config.parallel.chunks:
        parallel = dataclasses.replace(parallel, layers_per_stage=None)
    config = dataclasses.replace(config, parallel=parallel)
    problems = find_problems(config)
    if problems:
        raise UserError(*problems)
    return config


def run(
    config: Config, names: Sequence[str], steps: int, report: Callable[[str], None]
) -> Comparison:
    """Time ``steps`` steps with each schedule, in ranks of this host with one thread each.

    Args:
        report: told the name of what begins.
    """
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, steps=WARMUP + steps)
    )
    ranks = config.parallel.tp * config.parallel.pp
    report("one process")
    alone = ParallelConfig(bucket_mb=config.parallel.bucket_mb, exact=config.parallel.exact)
    time_steps = partial(_time_steps, dataclasses.replace(config, parallel=alone), steps)
    (seconds,) = run_ranks(time_steps, 1, TIMEOUT_S)
    tokens = config.train.global_batch_size * config.data.seq_length
    results = {}
    for name in names:
        report(name)
        run_steps = partial(_measure, with_schedule(config, name), steps)
        results[name] = run_ranks(run_steps, ranks, TIMEOUT_S)[0]
    return Comparison(tokens, seconds, results)


def _time_steps(config: Config, steps: int) -> list[float]:
    state = TrainingState.create(config, ParallelMesh())
    seconds = []
    for step in range(WARMUP + steps):
        batch = random_batch(config, state.mesh, step)
        started = perf_counter()
        train_step(state, batch, step)
        seconds.append(perf_counter() - started)
    return seconds[WARMUP:]


def _measure(config: Config, steps: int) -> ScheduleResult:
    """One rank of the configured layout. Collective."""
    mesh = ParallelMesh.create(config.parallel.tp, config.parallel.pp, torch.device("cpu"))
    state = TrainingState.create(config, mesh)
    schedule = state.plan.schedule
    seconds, timelines = [], []
    for step in range(WARMUP + steps):
        batch = random_batch(config, mesh, step)
        started = perf_counter()
        report = train_step(state, batch, step)
        seconds.append(perf_counter() - started)
        spans = report.pipeline.spans
        timelines.append(gather_timeline(spans, schedule.placement, mesh.pp, mesh.device))
    measured = timelines[WARMUP:]
    simulated = [simulate(schedule, measured_costs(timeline, schedule)) for timeline in measured]
    return ScheduleResult(
        state.plan.layers_per_stage,
        seconds[WARMUP:],
        median(timeline.duration for timeline in measured),
        median(timeline.duration for timeline in simulated),
        median(timeline.bubble for timeline in measured),
        median(timeline.bubble for timeline in simulated),
        simulate(schedule).bubble,
        max(peak_activations(schedule)),
    )


def measured_costs(timeline: Timeline, schedule: Schedule) -> Costs:
    """What each stage took for a microbatch in one step: means over the microbatches.

    A fused backward counts as input gradient.
    """
    seconds: defaultdict[tuple[int, type[Compute]], list[float]] = defaultdict(list)
    for rank, spans in enumerate(timeline.ranks):
        for span in spans:
            stage = schedule.placement.stage(rank, span.compute.chunk)
            seconds[stage, type(span.compute)].append(span.duration)
    stages = range(schedule.placement.num_stages)

    def cost(*kinds: type[Compute]) -> list[float]:
        return [
            sum(fmean(seconds[stage, kind]) for kind in kinds if seconds[stage, kind])
            for stage in stages
        ]

    return Costs(cost(Forward), cost(InputGradient, Backward), cost(WeightGradient))
