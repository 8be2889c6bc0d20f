"""Run folders to report on, with rows that telemetry itself makes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabit.config import Config, to_yaml
from megabit.telemetry import EvaluationMetrics, Event, GpuMetrics, IntervalMetrics, LayerMetrics

TOKENS = 64
"""Of a step."""


@dataclass(frozen=True)
class Score:
    loss: float
    bits_per_byte: float


def interval(step: int, **changes: Any) -> dict[str, Any]:
    """A row that has all there is."""
    layers = {
        f"model.layers.{layer}.{name}": LayerMetrics(0.3, 1e-3 / (layer + 1), 0.3, 0.01)
        for layer in (0, 10, 9)
        for name in ("mlp.down_proj", "self_attn.o_proj")
    }
    metrics = IntervalMetrics(
        step=step,
        consumed_tokens=TOKENS * step,
        loss=4 / step + 2,
        objective=4 / step + 2.1,
        bits_per_byte=2 / step + 1,
        grad_norm=0.5,
        grad_norm_std=0.02,
        grad_norm_spread=0.1,
        skipped=int(step % 4 == 0),
        lr=1e-3,
        weight_decay=0.1,
        quantization_share=0.5,
        batch_size=16,
        loss_scale=65536.0,
        tokens_per_s=12_345.6,
        tflops=1.5,
        mfu=0.375,
        step_s=0.5,
        time_s={
            "data": 0.01,
            "forward_backward": 0.3,
            "gradients": 0.1,
            "update": 0.05,
            "other": 0.04,
        },
        exposed_s={"tp": 0.01, "pp": 0.02, "dp": 0.03, "world": 0.001},
        exposed_share=0.08,
        data_share=0.02,
        straggler_ratio=1.1,
        straggler_rank=1,
        sent_mb={"tp": 1.5, "pp": 0.3, "dp": 0.2, "world": 0.1},
        sent_by_purpose_mb={"tp activations": 1.5},
        bubble=0.13,
        memory_mib=2048.0,
        zero_fraction=0.31,
        code_flips=6e-4,
        threshold_distance=0.33,
        saturation=0.004,
        gpu=GpuMetrics(0.9, 600.0, 60.0, 70_000.0, 2, 1),
        layers=layers,
    )
    row = json.loads(json.dumps(metrics.row(), default=vars))
    return {**row, **changes}


def evaluation(step: int, **changes: Any) -> dict[str, Any]:
    sets = {"plays.txt": Score(2.5, 1.25)}
    return {**EvaluationMetrics(step, 2.2, 1.1, sets).row(), **changes}


def event(step: int, kind: Any, name: str, action: str, **evidence: Any) -> dict[str, Any]:
    return Event(step, kind, name, action, evidence, f"{name} at {step}").row()


def write_run(
    folder: Path,
    rows: list[dict[str, Any]],
    summary: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(without_nan(row)) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "config.yaml").write_text(to_yaml(config or Config()))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """As the file has it."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}


def full_run(folder: Path, steps: int = 40) -> Path:
    """A finished run with everything in it."""
    rows: list[dict[str, Any]] = []
    for step in range(2, steps + 1, 2):
        rows.append(interval(step))
        if step % 10 == 0:
            rows.append(evaluation(step))
            rows.append(event(step, "checkpoint", "training", "saved"))
    rows.append(event(12, "guard", "loss_spike", "rollback", z=14.25, loss=9.5))
    rows.append(event(16, "guard", "nonfinite", "skip"))
    rows.append(event(20, "alert", "gradient norm", "alert", grad_norm=11.0))
    summary = {
        "steps": steps,
        "parameters": 5_250_000,
        "layout": {"tp": 2, "pp": 1, "dp": 1},
        "sample": "ROMEO: what",
    }
    return write_run(folder, rows, summary)
