"""``/metrics``: vLLM's names and buckets, the dashboard and the rules in examples/, and alerts."""

import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megabit.config.serving import ServerConfig
from megabit.inference.messages import Stats
from megabit.serving.alerts import Alerts, CallAlert, LatencyAlert
from megabit.serving.server_metrics import VLLM, RequestTimes, ServerMetrics
from tests.patience import eventually
from tests.serving.served import Server, echo_server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "serving"

# vLLM's documentation of its production metrics, as of 0.33.
OF_VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "request_success_total": "counter",
    "num_preemptions_total": "counter",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "iteration_tokens_total": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram",
    "cache_config_info": "gauge",
}


def families(text: str) -> dict[str, str]:
    """Kind, by name."""
    return dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def scraped(echo: Server) -> str:
    echo.complete([70, 71], max_tokens=5)
    eventually(lambda: echo.metric("megabit_comm_bytes_total") > 0)
    return echo.http.get("/metrics").text


def test_names_of_vllm(scraped: str) -> None:
    found = families(scraped)
    assert {f"megabit_{name}": kind for name, kind in OF_VLLM.items()}.items() <= found.items()
    assert len(VLLM) == len(OF_VLLM)
    assert all(name.startswith("megabit_") for name in found)
    assert "_created" not in scraped


def test_what_engines_say(echo: Server, scraped: str) -> None:
    said = {
        "prefix_cache_queries_total": 20,
        "prefix_cache_hits_total": 5,
        "rank_memory_bytes": 1000,
        "rank_memory_limit_bytes": 2000,
    }
    assert {name: echo.metric(f"megabit_{name}") for name in said} == said
    assert 'proposed_layers_per_stage="1,1"' in scraped


def test_what_is_timed(tmp_path: Path) -> None:
    """An answer of 11 tokens, one every 20 ms or later, and the client's own clock."""
    with echo_server(tmp_path, token_s=0.02) as server:
        server.http.get("/health")  # connects
        began = time.monotonic()
        server.complete([70, 71], max_tokens=11)
        took = time.monotonic() - began

        def seconds(name: str) -> float:
            assert server.metric(f"megabit_{name}_seconds_count") in (1, 10)
            return server.metric(f"megabit_{name}_seconds_sum")

        first, between = seconds("time_to_first_token"), seconds("inter_token_latency")
        whole = seconds("e2e_request_latency")
        assert 0.015 < first < took - 0.19  # a select may be a millisecond early
        assert 0.19 < between < took - first
        assert first + between == pytest.approx(whole)
        assert seconds("request_decode_time") == pytest.approx(between)
        in_engine = seconds("request_prefill_time")
        assert 0.015 < in_engine < first
        assert seconds("request_queue_time") == pytest.approx(first - in_engine)


def test_alias(tmp_path: Path) -> None:
    with echo_server(tmp_path, "server.vllm_metrics=true") as server:
        server.complete([70, 71], max_tokens=5)
        found = families(server.http.get("/metrics").text)
        assert {f"vllm:{name}": kind for name, kind in OF_VLLM.items()}.items() <= found.items()
        assert server.metric("vllm:generation_tokens_total", model_name="echo") == 5
        assert server.metric("vllm:time_to_first_token_seconds_count") == 1


def test_what_is_counted(echo: Server) -> None:
    def all_of() -> dict[str, float]:
        return {name: echo.metric(f"megabit_{name}") for name in names}

    names = (
        *("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count"),
        *("inter_token_latency_seconds_count", "request_success_total"),
        *("request_generation_tokens_sum", "http_requests_total"),
    )
    before = all_of()
    assert echo.complete([[70, 71], [72]], max_tokens=5, n=2).status_code == 200
    echo.complete([[70, 71], [72]], max_tokens=-1)
    gained = {name: value - before[name] for name, value in all_of().items()}
    assert gained == {
        "prompt_tokens_total": 3,
        "generation_tokens_total": 20,
        "e2e_request_latency_seconds_count": 2,
        "inter_token_latency_seconds_count": 16,
        "request_success_total": 4,
        "request_generation_tokens_sum": 20,
        "http_requests_total": 2 + len(names),  # the scrapes, too
    }


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bmegabit_\w+", re.sub(r'"[^"]*"', "", expression)))


def exported(text: str) -> set[str]:
    """Names of samples."""
    names = set()
    for name, kind in families(text).items():
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + part for part in parts}
    return names


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_dashboard(scraped: str) -> None:
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text(encoding="utf-8"))
    names = exported(scraped)
    asked = set[str]()
    for expression in expressions(dashboard):
        assert metrics_in(expression) <= names, expression
        asked |= metrics_in(expression)
    for name, kind in families(scraped).items():
        parts = {name + "_bucket", name + "_sum"} if kind == "histogram" else {name}
        assert parts & asked, f"{name} is on no panel"
    assert dashboard["id"] is None
    places = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_rules(scraped: str) -> None:
    (group,) = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    names = exported(scraped)
    for rule in group["rules"]:
        used = metrics_in(rule["expr"])
        assert used, rule
        assert used <= names, rule
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["annotations"]["summary"]
    text = json.dumps(group)
    defaults = ServerConfig()
    for limit in (defaults.latency_factor, defaults.comm_factor, defaults.memory_limit):
        assert f"> {limit:g}" in text


def test_latency_alert() -> None:
    alert = LatencyAlert(baseline_requests=4)
    assert alert.ratio([(0, 1.0), (0, 2.0), (0, 3.0)], 0) is None
    assert alert.ratio([(1, 2.0)], 1) is None
    assert alert.baseline == 2
    assert alert.ratio([(2, 5.0)] * 4, 2) is None  # too few
    assert alert.ratio([(3, 5.0)], 3) == 2.5
    assert alert.ratio([(50, 1.0)] * 9, 50) == 0.5
    assert alert.ratio([], 111) is None  # all of them are old


def test_call_alert() -> None:
    alert = CallAlert()
    windows = iter(range(0, 1000, 10))
    seconds = calls = 0.0

    def after(more_seconds: float, more_calls: float) -> float | None:
        nonlocal seconds, calls
        seconds, calls = seconds + more_seconds, calls + more_calls
        return alert.ratio(seconds, calls, next(windows))

    assert after(0, 0) is None
    assert after(5, 30) is None  # idle: does not count
    assert [after(s, 1000) for s in (1, 9, 2)] == [None, None, None]
    assert alert.baseline == 0.002
    assert alert.ratio(seconds, calls + 5, 45) is None  # too early
    assert after(20, 1000) == 0  # the first slow window
    assert after(10, 1000) == pytest.approx(5)
    assert after(2, 1000) == pytest.approx(1)
    assert after(20, 1000) == pytest.approx(1)
    assert after(0.5, 10) == 0


def test_alerts_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ServerMetrics("m", False)
    config = ServerConfig(latency_baseline_requests=10)
    alerts = Alerts(config, metrics)
    caplog.set_level(logging.INFO, "megabit.serving")

    def ended(seconds: float, at: float) -> None:
        metrics.timed(RequestTimes(at - seconds, at - seconds, at, at), 1, 1)

    now = time.monotonic()
    for i in range(10):
        ended(1.0, now + i * 1e-6)
    alerts.judge(Stats(rank_memory=(10, 95), rank_memory_limit=(100, 100)))
    assert alerts.active.keys() == {"memory"}
    for i in range(10):
        ended(1.6, now + 1e-3 + i * 1e-6)
    alerts.judge(Stats(rank_memory=(10, 95), rank_memory_limit=(100, 100)))
    assert alerts.active.keys() == {"memory", "latency"}
    alerts.judge(Stats(rank_memory=(10, 20), rank_memory_limit=(100, 100)))
    assert alerts.active.keys() == {"latency"}
    for i in range(30):  # the median is 1.4 then, and it stays on; then 1.0
        ended(1.4, now + 2e-3 + i * 1e-6)
    alerts.judge(None)
    assert alerts.active.keys() == {"latency"}
    for i in range(100):
        ended(1.0, now + 3e-3 + i * 1e-6)
    alerts.judge(None)
    assert not alerts.active
    told = [record.message for record in caplog.records]
    assert len(told) == 4
    assert "rank 1 uses 95%" in told[0]
    assert "1.6 × its baseline" in told[1]
    assert told[2:] == ["Alert memory is over", "Alert latency is over"]
    text = metrics.exposition().decode()
    assert 'megabit_alert_active{alert="latency"} 0.0' in text
    assert 'megabit_alert_active{alert="memory"} 0.0' in text
    assert 'megabit_alert_baseline{alert="latency"} 1.0' in text


def test_counters_go_on_with_a_new_engine() -> None:
    metrics = ServerMetrics("m", False)
    metrics.report(Stats(preemptions=3, comm_bytes={"tp/exact16": 100.0}))
    metrics.new_engine()
    assert metrics.engine["num_preemptions"][""] == 3
    metrics.report(Stats(preemptions=2, comm_bytes={"pp/hidden": 5.0}))
    metrics.report(Stats(preemptions=4, comm_bytes={"pp/hidden": 7.0}))
    assert metrics.engine["num_preemptions"][""] == 7
    metrics.new_engine()
    metrics.new_engine()
    assert metrics.engine["comm_bytes"] == {"tp/exact16": 100.0, "pp/hidden": 7.0}
