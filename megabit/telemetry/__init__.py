"""What a run tells: metrics to the console, to a file and to Weights & Biases."""

from megabit.telemetry.accounting import Accounting
from megabit.telemetry.metrics import IntervalMetrics, MetricsLog

__all__ = ["Accounting", "IntervalMetrics", "MetricsLog"]
