"""What a run writes down: the JSON lines, the console's line and Weights & Biases' folder."""

import io
import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megabit.launch import run_ranks
from megabit.telemetry import IntervalMetrics, MetricsLog
from megabit.telemetry.metrics import read_metrics


def metrics(step: int, **changes: Any) -> IntervalMetrics:
    values: dict[str, Any] = {
        "loss": 2.5,
        "bits_per_byte": 1.25,
        "grad_norm": 0.5,
        "skipped": 0,
        "lr": 1e-3,
        "tokens_per_s": 12_345.6,
        "zero_fraction": 0.25,
        "sent_mb": {"tp": 1.5, "pp": 0.3, "dp": 0.0},
        "sent_by_purpose_mb": {"tp activations": 1.5, "pp activations": 0.3},
        "bubble": 0.13,
    }
    return IntervalMetrics(step=step, **{**values, **changes})


def log(path: Path | None, first_step: int = 0, wandb: str | None = None) -> MetricsLog:
    console = Console(file=io.StringIO(), width=200)
    return MetricsLog(path, first_step, 10, console, wandb, {"train": {"steps": 10}})


def said(log: MetricsLog) -> list[str]:
    assert isinstance(log.console.file, io.StringIO)
    return log.console.file.getvalue().splitlines()


def test_a_json_line_for_each_report(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with log(path) as run:
        run.advance(5)
        run.interval(metrics(5))
        run.evaluation(5, 3.5, 1.75)
        run.say("for people only")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [
        {
            "step": 5,
            "loss": 2.5,
            "bits_per_byte": 1.25,
            "grad_norm": 0.5,
            "skipped": 0,
            "lr": 1e-3,
            "tokens_per_s": 12_345.6,
            "zero_fraction": 0.25,
            "sent_mb": {"tp": 1.5, "pp": 0.3, "dp": 0.0},
            "sent_by_purpose_mb": {"tp activations": 1.5, "pp activations": 0.3},
            "bubble": 0.13,
        },
        {"step": 5, "held_out_loss": 3.5, "held_out_bits_per_byte": 1.75},
    ]
    assert read_metrics(path) == rows


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    """JSON has no NaN, and strict readers refuse what Python writes for it."""
    path = tmp_path / "metrics.jsonl"
    with log(path) as run:
        run.interval(metrics(5, loss=math.nan, bits_per_byte=math.nan, grad_norm=math.inf))
        run.evaluation(5, math.nan, -math.inf)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = path.read_text().splitlines()
    interval, evaluation = (json.loads(line, parse_constant=refuse) for line in lines)
    assert [interval[key] for key in ("loss", "bits_per_byte", "grad_norm")] == [None] * 3
    assert interval["tokens_per_s"] == 12_345.6
    assert evaluation == {"step": 5, "held_out_loss": None, "held_out_bits_per_byte": None}
    assert read_metrics(path) == [interval, evaluation]


def test_lines_on_the_console(tmp_path: Path) -> None:
    with log(tmp_path / "metrics.jsonl") as run:
        run.interval(metrics(5))
        run.evaluation(10, 3.5, 1.75)
        run.say("[not] markup")
    assert [line.rstrip() for line in said(run) if line.strip()][:3] == [
        "step      5  loss 2.5000  bits/byte 1.2500  norm 0.500  lr 1.00e-03  12,346 tok/s  "
        "zeros 25.0%  MB tp 1.5 pp 0.3 dp 0.0  bubble 13%",
        "step     10  held-out loss 3.5000  bits/byte 1.7500",
        "[not] markup",
    ]


def test_a_resumed_run_drops_the_lines_after_its_first_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with log(path) as run:
        for step in (1, 2, 3, 4):
            run.interval(metrics(step))
        run.evaluation(4, 3.5, 1.75)
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # the run died while it wrote this
    with log(path, first_step=2) as run:
        run.interval(metrics(3, loss=2.0))
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        *((1, 2.5), (2, 2.5), (3, 2.0))
    ]
    log(path, first_step=0)
    assert read_metrics(path) == []


def test_a_rank_without_a_path_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with log(None, wandb="never") as run:
        run.interval(metrics(1))
        run.evaluation(1, 3.5, 1.75)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with log(tmp_path / "run" / "metrics.jsonl", wandb="megabit-test") as run:
        run.interval(metrics(1))
        run.evaluation(1, 3.5, 1.75)
    (records,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    for _ in range(100):  # wandb's own process may write a little after ``finish`` has returned
        if b"held_out_bits_per_byte" in records.read_bytes():
            break
        time.sleep(0.1)
    assert b"held_out_bits_per_byte" in records.read_bytes()
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_full_disk_is_an_alert_and_leaves_whole_lines(tmp_path: Path) -> None:
    """In a fork, since the limit is a process's."""

    def run() -> str:
        console = Console(file=io.StringIO(), width=200)
        path = tmp_path / "metrics.jsonl"
        log = MetricsLog(path, 0, 9, console, None, {})
        log.evaluation(1, 2.0, 3.0)
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        log.evaluation(2, 2.0, 3.0)
        assert path.stat().st_size == size
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        log.evaluation(3, 2.0, 3.0)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    (said,) = run_ranks(run, 1)
    alerts = [line for line in said.splitlines() if line.startswith("ALERT")]
    assert len(alerts) == 1
    assert "metrics.jsonl cannot be written" in alerts[0]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 3]
