"""Where metrics go: what a sink is, and the two that every run has."""

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from megabit.files import write_text
from megabit.telemetry.accounting import Accounting
from megabit.telemetry.metrics import (
    EvaluationMetrics,
    Event,
    IntervalMetrics,
    Row,
    read_metrics,
)


class Sink(Protocol):
    """Takes everything that a run reports; only the main rank has any.

    A method may raise whatever it likes: the log says so once, and training goes on. So a method
    that failed is called again with the next row.
    """

    @property
    def name(self) -> str:
        """For people, when something is wrong with it."""
        ...

    def interval(self, metrics: IntervalMetrics, accounting: Accounting | None) -> None:
        """A log interval, with what was expected to be sent."""
        ...

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """The loss of held-out texts."""
        ...

    def event(self, event: Event) -> None:
        """Something that happened once: an alert, a checkpoint, a measure of the guard."""
        ...

    def accounting(self, step: int, accounting: Accounting) -> None:
        """What is sent and kept, of the first interval and wherever it is not as expected."""
        ...

    def rewind(self, step: int) -> None:
        """The run went back to ``step`` steps done: rows of later steps will come again."""
        ...

    def close(self, failed: bool) -> None:
        """The run is over, by an error if ``failed``."""
        ...


class ConsoleSink:
    """Lines for people."""

    name = "the console"

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def interval(self, metrics: IntervalMetrics, accounting: Accounting | None) -> None:
        self.say(metrics.line(None if accounting is None else accounting.expected_by_axis()))

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        for line in metrics.lines():
            self.say(line)

    def event(self, event: Event) -> None:
        self.say(event.line())

    def accounting(self, step: int, accounting: Accounting) -> None:
        for table in accounting.tables():
            self._console.print(table)

    def rewind(self, step: int) -> None:
        pass

    def close(self, failed: bool) -> None:
        pass


class JsonlSink:
    """``metrics.jsonl``, one row a line.

    Args:
        path: what it has of steps after ``first_step`` is dropped, since a run that goes on will
            report those again. Events stay: they have happened.
        is_finished: the run had reached its end, and will only evaluate again.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, first_step: int, is_finished: bool) -> None:
        self._path = path
        self._keep_until(first_step, is_finished)

    @property
    def name(self) -> str:
        return str(self._path)

    def interval(self, metrics: IntervalMetrics, accounting: Accounting | None) -> None:
        self._append(metrics.row())

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._append(metrics.row())

    def event(self, event: Event) -> None:
        self._append(event.row())

    def accounting(self, step: int, accounting: Accounting) -> None:
        pass  # in a file of its own

    def rewind(self, step: int) -> None:
        self._keep_until(step, is_finished=False)

    def close(self, failed: bool) -> None:
        pass

    def _append(self, row: Row) -> None:
        append_line(self._path, json.dumps(with_nulls(row)) + "\n")

    def _keep_until(self, step: int, is_finished: bool) -> None:
        def stays(row: Row) -> bool:
            if row["step"] == step:
                return not (is_finished and "held_out_loss" in row)
            return row["step"] < step or "event" in row

        kept = [row for row in read_metrics(self._path) if stays(row)]
        write_text(self._path, "".join(json.dumps(row) + "\n" for row in kept))


def append_line(path: Path, line: str) -> None:
    """All of ``line`` or, if there is no room for it, nothing."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        data = line.encode()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(before)
            raise


def with_nulls(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {key: with_nulls(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [with_nulls(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
