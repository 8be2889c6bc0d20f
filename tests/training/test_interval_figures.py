"""What a log interval says of time, utilization and quantization, at several layouts."""

import math
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from megabit.config import Config
from megabit.launch import run_ranks
from megabit.model.flops import flops_per_token
from megabit.pipeline.execute import PipelineResult
from megabit.telemetry import (
    AXES,
    PHASES,
    GpuMetrics,
    GpuWatch,
    IntervalMetrics,
    LayerMetrics,
)
from megabit.tensor_parallel import ternary_layers
from megabit.training.interval import Interval
from megabit.training.step import TrainingState, train_step
from tests.training.test_interval import SPLIT, report_of
from tests.training.tiny import make_mesh, own_batch, tiny

# The same bits at every layout, so that counts are the same, too.
EXACT = ("parallel.exact=full", "telemetry.per_layer=true")


def interval_of(
    config: Config, steps: int = 2, before_batch: Callable[[int], None] = lambda rank: None
) -> tuple[TrainingState, Interval]:
    """Of real steps, the last one probed."""
    state = TrainingState.create(config, make_mesh(config))
    interval = Interval(state)
    for step in range(steps):
        interval.begin_step()
        before_batch(state.mesh.world.rank)
        batch = own_batch(config, state.mesh, step)
        interval.has_batch()
        interval.end_step(train_step(state, batch, step, is_probed=step == steps - 1))
    return state, interval


def metrics_of(config: Config, world_size: int) -> IntervalMetrics:
    """The same on all ranks."""

    def run() -> dict[str, Any]:
        _, interval = interval_of(config)
        return vars(interval.metrics(2, SPLIT))

    ranks = run_ranks(run, world_size)
    assert all(other == ranks[0] for other in ranks)
    return IntervalMetrics(**ranks[0])


def assert_same(figures: object, others: object) -> None:
    """Of a layer or of all of them."""
    for field in fields(LayerMetrics):
        value, other = getattr(figures, field.name), getattr(others, field.name)
        # Sums of distances and of shares are fp64, in another order.
        assert value == (None if other is None else pytest.approx(other, rel=1e-12)), field.name


@pytest.fixture(scope="module")
def alone() -> IntervalMetrics:
    return metrics_of(tiny(*EXACT), 1)


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        (("parallel.tp=2",), 2),
        (("parallel.tp=2", "parallel.sequence_parallel=true"), 2),
        (("parallel.pp=2",), 4),
        (("optim.zero_stage=0",), 2),
    ],
    ids=["tp2", "sp2", "pp2-dp2", "dp2-replicas"],
)
def test_quantization_is_measured_of_the_whole_model(
    alone: IntervalMetrics, settings: tuple[str, ...], world_size: int
) -> None:
    """Whatever rank has which part of it."""
    here = metrics_of(tiny(*EXACT, *settings), world_size)
    assert here.layers is not None
    assert alone.layers is not None
    assert here.layers.keys() == alone.layers.keys()
    assert len(here.layers) == 2 * 7
    for name, layer in here.layers.items():
        assert_same(layer, alone.layers[name])
    assert_same(here, alone)
    assert here.code_flips
    assert here.consumed_tokens == alone.consumed_tokens == 2 * 8 * 16
    assert here.loss == alone.loss


def test_flips_and_zeros_by_brute_force() -> None:
    config = tiny("telemetry.per_layer=true")
    state, interval = interval_of(config, steps=2)
    layers = {layer.name.removesuffix(".weight"): layer for layer in ternary_layers(state.stages)}
    before = {name: layer.ternary().codes().clone() for name, layer in layers.items()}
    assert interval.steps == 2
    following = Interval(state)
    following.begin_step()
    following.has_batch()
    following.end_step(train_step(state, own_batch(config, state.mesh, 2), 2, is_probed=True))
    metrics = following.metrics(3, SPLIT)
    flips = zeros = codes = 0
    assert metrics.layers is not None
    for name, layer in layers.items():
        now = layer.ternary().codes()
        changed = int((now != before[name]).sum())
        assert metrics.layers[name].code_flips == changed / now.numel()
        assert metrics.layers[name].zero_fraction == int((now == 0).sum()) / now.numel()
        flips, zeros, codes = (
            flips + changed,
            zeros + int((now == 0).sum()),
            codes + now.numel(),
        )
    assert flips > 0
    assert metrics.code_flips == flips / codes
    assert metrics.zero_fraction == zeros / codes


def test_saturation_is_with_the_layer_that_quantizes(alone: IntervalMetrics) -> None:
    """Each token has its largest value there, so at least one of the layer's width."""
    assert alone.layers is not None
    have = {name for name, layer in alone.layers.items() if layer.saturation is not None}
    kinds = {name.rpartition(".")[2] for name in have}
    assert kinds == {"q_proj", "o_proj", "gate_proj", "down_proj"}
    weighted = widths = 0.0
    for name in have:
        width = 48 if name.endswith("down_proj") else 32
        saturation = alone.layers[name].saturation
        assert saturation is not None
        assert 1 / width <= saturation < 0.5
        weighted, widths = weighted + saturation * width, widths + width
    assert alone.saturation == pytest.approx(weighted / widths, rel=1e-12)


def test_nothing_is_probed_without_a_probe() -> None:
    config = tiny()
    state = TrainingState.create(config, make_mesh(config))
    interval = Interval(state)
    interval.begin_step()
    interval.end_step(train_step(state, own_batch(config, state.mesh, 0), 0))
    metrics = interval.metrics(1, SPLIT)
    assert metrics.layers is None
    for field in ("code_flips", "threshold_distance", "saturation", "grad_norm_spread"):
        assert getattr(metrics, field) is None
    assert 0 < metrics.zero_fraction < 1


def test_a_dense_model_has_no_codes() -> None:
    _, interval = interval_of(tiny("model.linear=dense", "telemetry.per_layer=true"))
    metrics = interval.metrics(2, SPLIT)
    assert metrics.zero_fraction == 0
    assert metrics.layers == {}
    assert metrics.code_flips is metrics.saturation is None


def test_the_spread_of_gradients_over_dp() -> None:
    """Of all TP and PP ranks of a DP rank together, before they are added up over DP."""
    config = tiny("parallel.pp=2")

    def run() -> tuple[float | None, float]:
        state = TrainingState.create(config, make_mesh(config))
        interval = Interval(state)
        interval.begin_step()
        report = train_step(state, own_batch(config, state.mesh, 0), 0, is_probed=True)
        interval.end_step(report)
        assert report.probe is not None
        return interval.metrics(1, SPLIT).grad_norm_spread, report.probe.local_square

    ranks = run_ranks(run, 4)  # pp outside, dp inside
    norms = [math.sqrt(ranks[dp][1] + ranks[2 + dp][1]) for dp in range(2)]
    expected = abs(norms[0] - norms[1]) / sum(norms)
    # Masks are uneven: the second half of the samples has most targets.
    assert expected > 0.1
    assert [spread for spread, _ in ranks] == [pytest.approx(expected, rel=1e-12)] * 4


def test_time_by_phase_and_what_is_waited_for() -> None:
    """One rank's data is late, and the other one waits for it."""
    late_s = 0.5

    def run() -> IntervalMetrics:
        config = tiny()
        _, interval = interval_of(
            config, before_batch=lambda rank: time.sleep(late_s if rank == 1 else 0)
        )
        return interval.metrics(2, SPLIT)

    metrics = run_ranks(run, 2)[0]
    assert tuple(metrics.time_s) == PHASES
    assert tuple(metrics.exposed_s) == AXES
    assert sum(metrics.time_s.values()) == pytest.approx(metrics.step_s, rel=1e-9)
    assert all(seconds > 0 for seconds in metrics.time_s.values())
    # A mean over two ranks, one of which had it at once.
    assert late_s / 2 <= metrics.time_s["data"] < metrics.step_s
    waited = metrics.exposed_s["dp"] + metrics.exposed_s["world"]
    # The steps' other waits are of milliseconds; the first ones begin a little apart.
    assert late_s / 2 < waited < metrics.step_s
    assert 0.05 < metrics.exposed_share < 1
    # The larger one of two is between their mean and their sum.
    waited_for_data = metrics.data_share * metrics.step_s
    assert metrics.time_s["data"] < waited_for_data <= 2 * metrics.time_s["data"]
    assert metrics.straggler_rank == 1  # its disk is slow
    assert metrics.straggler_ratio is not None
    assert metrics.straggler_ratio > 1
    assert metrics.exposed_s["tp"] == metrics.exposed_s["pp"] == 0


def test_tokens_flops_and_mfu() -> None:
    config = tiny("telemetry.peak_tflops=0.5")

    def run() -> IntervalMetrics:
        _, interval = interval_of(config)
        return interval.metrics(2, SPLIT)

    metrics = run_ranks(run, 2)[0]
    flops = flops_per_token(config.model, 16).total
    assert metrics.tflops == pytest.approx(flops * metrics.tokens_per_s / 2 / 1e12, rel=1e-12)
    assert metrics.mfu == pytest.approx(metrics.tflops / 0.5, rel=1e-12)
    assert metrics.batch_size == 8
    assert metrics.memory_mib > 50


def test_a_cpu_has_no_mfu_unless_its_peak_is_given(alone: IntervalMetrics) -> None:
    assert alone.mfu is None
    assert alone.tflops > 0


def test_the_norm_varies_over_the_steps_that_changed_weights() -> None:
    config = tiny()
    state = TrainingState.create(config, make_mesh(config))
    interval = Interval(state)
    pipeline = PipelineResult([], [], 1.0)
    for norm, changes in ((2.0, {}), (4.0, {"objective": 3.0}), (90.0, {"is_updated": False})):
        interval.begin_step()
        interval.end_step(report_of(pipeline, grad_norm=norm, **changes))
    metrics = interval.metrics(3, SPLIT)
    assert (metrics.grad_norm, metrics.grad_norm_std, metrics.skipped) == (3.0, 1.0, 1)
    assert metrics.objective == 2.0


class Reading:
    def __init__(self, metrics: GpuMetrics) -> None:
        self.metrics = metrics

    def read(self) -> GpuMetrics:
        return self.metrics


def test_the_worst_gpu_of_all_ranks() -> None:
    config = tiny()
    readings = [GpuMetrics(0.9, 500.0, 60.0, 1.0, 0, 0), GpuMetrics(0.8, 400.0, 70.0, 2.0, 1)]

    def run() -> GpuMetrics:
        state = TrainingState.create(config, make_mesh(config))
        watch = GpuWatch(Reading(readings[state.mesh.world.rank]))
        interval = Interval(state, watch)
        interval.begin_step()
        interval.end_step(report_of(PipelineResult([], [], 1.0)))
        return interval.metrics(1, SPLIT).gpu

    assert run_ranks(run, 2) == [GpuMetrics(0.8, 500.0, 70.0, 2.0, 1, 0)] * 2


def test_metrics_take_two_collectives() -> None:
    """A log line may not cost more with more figures in it."""
    config = tiny("telemetry.per_layer=true")

    def run() -> list[str]:
        _, interval = interval_of(config)
        calls: list[str] = []
        original = torch.distributed.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append("all_reduce")
            return original(*args, **kwargs)

        torch.distributed.all_reduce = counted
        interval.metrics(2, SPLIT)
        return calls

    assert run_ranks(run, 2) == [["all_reduce"] * 2] * 2
