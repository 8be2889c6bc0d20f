"""Metrics at Weights & Biases; offline with ``WANDB_MODE=offline``, for ``wandb sync`` later.

Every number of a row is logged under its name, tables as ``exposed_s/dp``, with ``step`` as the x
axis of all of them. W&B's own step only grows, so a run that goes back is logged on top.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megabit.errors import UserError
from megabit.telemetry.accounting import Accounting
from megabit.telemetry.metrics import EvaluationMetrics, Event, IntervalMetrics, Row, flatten


class WandbSink:
    """A run of ``project``.

    Args:
        folder: where W&B keeps its files, in ``wandb``.
        run_config: all settings, to compare runs by.

    Raises:
        UserError: W&B cannot be used.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, folder: Path, run_config: Mapping[str, Any]) -> None:
        try:
            import wandb  # takes a second to import, and most runs do without
        except ImportError as error:
            raise UserError(
                "telemetry.wandb_project: needs the package wandb; pip install 'megabit[telemetry]'"
            ) from error
        try:
            self._run = wandb.init(project=project, dir=str(folder), config=dict(run_config))
        except (wandb.Error, OSError) as error:
            raise UserError(
                f"telemetry.wandb_project: cannot log there ({error}); "
                "log in with 'wandb login', or set WANDB_MODE=offline"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def interval(self, metrics: IntervalMetrics, accounting: Accounting | None) -> None:
        self._log(metrics.row())

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._log(metrics.row())

    def event(self, event: Event) -> None:
        self._run.log({"step": event.step, f"event/{event.kind}": event.text})

    def accounting(self, step: int, accounting: Accounting) -> None:
        self._run.log({"step": step, "accounting": asdict(accounting)})

    def rewind(self, step: int) -> None:
        pass

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

    def _log(self, row: Row) -> None:
        self._run.log(flatten(row))
