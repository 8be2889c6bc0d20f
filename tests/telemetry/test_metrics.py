"""What a run writes down: the JSON lines and the console's."""

import io
import json
import math
import resource
from pathlib import Path

import pytest
from rich.console import Console

from megabit.launch import run_ranks
from megabit.telemetry import EvaluationMetrics, GpuMetrics, MetricsLog
from megabit.telemetry.metrics import perplexity, read_metrics
from tests.telemetry.rows import ALERT, LAYER, Score, full_metrics, log, metrics, said

GPU = {
    "gpu_utilization": 0.97,
    "gpu_power_w": 612.5,
    "gpu_temperature_c": 61.0,
    "gpu_memory_mib": 70_000.0,
    "gpu_xid_errors": 1,
    "gpu_ecc_errors": 2,
}


def test_a_json_line_for_each_report(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with log(path) as run:
        run.advance(5)
        run.interval(metrics(5))
        run.interval(full_metrics(10))
        run.evaluation(EvaluationMetrics(10, 3.5, 1.75, {"laws": Score(2.0, 1.0)}))
        run.event(ALERT)
        run.say("for people only")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    first = {
        "step": 5,
        "consumed_tokens": 20480,
        "loss": 2.5,
        "objective": 2.75,
        "bits_per_byte": 1.25,
        "grad_norm": 0.5,
        "grad_norm_std": 0.0625,
        "grad_norm_spread": None,
        "skipped": 0,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "quantization_share": 1.0,
        "batch_size": 16,
        "loss_scale": 1.0,
        "tokens_per_s": 12_345.6,
        "tflops": 0.015,
        "mfu": None,
        "step_s": 0.33,
        "time_s": {
            "data": 0.01,
            "forward_backward": 0.25,
            "gradients": 0.02,
            "update": 0.04,
            "other": 0.01,
        },
        "exposed_s": {"tp": 0.02, "pp": 0.03, "dp": 0.0, "world": 0.001},
        "exposed_share": 0.0625,
        "data_share": 0.03,
        "straggler_ratio": None,
        "straggler_rank": None,
        "sent_mb": {"tp": 1.5, "pp": 0.3, "dp": 0.0},
        "sent_by_purpose_mb": {"tp activations": 1.5, "pp activation gradients": 0.3},
        "bubble": 0.13,
        "memory_mib": 321.5,
        "zero_fraction": 0.25,
        "code_flips": 5e-4,
        "threshold_distance": 0.3,
        "saturation": 0.01,
    }
    layer = {
        "zero_fraction": LAYER.zero_fraction,
        "code_flips": LAYER.code_flips,
        "threshold_distance": LAYER.threshold_distance,
        "saturation": LAYER.saturation,
    }
    changed = {"step": 10, "consumed_tokens": 40960, "mfu": 0.41, "grad_norm_spread": 0.2}
    changed |= {"straggler_ratio": 1.25, "straggler_rank": 2}
    assert rows == [
        first,
        {**first, **changed, **GPU, "layers": {"model.layers.0.mlp.down_proj": layer}},
        {
            "step": 10,
            "held_out_loss": 3.5,
            "held_out_bits_per_byte": 1.75,
            "held_out_perplexity": math.exp(3.5),
            "validation": {
                "laws": {"loss": 2.0, "bits_per_byte": 1.0, "perplexity": math.exp(2.0)}
            },
        },
        {
            "step": 10,
            "event": {
                "kind": "alert",
                "name": "gradient norm",
                "action": "alert",
                "evidence": {"grad_norm": 12.5},
                "text": "gradient norm: 12.5",
            },
        },
    ]
    assert read_metrics(path) == rows


def test_what_a_gpu_does_not_know_is_absent() -> None:
    row = metrics(5, gpu=GpuMetrics(utilization=0.5, xid_errors=0)).row()
    assert {k: v for k, v in row.items() if k.startswith("gpu")} == {
        "gpu_utilization": 0.5,
        "gpu_xid_errors": 0,
    }


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    """JSON has no NaN, and strict readers refuse what Python writes for it."""
    path = tmp_path / "metrics.jsonl"
    with log(path) as run:
        run.interval(
            metrics(
                5,
                loss=math.nan,
                grad_norm=math.inf,
                exposed_s={"tp": math.nan},
                layers={"model.layers.0.mlp.up_proj": LAYER.__class__(zero_fraction=math.nan)},
            )
        )
        run.evaluation(EvaluationMetrics(5, math.nan, -math.inf))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = path.read_text().splitlines()
    interval, evaluation = (json.loads(line, parse_constant=refuse) for line in lines)
    assert [interval[key] for key in ("loss", "grad_norm")] == [None] * 2
    assert interval["exposed_s"] == {"tp": None}
    assert set(interval["layers"]["model.layers.0.mlp.up_proj"].values()) == {None}
    assert interval["tokens_per_s"] == 12_345.6
    assert set(evaluation.values()) == {5, None}
    assert read_metrics(path) == [interval, evaluation]


def test_a_perplexity_that_is_too_large_is_infinite() -> None:
    assert perplexity(1000.0) == math.inf
    assert perplexity(0.0) == 1.0


def test_lines_on_the_console(tmp_path: Path) -> None:
    with log(tmp_path / "metrics.jsonl") as run:
        run.interval(metrics(5))
        run.interval(metrics(5, code_flips=None, mfu=0.41))
        run.evaluation(EvaluationMetrics(10, 3.5, 1.75, {"laws": Score(2.0, 1.0)}))
        run.event(ALERT)
        run.say("[not] markup")
    start = (
        "step      5  loss 2.5000  bits/byte 1.2500  norm 0.500  lr 1.00e-03  12,346 tok/s  "
        "zeros 25.0%"
    )
    assert said(run)[:6] == [
        f"{start}  flips 0.050%  MB tp 1.5 pp 0.3  bubble 13%",
        f"{start}  MB tp 1.5 pp 0.3  bubble 13%  MFU 41.0%",
        "step     10  held-out loss 3.5000  bits/byte 1.7500",
        "step     10  laws loss 2.0000  bits/byte 1.0000",
        "step     10  ALERT gradient norm: 12.5",
        "[not] markup",
    ]


def test_a_resumed_run_drops_the_lines_after_its_first_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with log(path) as run:
        for step in (1, 2, 3, 4):
            run.interval(metrics(step))
        run.evaluation(EvaluationMetrics(4, 3.5, 1.75))
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # the run died while it wrote this
    with log(path, first_step=2) as run:
        run.interval(metrics(3, loss=2.0))
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        *((1, 2.5), (2, 2.5), (3, 2.0))
    ]
    log(path, first_step=0)
    assert read_metrics(path) == []


def test_a_finished_run_evaluates_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with log(path, first_step=10) as run:
            run.evaluation(EvaluationMetrics(10, 3.5, 1.75))
    assert [row["held_out_loss"] for row in read_metrics(path)] == [3.5]


def test_events_stay_when_a_run_goes_back(tmp_path: Path) -> None:
    """Whether it goes on later, or goes back by itself."""
    path = tmp_path / "metrics.jsonl"
    with log(path) as run:
        for step in (5, 9, 10):
            run.interval(metrics(step))
        run.event(ALERT)
        run.rewind(5)
        run.interval(metrics(9, loss=2.0))
    kinds = [(row["step"], row.get("loss", "event")) for row in read_metrics(path)]
    assert kinds == [(5, 2.5), (10, "event"), (9, 2.0)]
    log(path, first_step=7)
    assert [row["step"] for row in read_metrics(path)] == [5, 10]


def test_a_rank_without_a_path_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with log(None) as run:
        run.interval(metrics(1))
        run.evaluation(EvaluationMetrics(1, 3.5, 1.75))
        run.event(ALERT)
        run.rewind(0)
    assert list(tmp_path.rglob("*")) == []


def test_a_full_disk_is_an_alert_and_leaves_whole_lines(tmp_path: Path) -> None:
    """In a fork, since the limit is a process's. One alert for as long as it lasts."""

    def run() -> str:
        console = Console(file=io.StringIO(), width=200)
        path = tmp_path / "metrics.jsonl"
        log = MetricsLog(path, 0, 9, console, None, {})
        log.evaluation(EvaluationMetrics(1, 2.0, 3.0))
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        for step in (2, 3):
            log.evaluation(EvaluationMetrics(step, 2.0, 3.0))
            assert path.stat().st_size == size
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        log.evaluation(EvaluationMetrics(4, 2.0, 3.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        log.evaluation(EvaluationMetrics(5, 2.0, 3.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    (said,) = run_ranks(run, 1)
    alerts = [line for line in said.splitlines() if line.startswith("ALERT")]
    assert len(alerts) == 2
    assert all("metrics.jsonl cannot be written (" in line for line in alerts)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 4]
