"""What engines report, one after the other, for Prometheus: counters go on with a new engine."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from megabit.inference.messages import Ready, Stats
from megabit.serving.supervisor import Supervisor


class Waiting(Protocol):
    """How many requests wait in the server (``Admission``)."""

    requests: int


class EngineMetrics:
    """Reports of engines, one after the other, as a collector of ``prometheus_client``."""

    def __init__(self, model_name: str, batch_tokens: Histogram) -> None:
        self._model = model_name
        self._batch_tokens = batch_tokens
        self.supervisor: Supervisor | None = None
        self.waiting: Waiting | None = None
        self._before: defaultdict[str, defaultdict[str, float]] = _table()
        """Of the engines that are gone."""
        self._now: dict[str, dict[str, float]] = {}

    def add(self, stats: Stats) -> None:
        for tokens in stats.batch_tokens:
            self._batch_tokens.observe(tokens)
        self._now = {
            "num_preemptions": {"": stats.preemptions},
            "prefix_cache_queries": {"": stats.prefix_queries},
            "prefix_cache_hits": {"": stats.prefix_hits},
            "engine_steps": {"": stats.steps},
            "comm_bytes": stats.comm_bytes,
            "comm_seconds": stats.comm_seconds,
            "comm_calls": {axis: float(calls) for axis, calls in stats.comm_calls.items()},
            "comm_fallback": {why: float(count) for why, count in stats.comm_fallbacks.items()},
            "stage_seconds": {str(i): s for i, s in enumerate(stats.stage_seconds)},
        }

    def new_engine(self) -> None:
        for name, values in self.counters.items():
            self._before[name].update(values)
        self._now = {}

    @property
    def counters(self) -> Mapping[str, Mapping[str, float]]:
        """Of all engines together."""
        sums = _table()
        for table in (self._before, self._now):
            for name, values in table.items():
                for label, value in values.items():
                    sums[name][label] += value
        return sums

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        counters = self.counters
        for name, (text, labels) in _COUNTERS.items():
            family = CounterMetricFamily(f"megabit_{name}", text, labels=labels)
            zero = {} if labels != ["model_name"] else {"": 0.0}
            for label, value in {**zero, **counters.get(name, {})}.items():
                values = [self._model] if labels == ["model_name"] else label.split("/", 1)
                family.add_metric(values, value)
            yield family
        supervisor = self.supervisor
        if supervisor is None:
            return
        up = _by_rank(supervisor.rank_is_up)
        yield _gauge("rank_up", "Whether a rank's process runs", "rank", up)
        restarts = CounterMetricFamily(
            "megabit_engine_restarts", "Starts of the engine after a failure"
        )
        restarts.add_metric([], supervisor.restarts)
        yield restarts
        stats = supervisor.stats or Stats()
        yield from self._gauges(stats)
        if supervisor.ready is not None:
            yield self._cache_config(supervisor.ready, stats)

    def _gauges(self, stats: Stats) -> Iterator[Metric]:
        waiting = stats.waiting + (0 if self.waiting is None else self.waiting.requests)
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        for name, text, value in (
            ("num_requests_running", "Sequences that are being computed", stats.running),
            ("num_requests_waiting", "Requests that wait", waiting),
            ("kv_cache_usage_perc", "Share of blocks that are in use, 0 to 1", usage),
        ):
            yield _gauge(name, text, "model_name", {self._model: value})
        memory, limit = map(_by_rank, (stats.rank_memory, stats.rank_memory_limit))
        yield _gauge("rank_memory_bytes", "Memory of a rank", "rank", memory)
        yield _gauge("rank_memory_limit_bytes", "Memory that a rank can have", "rank", limit)
        lossy = GaugeMetricFamily(
            "megabit_comm_lossy", "Whether sums over TP are rounded at present"
        )
        lossy.add_metric([], stats.is_lossy)
        yield lossy
        losses = {"lossy": stats.accuracy_loss, "exact": stats.accuracy_exact_loss}
        known = {sums: loss for sums, loss in losses.items() if loss is not None}
        text = "Of the held-out text of the accuracy guard"
        yield _gauge("accuracy_loss", text, "sums", known)

    def _cache_config(self, ready: Ready, stats: Stats) -> Metric:
        labels = {
            "model_name": self._model,
            "block_size": str(ready.block_size),
            "num_blocks": str(ready.num_blocks),
            "tp": str(ready.tp),
            "pp": str(ready.pp),
            "max_model_len": str(ready.max_model_len),
            "layers_per_stage": _joined(ready.layers_per_stage),
            "proposed_layers_per_stage": _joined(stats.proposed_layers or ()),
        }
        family = GaugeMetricFamily(
            "megabit_cache_config_info", "How the engine is laid out", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1)
        return family


_COUNTERS = {
    "num_preemptions": ("Sequences that lost their blocks to others", ["model_name"]),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", ["model_name"]),
    "prefix_cache_hits": ("Prompt tokens found there", ["model_name"]),
    "engine_steps": ("Forward passes", ["model_name"]),
    "comm_bytes": ("Bytes that ranks have sent", ["axis", "codec"]),
    "comm_seconds": ("Seconds that ranks have waited in collectives", ["axis"]),
    "comm_calls": ("Collectives of a rank", ["axis"]),
    "comm_fallback": ("Lossy sums that were sent exactly, by why", ["reason"]),
    "stage_seconds": ("Seconds that a stage has computed", ["stage"]),
}


def _table() -> defaultdict[str, defaultdict[str, float]]:
    return defaultdict(lambda: defaultdict(float))


def _by_rank(values: Iterable[float]) -> dict[str, float]:
    return {str(rank): value for rank, value in enumerate(values)}


def _joined(layers: Iterable[int]) -> str:
    return ",".join(map(str, layers))


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"megabit_{name}", text, labels=[label])
    for value_of, value in values.items():
        family.add_metric([value_of], value)
    return family
