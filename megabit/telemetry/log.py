"""``MetricsLog``: one object that a run reports to, and all sinks that hear of it.

``accounting.json`` beside ``metrics.jsonl`` has what was expected to be sent, with the memory:
``{"step": …, "sent_by_purpose_mb": …, "expected_sent_by_purpose_mb": …, …}``, from the first
interval. A resumed run, which may have another layout, writes it anew.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megabit.config import TelemetryConfig
from megabit.files import write_text
from megabit.telemetry.accounting import Accounting
from megabit.telemetry.metrics import EvaluationMetrics, Event, IntervalMetrics
from megabit.telemetry.prometheus import PrometheusEndpoint, PrometheusTextfile
from megabit.telemetry.sink import ConsoleSink, JsonlSink, Sink
from megabit.telemetry.tensorboard import TensorBoardSink
from megabit.telemetry.weights_and_biases import WandbSink


class MetricsLog:
    """Where a run reports; use as a context manager around the training loop.

    Whatever goes wrong with a sink while the run lasts is one line beginning with ALERT, and the
    next after it has worked again: training goes on.

    Args:
        path: ``metrics.jsonl``; rows after ``first_step`` are dropped, since a resumed run will
            report those steps again. None on all ranks but the main one, which then report nothing.
        console: quiet on all ranks but the main one.
        telemetry: which other sinks there are; None: none.
        run_config: all settings, for Weights & Biases.

    Raises:
        UserError: a sink cannot be opened; ``path`` is as it was then, and if it is for Prometheus
            nothing at all has been written.
        OSError: ``path`` cannot be written.
    """

    def __init__(
        self,
        path: Path | None,
        first_step: int,
        steps: int,
        console: Console,
        telemetry: TelemetryConfig | None,
        run_config: Mapping[str, Any],
    ) -> None:
        self.console = console
        self._path = path
        self._has_accounted = False
        self._speaker = ConsoleSink(console)
        self._broken: set[int] = set()
        self._sinks: list[Sink] = [self._speaker]
        try:
            if path is not None:
                self._open(path, first_step, first_step == steps, telemetry, run_config)
        except BaseException:
            self._close(failed=True)
            raise
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=steps, completed=first_step)

    def _open(
        self,
        path: Path,
        first_step: int,
        is_finished: bool,
        telemetry: TelemetryConfig | None,
        run_config: Mapping[str, Any],
    ) -> None:
        """All sinks but the console, those first that write nothing when they are opened."""
        chosen = telemetry or TelemetryConfig()
        if chosen.prometheus_port is not None:
            self._sinks.append(PrometheusEndpoint(chosen.prometheus_host, chosen.prometheus_port))
        if chosen.prometheus_textfile is not None:
            self._sinks.append(PrometheusTextfile(Path(chosen.prometheus_textfile)))
        if chosen.tensorboard:
            self._sinks.append(TensorBoardSink(path.parent / "tensorboard", first_step))
        if chosen.wandb_project is not None:
            self._sinks.append(WandbSink(chosen.wandb_project, path.parent, run_config))
        self._sinks.append(JsonlSink(path, first_step, is_finished))

    def __enter__(self) -> Self:
        for sink in self._sinks:
            if isinstance(sink, PrometheusEndpoint):
                self.say(f"Prometheus: {sink.url}")
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._close(failed=kind is not None)

    def _close(self, failed: bool) -> None:
        self._tell(lambda sink: sink.close(failed))

    def advance(self, step: int) -> None:
        """Move the progress bar to ``step`` steps done."""
        self._progress.update(self._task, completed=step)

    def rewind(self, step: int) -> None:
        """The run went back to ``step`` steps done. Rows of later steps are dropped or hidden where
        a sink can; events stay everywhere."""
        self.advance(step)
        self._tell(lambda sink: sink.rewind(step))

    def say(self, text: str) -> None:
        """One line for people only."""
        self._speaker.say(text)

    def interval(self, metrics: IntervalMetrics, accounting: Accounting | None = None) -> None:
        """Report a log interval everywhere: with what was expected to be sent beside what was. The
        first account is shown whole, and later ones if something is not as expected."""
        self._tell(lambda sink: sink.interval(metrics, accounting))
        if accounting is not None and not (self._has_accounted and accounting.agrees):
            self._has_accounted = True
            self.accounting(metrics.step, accounting)

    def accounting(self, step: int, accounting: Accounting) -> None:
        """Report bytes sent and kept; on the console as tables, and in ``accounting.json``."""
        self._tell(lambda sink: sink.accounting(step, accounting))
        if self._path is not None:
            values = {"step": step, **asdict(accounting)}
            path, text = self._path.with_name("accounting.json"), json.dumps(values, indent=2)
            self.try_to_write(path, lambda: write_text(path, text + "\n"))

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Report an evaluation everywhere."""
        self._tell(lambda sink: sink.evaluation(metrics))

    def event(self, event: Event) -> None:
        """Report what a guard, an alert rule or a checkpoint did, everywhere."""
        self._tell(lambda sink: sink.event(event))

    def try_to_write(self, path: Path, write: Callable[[], object]) -> None:
        """``write``, which writes ``path``; if that fails, say so: training goes on without."""
        try:
            write()
        except OSError as error:
            self.say(f"ALERT {path} cannot be written ({error.strerror}); training goes on")

    def _tell(self, tell: Callable[[Sink], None]) -> None:
        """``tell`` all sinks."""
        for number, sink in enumerate(self._sinks):
            try:
                tell(sink)
            except Exception as error:  # whatever a library raises: a run does not end by it
                if sink is self._speaker:
                    raise
                if number not in self._broken:
                    self._broken.add(number)
                    reason = error.strerror if isinstance(error, OSError) else None
                    self.say(
                        f"ALERT {sink.name} cannot be written ({reason or error}); training goes on"
                    )
            else:
                self._broken.discard(number)
