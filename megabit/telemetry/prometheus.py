"""Metrics for Prometheus: the main rank answers scrapes, or writes a file for node_exporter.

What is exported, and under which names, is in ``prometheus_names``. Numbers are those of the newest
log interval and the newest evaluation, whenever Prometheus asks.
"""

import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabit.errors import UserError
from megabit.files import write_text
from megabit.telemetry.accounting import Accounting
from megabit.telemetry.metrics import EvaluationMetrics, Event, IntervalMetrics, Row
from megabit.telemetry.prometheus_names import (
    EVALUATION_METRICS,
    EVENTS,
    INTERVAL_METRICS,
    PrometheusMetric,
)

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family = CounterMetricFamily | GaugeMetricFamily


class Snapshot:
    """The newest rows, as a collector of ``prometheus_client``; scrapes come from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interval: Row = {}
        self._evaluation: Row = {}
        self._events: Counter[tuple[str, ...]] = Counter()

    def set_interval(self, row: Row) -> None:
        with self._lock:
            self._interval = row

    def set_evaluation(self, row: Row) -> None:
        with self._lock:
            self._evaluation = row

    def count(self, event: Event) -> None:
        with self._lock:
            self._events[event.kind, event.name, event.action] += 1

    def collect(self) -> Iterator["Family"]:
        """What a scrape gets."""
        from prometheus_client.core import CounterMetricFamily

        with self._lock:
            interval, evaluation, events = self._interval, self._evaluation, dict(self._events)
        for metrics, row in ((INTERVAL_METRICS, interval), (EVALUATION_METRICS, evaluation)):
            for metric in metrics:
                yield from _gauge(metric, row)
        if events:
            family = CounterMetricFamily(EVENTS.name, EVENTS.help, labels=EVENTS.labels)
            for labels, count in events.items():
                family.add_metric(labels, count)
            yield family


def _gauge(metric: PrometheusMetric, row: Mapping[str, Any]) -> Iterator["Family"]:
    """Nothing where the row has no such number."""
    from prometheus_client.core import GaugeMetricFamily

    samples = list(metric.samples(row))
    if samples:
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in samples:
            family.add_metric(labels, value)
        yield family


class PrometheusSink:
    """What both ways have in common."""

    def __init__(self, setting: str) -> None:
        """``setting`` is what asks for it. Raises UserError: the package is missing."""
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise UserError(
                f"{setting}: needs the package prometheus-client; pip install 'megabit[telemetry]'"
            ) from error
        self._snapshot = Snapshot()
        # A registry of its own: the library's global one would have the process' figures, too.
        self._registry = CollectorRegistry()
        self._registry.register(self._snapshot)

    def interval(self, metrics: IntervalMetrics, accounting: Accounting | None) -> None:
        self._snapshot.set_interval(metrics.row())
        self._publish()

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._snapshot.set_evaluation(metrics.row())
        self._publish()

    def event(self, event: Event) -> None:
        self._snapshot.count(event)
        self._publish()

    def accounting(self, step: int, accounting: Accounting) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def close(self, failed: bool) -> None:
        pass

    def _publish(self) -> None:
        """After each change."""


class PrometheusEndpoint(PrometheusSink):
    """``http://HOST:PORT/metrics``, for as long as the run lasts.

    Args:
        host: the address to listen on.
        port: 0 takes a free one.

    Raises:
        UserError: that is not possible.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__("telemetry.prometheus_port")
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except socket.gaierror as error:
            raise UserError(
                f"telemetry.prometheus_host: {host} is no address of this machine ({error})"
            ) from error
        except (OSError, OverflowError) as error:
            raise UserError(
                f"telemetry.prometheus_port: cannot listen on {host}:{port} ({error}); "
                "choose a free port, or 0"
            ) from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    @property
    def name(self) -> str:
        return self.url

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class PrometheusTextfile(PrometheusSink):
    """A ``.prom`` file, replaced as a whole with each row; it stays when the run ends.

    Raises:
        UserError: it cannot be one.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("telemetry.prometheus_textfile")
        if path.suffix != ".prom":
            raise UserError(
                f"telemetry.prometheus_textfile: {path} must end in .prom; node_exporter reads no "
                "other files"
            )
        if not path.parent.is_dir():
            raise UserError(
                f"telemetry.prometheus_textfile: {path.parent} is no folder; make it, and let "
                "node_exporter read it (--collector.textfile.directory)"
            )
        self._path = path

    @property
    def name(self) -> str:
        return str(self._path)

    def _publish(self) -> None:
        from prometheus_client import generate_latest

        write_text(self._path, generate_latest(self._registry).decode())
