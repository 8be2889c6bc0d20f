"""Metrics as TensorBoard event files, through torch's writer.

Every number of a row is a scalar under its name, tables as ``exposed_s/dp``; events are texts under
``event/<kind>``. TensorBoard keeps scalars in fp32.
"""

import re
from pathlib import Path
from typing import Any

from megabit.errors import UserError
from megabit.telemetry.accounting import Accounting
from megabit.telemetry.metrics import EvaluationMetrics, Event, IntervalMetrics, Row, flatten


class TensorBoardSink:
    """One event file for each time that the run is started or goes back.

    Args:
        folder: ``run.dir/tensorboard``.
        first_step: TensorBoard hides what the files before have of later steps.

    Raises:
        UserError: the package is missing.
        OSError: the folder cannot be written.
    """

    name = "TensorBoard's event file"

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            # Not at import time: it takes a moment, and most runs do without.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "telemetry.tensorboard: needs the package tensorboard; "
                "pip install 'megabit[telemetry]'"
            ) from error
        self._make = SummaryWriter
        self._folder = folder
        self._writer: Any = None
        self._open(first_step)

    def interval(self, metrics: IntervalMetrics, accounting: Accounting | None) -> None:
        self._write(metrics.row())

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._write(metrics.row())

    def event(self, event: Event) -> None:
        self._ready().add_text(f"event/{event.kind}", event.text, event.step)
        self._flush()

    def accounting(self, step: int, accounting: Accounting) -> None:
        pass

    def rewind(self, step: int) -> None:
        self.close(failed=False)
        self._open(step)

    def close(self, failed: bool) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _open(self, step: int) -> None:
        # TensorBoard purges from this step on; that of ``step`` itself is not written again.
        self._writer = self._make(str(self._folder), purge_step=step + 1)

    def _ready(self) -> Any:
        """The writer; a new one after a failure, since a file that was cut short cannot grow."""
        if self._writer is None:
            self._writer = self._make(str(self._folder))
        return self._writer

    def _write(self, row: Row) -> None:
        step = row.pop("step")
        try:
            for name, value in flatten(row).items():
                self._ready().add_scalar(tag_of(name), value, step)
            self._flush()
        except Exception:
            self._writer = None
            raise

    def _flush(self) -> None:
        # It writes in a thread, whose error only a flush gives back.
        self._ready().flush()


def tag_of(name: str) -> str:
    """TensorBoard has letters, digits and ``-_./`` in a tag."""
    return re.sub(r"[^\w./-]", "_", name)
