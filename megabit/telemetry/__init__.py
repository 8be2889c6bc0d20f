"""What a run tells: metrics, events and alerts, to the console, a file and monitoring tools."""

from megabit.telemetry.accounting import Accounting
from megabit.telemetry.alerts import Alert, AlertBook
from megabit.telemetry.gpu import GpuMetrics, GpuWatch, open_gpu_reader
from megabit.telemetry.log import MetricsLog
from megabit.telemetry.metrics import (
    AXES,
    PHASES,
    EvaluationMetrics,
    Event,
    IntervalMetrics,
    LayerMetrics,
)
from megabit.telemetry.sink import Sink

__all__ = [
    "AXES",
    "PHASES",
    "Accounting",
    "Alert",
    "AlertBook",
    "EvaluationMetrics",
    "Event",
    "GpuMetrics",
    "GpuWatch",
    "IntervalMetrics",
    "LayerMetrics",
    "MetricsLog",
    "Sink",
    "open_gpu_reader",
]
