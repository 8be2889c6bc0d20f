"""What a run reports, with all fields there are."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megabit.config import TelemetryConfig
from megabit.telemetry import Event, GpuMetrics, IntervalMetrics, LayerMetrics, MetricsLog

LAYER = LayerMetrics(0.25, 5e-4, 0.3, 0.01)


def metrics(step: int, **changes: Any) -> IntervalMetrics:
    """Of one process without a GPU."""
    values: dict[str, Any] = {
        "consumed_tokens": 4096 * step,
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
    return IntervalMetrics(step=step, **{**values, **changes})


def full_metrics(step: int, **changes: Any) -> IntervalMetrics:
    """Of ranks with GPUs, each layer by itself."""
    return metrics(
        step,
        **{
            "grad_norm_spread": 0.2,
            "mfu": 0.41,
            "straggler_ratio": 1.25,
            "straggler_rank": 2,
            "gpu": GpuMetrics(0.97, 612.5, 61.0, 70_000.0, 1, 2),
            "layers": {"model.layers.0.mlp.down_proj": LAYER},
            **changes,
        },
    )


ALERT = Event(10, "alert", "gradient norm", "alert", {"grad_norm": 12.5}, "gradient norm: 12.5")


@dataclass(frozen=True)
class Score:
    loss: float
    bits_per_byte: float


def log(
    path: Path | None, first_step: int = 0, telemetry: TelemetryConfig | None = None
) -> MetricsLog:
    console = Console(file=io.StringIO(), width=200)
    return MetricsLog(path, first_step, 10, console, telemetry, {"train": {"steps": 10}})


def said(log: MetricsLog) -> list[str]:
    """Lines on the console."""
    assert isinstance(log.console.file, io.StringIO)
    return [line.rstrip() for line in log.console.file.getvalue().splitlines() if line.strip()]
