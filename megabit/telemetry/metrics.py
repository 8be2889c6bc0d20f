"""The metrics of a run: a line on the console, a JSON line in a file, and W&B if asked.

``metrics.jsonl`` has one object a line: ``{"step": …, "loss": …, …}`` for a log interval and
``{"step": …, "held_out_loss": …, "held_out_bits_per_byte": …}`` for an evaluation. What is sent, by
axis and purpose, is in each of the former; ``accounting.json`` beside it has what was expected,
with the memory: ``{"step": …, "sent_by_purpose_mb": …, "expected_sent_by_purpose_mb": …, …}``,
from the first interval. A resumed run, which may have another layout, writes it anew.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megabit.errors import UserError
from megabit.files import write_text
from megabit.telemetry.accounting import Accounting


@dataclass(frozen=True)
class IntervalMetrics:
    """Means over the steps of one log interval, over all ranks; of the loss and its gradient, over
    the steps that were not skipped (not a number if all were)."""

    step: int
    """Steps done."""
    loss: float
    """Nats per token, before each update."""
    bits_per_byte: float
    grad_norm: float
    skipped: int
    """Steps whose gradient was infinite or not a number, which changed no weight."""
    lr: float
    tokens_per_s: float
    zero_fraction: float
    """Share of the codes that are 0; 0 for a dense model."""
    sent_mb: dict[str, float]
    """MB that all ranks together send in a step, by axis (ring volume)."""
    sent_by_purpose_mb: dict[str, float]
    """The same, by axis and purpose (``reduce.Purpose``)."""
    bubble: float
    """Time in which ranks are idle in the pipeline's schedule, as long as the slowest of them runs
    it, for each unit of time in which they compute: (p−1)/m with 1F1B and equal stages."""

    def line(self, expected_mb: Mapping[str, float] | None = None) -> str:
        """For the console; ``expected_mb`` is what should have been sent, by axis."""
        sent = " ".join(
            f"{axis} {mb:.1f}" + ("" if expected_mb is None else f"/{expected_mb.get(axis, 0):.1f}")
            for axis, mb in self.sent_mb.items()
        )
        return (
            f"step {self.step:>6}  loss {self.loss:.4f}  bits/byte {self.bits_per_byte:.4f}  "
            f"norm {self.grad_norm:.3f}  lr {self.lr:.2e}  {self.tokens_per_s:,.0f} tok/s  "
            f"zeros {self.zero_fraction:.1%}  MB {sent}  bubble {self.bubble:.0%}"
        )


class MetricsLog:
    """Where a run reports; use as a context manager around the training loop.

    Args:
        path: ``metrics.jsonl``; lines after ``first_step`` are dropped, since a resumed run will
            write those steps again. None on all ranks but the main one, which then report nothing.
        console: quiet on all ranks but the main one.
        wandb_project: log there too; None: not.
    """

    def __init__(
        self,
        path: Path | None,
        first_step: int,
        steps: int,
        console: Console,
        wandb_project: str | None,
        run_config: Mapping[str, Any],
    ) -> None:
        self.console = console
        self._path = path
        self._has_accounted = False
        if path is not None:
            _keep_until(path, first_step, is_finished=first_step == steps)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=steps, completed=first_step)
        self._wandb: Any = None
        if wandb_project is not None and path is not None:
            import wandb  # takes a second to import, and most runs do without

            try:
                self._wandb = wandb.init(
                    project=wandb_project, dir=str(path.parent), config=dict(run_config)
                )
            except (wandb.Error, OSError) as error:
                raise UserError(
                    f"run.wandb_project: cannot log there ({error}); "
                    "log in with 'wandb login', or set WANDB_MODE=offline"
                ) from error

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(kind is not None))

    def advance(self, step: int) -> None:
        """Move the progress bar to ``step`` steps done."""
        self._progress.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """One line for people only."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def interval(self, metrics: IntervalMetrics, accounting: Accounting | None = None) -> None:
        """Report a log interval everywhere: with what was expected to be sent beside what was. The
        first account is shown whole, and later ones if something is not as expected."""
        self.say(metrics.line(None if accounting is None else accounting.expected_by_axis()))
        self._write(asdict(metrics))
        if accounting is not None and not (self._has_accounted and accounting.agrees):
            self._has_accounted = True
            self.accounting(metrics.step, accounting)

    def accounting(self, step: int, accounting: Accounting) -> None:
        """Report bytes sent and kept everywhere; on the console as tables."""
        for table in accounting.tables():
            self.console.print(table)
        values = {"step": step, **asdict(accounting)}
        if self._path is not None:
            path, text = self._path.with_name("accounting.json"), json.dumps(values, indent=2)
            self.try_to_write(path, lambda: write_text(path, text + "\n"))
        if self._wandb is not None:
            self._wandb.log({"accounting": values}, step=step)

    def evaluation(self, step: int, loss: float, bits_per_byte: float) -> None:
        """Report a held-out evaluation everywhere."""
        self.say(f"step {step:>6}  held-out loss {loss:.4f}  bits/byte {bits_per_byte:.4f}")
        self._write({"step": step, "held_out_loss": loss, "held_out_bits_per_byte": bits_per_byte})

    def try_to_write(self, path: Path, write: Callable[[], object]) -> None:
        """``write``, which writes ``path``; if that fails, say so: training goes on without."""
        try:
            write()
        except OSError as error:
            self.say(f"ALERT {path} cannot be written ({error.strerror}); training goes on")

    def _write(self, values: dict[str, Any]) -> None:
        if self._path is None:
            return
        path, line = self._path, json.dumps(_with_nulls(values)) + "\n"
        self.try_to_write(path, lambda: _append(path, line))
        if self._wandb is not None:
            self._wandb.log(values, step=values["step"])


def _append(path: Path, line: str) -> None:
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


def _with_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All objects of a ``metrics.jsonl``; a last line cut short by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _keep_until(path: Path, step: int, is_finished: bool) -> None:
    """Drop what a run that goes on after ``step`` writes again; a finished one evaluates again."""
    kept = [
        row
        for row in read_metrics(path)
        if row["step"] < step
        or (row["step"] == step and not (is_finished and "held_out_loss" in row))
    ]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
