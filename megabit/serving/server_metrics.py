"""What ``/metrics`` says: vLLM's names, units and buckets under ``megabit_``, and some more.

Requests are counted here, as they are answered. What only the engine knows comes from its reports;
their counters begin at 0 with each engine, those of the server go on.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from megabit.inference.messages import Stats
from megabit.serving.engine_metrics import EngineMetrics, Waiting
from megabit.serving.supervisor import Supervisor

# Those of vLLM (vllm/v1/metrics/loggers.py), so that its dashboards and rules fit.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_BATCH_TOKENS = tuple(float(1 << i) for i in range(15))
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

VLLM = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens"),
    *("generation_tokens", "request_success", "num_preemptions", "prefix_cache_queries"),
    *("prefix_cache_hits", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "iteration_tokens_total", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_max_tokens", "cache_config_info"),
)
"""Families that vLLM has, too."""


@dataclass(frozen=True)
class RequestTimes:
    """Of one engine request, by one monotonic clock."""

    arrived: float
    sent: float
    """To the engine."""
    first: float
    """When its first token was there."""
    last: float


class ServerMetrics:
    """Everything that is counted, in a registry of its own.

    Args:
        model_name: the label that vLLM's families have.
        vllm_names: whether these are there as ``vllm:…``, too.
    """

    def __init__(self, model_name: str, vllm_names: bool) -> None:
        self._model = model_name
        self._vllm_names = vllm_names
        self.registry = CollectorRegistry()
        self._engine = EngineMetrics(model_name, self._histogram("iteration_tokens_total"))
        self.registry.register(self._engine)
        counter, histogram = self._counter, self._histogram
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were computed")
        self.generation_tokens = counter("generation_tokens", "Tokens that were generated")
        self._success = Counter(
            "megabit_request_success",
            "Answers that have ended, by why",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.first_token_s = histogram("time_to_first_token_seconds")
        self.token_s = histogram("inter_token_latency_seconds")
        self.request_s = histogram("e2e_request_latency_seconds")
        self.queue_s = histogram("request_queue_time_seconds")
        self.prefill_s = histogram("request_prefill_time_seconds")
        self.decode_s = histogram("request_decode_time_seconds")
        self.inference_s = histogram("request_inference_time_seconds")
        self.request_prompt_tokens = histogram("request_prompt_tokens")
        self.request_generation_tokens = histogram("request_generation_tokens")
        self.request_max_tokens = histogram("request_params_max_tokens")
        self._http = Counter(
            "megabit_http_requests",
            "HTTP requests, by route and class of status",
            ["handler", "method", "status"],
            registry=self.registry,
        )
        self.disconnects = Counter(
            "megabit_client_disconnects",
            "Requests whose client was gone before the answer was complete",
            registry=self.registry,
        )
        self._alerts = Gauge(
            "megabit_alert_active",
            "Whether an alert of the server is on",
            ["alert"],
            registry=self.registry,
        )
        self._baseline = Gauge(
            "megabit_alert_baseline",
            "What an alert of the server compares with, once it is known",
            ["alert"],
            registry=self.registry,
        )
        self.recent_requests: deque[tuple[float, float]] = deque(maxlen=4096)
        """When answers ended, and their end-to-end latency."""

    def watch(self, supervisor: Supervisor, waiting: Waiting) -> None:
        """What scrapes ask; once, when these are there."""
        self._engine.supervisor = supervisor
        self._engine.waiting = waiting

    def report(self, stats: Stats) -> None:
        """What an engine says of itself."""
        self._engine.add(stats)

    def new_engine(self) -> None:
        """The counters of its reports begin at 0."""
        self._engine.new_engine()

    @property
    def engine(self) -> Mapping[str, Mapping[str, float]]:
        """Counters of all engines so far, by name and label."""
        return self._engine.counters

    def ended(self, reason: str) -> None:
        """An answer has ended."""
        self._success.labels(self._model, reason).inc()

    def timed(self, times: RequestTimes, prompt_tokens: int, tokens: int) -> None:
        """A request was answered in full."""
        self.request_s.observe(times.last - times.arrived)
        self.queue_s.observe(times.sent - times.arrived)
        self.prefill_s.observe(times.first - times.sent)
        self.decode_s.observe(times.last - times.first)
        self.inference_s.observe(times.last - times.sent)
        self.request_prompt_tokens.observe(prompt_tokens)
        self.request_generation_tokens.observe(tokens)
        self.recent_requests.append((times.last, times.last - times.arrived))

    def http(self, handler: str, method: str, status: int) -> None:
        self._http.labels(handler, method, f"{status // 100}xx").inc()

    def alert(self, name: str, is_active: bool, baseline: float | None) -> None:
        self._alerts.labels(name).set(is_active)
        if baseline is not None:
            self._baseline.labels(name).set(baseline)

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        families = _Families([*self.registry.collect()])
        if self._vllm_names:
            families = _Families([*families.collect(), *_renamed(families.collect())])
        return generate_latest(families)  # it wants collect(), no more

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"megabit_{name}", text, ["model_name"], registry=self.registry)
        return family.labels(self._model)

    def _histogram(self, name: str) -> Histogram:
        text, buckets = _HISTOGRAMS[name]
        family = Histogram(
            f"megabit_{name}", text, ["model_name"], buckets=buckets, registry=self.registry
        )
        return family.labels(self._model)


_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token", _FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Between tokens of an answer", _TOKEN_S),
    "e2e_request_latency_seconds": ("Arrival to last token", _REQUEST_S),
    "request_queue_time_seconds": ("Arrival until the engine has a request", _REQUEST_S),
    "request_prefill_time_seconds": ("With the engine until the first token", _REQUEST_S),
    "request_decode_time_seconds": ("First to last token", _REQUEST_S),
    "request_inference_time_seconds": ("With the engine until the last token", _REQUEST_S),
    "iteration_tokens_total": ("Tokens of a forward pass", _BATCH_TOKENS),
    "request_prompt_tokens": ("Tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a prompt", _TOKENS),
    "request_params_max_tokens": ("max_tokens of a request", _TOKENS),
}


class _Families:
    """Without the times at which counters began: as many lines again, and nobody asks."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


def _renamed(families: Iterable[Metric]) -> Iterator[Metric]:
    """Those that vLLM has, under its names."""
    for family in families:
        name = family.name.removeprefix("megabit_")
        if name in VLLM:
            renamed = Metric(f"vllm:{name}", family.documentation, family.type)
            renamed.samples = [
                Sample(f"vllm:{s.name.removeprefix('megabit_')}", *s[1:]) for s in family.samples
            ]
            yield renamed
