"""What a log line says of a few steps, against what was seen while they ran."""

import math
from typing import Any

import numpy as np
import pytest

from megabit.data.corpus import SplitInfo
from megabit.launch import run_ranks
from megabit.pipeline.actions import Backward, Forward
from megabit.pipeline.execute import PipelineResult
from megabit.pipeline.timeline import Span
from megabit.telemetry import IntervalMetrics
from megabit.tensor_parallel import TERNARY, ternary_layers
from megabit.training.interval import Interval
from megabit.training.parity import sample_source, uneven_batch
from megabit.training.step import StepReport, TrainingState, train_step
from tests.training.tiny import make_mesh, poisoned, tiny

SPLIT = SplitInfo(documents=1, tokens=100, bytes=300)


def report_of(pipeline: PipelineResult, **changes: Any) -> StepReport:
    """Of a step that has run so."""
    values: dict[str, Any] = {
        "loss": 1.0,
        "objective": 1.0,
        "num_tokens": 10,
        "batch_size": 8,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "quantization": TERNARY,
        "next_share": 1.0,
        "loss_scale": 1.0,
        "is_updated": True,
    }
    return StepReport(pipeline=pipeline, **{**values, **changes})


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [((), 1), (("parallel.tp=2",), 2), (("parallel.pp=2",), 4)],
    ids=["one", "tp2", "pp2-dp2"],
)
def test_metrics_of_two_steps(settings: tuple[str, ...], world_size: int) -> None:
    config = tiny(*settings)
    samples = sample_source(config)

    def run() -> tuple[
        IntervalMetrics, list[float], list[float], tuple[int, int], dict[str, float]
    ]:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        interval = Interval(state)
        losses, norms = [], []
        before = mesh.sent_bytes()
        for step in range(2):
            batch = uneven_batch(config, mesh, step, samples)
            interval.begin_step()
            report = train_step(state, batch, step)
            interval.end_step(report)
            losses.append(report.loss * report.num_tokens)
            losses.append(-report.num_tokens)
            norms.append(report.grad_norm)
        sent = {axis: total - before[axis] for axis, total in mesh.sent_bytes().items()}
        mesh.tp.sent["activations"] += 10**9  # an evaluation between the steps and the line
        codes = [
            layer.weight.shard.owned(layer.ternary().codes())
            for layer in ternary_layers(state.stages)
        ]
        own = sum(int((code == 0).sum()) for code in codes), sum(code.numel() for code in codes)
        return interval.metrics(2, SPLIT), losses, norms, own, sent

    results = run_ranks(run, world_size)
    metrics, losses, norms, _, _ = results[0]
    assert all(result[0].loss == metrics.loss for result in results)
    assert metrics.loss == pytest.approx(sum(losses[::2]) / -sum(losses[1::2]), rel=1e-12)
    assert metrics.bits_per_byte == pytest.approx(metrics.loss / np.log(2) / 3, rel=1e-12)
    assert metrics.grad_norm == pytest.approx(sum(norms) / 2, rel=1e-12)
    # DP ranks hold the same codes, so the share is that of all ranks' codes.
    zeros, total = (sum(result[3][i] for result in results) for i in (0, 1))
    assert metrics.zero_fraction == pytest.approx(zeros / total, rel=1e-12)
    for axis in ("tp", "pp", "dp"):
        expected = sum(result[4][axis] for result in results) / 2 / 1e6
        assert metrics.sent_mb[axis] == pytest.approx(expected, rel=1e-12)
    assert metrics.tokens_per_s > 0
    assert (metrics.bubble > 0) if config.parallel.pp > 1 else metrics.bubble == 0


@pytest.mark.parametrize(("pp", "bubble"), [(2, 2 * (5 + 4) / (3 + 2 + 2 + 1) - 1), (1, 0)])
def test_the_bubble_is_idle_time_for_each_unit_of_computing(pp: int, bubble: float) -> None:
    """As long as the slowest rank runs the schedule, also of those that have ended. Two ranks
    compute 3 and 2 seconds of a step of 4 and 5, and 2 and 1 of one of 3 and 4."""
    config = tiny(f"parallel.pp={pp}")

    def run() -> float:
        state = TrainingState.create(config, make_mesh(config))
        rank = state.mesh.world.rank
        interval = Interval(state)
        for busy_s, seconds in ((3 - rank, 4 + rank), (2 - rank, 3 + rank)):
            # In two parts.
            spans = [Span(Forward(0), 0, busy_s / 4), Span(Backward(0), 1, 1 + busy_s * 3 / 4)]
            pipeline = PipelineResult([], spans, seconds)
            assert pipeline.wait_s == pytest.approx(seconds - busy_s)
            interval.begin_step()
            interval.end_step(report_of(pipeline))
        return interval.metrics(2, SPLIT).bubble

    assert run_ranks(run, 2) == [pytest.approx(bubble)] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_skipped_steps_are_counted_and_left_out_of_the_means(bad: float) -> None:
    """Of three steps the second; and of one step that one."""
    config = tiny()
    samples = sample_source(config)

    def run() -> tuple[IntervalMetrics, IntervalMetrics, list[StepReport]]:
        state = TrainingState.create(config, make_mesh(config))
        interval, reports = Interval(state), []
        before = state.mesh.sent()
        for step in range(3):
            interval.begin_step()
            batch = uneven_batch(config, state.mesh, step, samples)
            if step == 1 and state.mesh.world.rank == 1:
                with poisoned(state, "model.embed_tokens.weight", bad):
                    reports.append(train_step(state, batch, step))
            else:
                reports.append(train_step(state, batch, step))
            interval.end_step(reports[-1])
        sent = {key: count - before.get(key, 0) for key, count in state.mesh.sent().items()}
        metrics = interval.metrics(3, SPLIT)
        # Both ranks send the same here.
        assert metrics.sent_by_purpose_mb == pytest.approx(
            {" ".join(key): 2 * count / 3 / 1e6 for key, count in sent.items() if count}, rel=1e-12
        )
        only = Interval(state)
        only.end_step(reports[1])
        return metrics, only.metrics(3, SPLIT), reports

    for metrics, only, reports in run_ranks(run, 2):
        assert [report.is_skipped for report in reports] == [False, True, False]
        updates = reports[::2]
        tokens = sum(report.num_tokens for report in updates)
        loss = sum(report.loss * report.num_tokens for report in updates) / tokens
        assert metrics.skipped == 1
        assert metrics.loss == pytest.approx(loss, rel=1e-12)
        assert metrics.grad_norm == pytest.approx(sum(r.grad_norm for r in updates) / 2, rel=1e-12)
        assert {"dp weights", "dp weight gradients", "world scales"} <= {
            *metrics.sent_by_purpose_mb
        }
        assert only.skipped == 1
        assert all(map(math.isnan, (only.loss, only.grad_norm, only.bits_per_byte)))
        assert only.tokens_per_s > 0
