"""The dashboard in examples/: it asks for what is exported, and for all of it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megabit.telemetry.prometheus_names import PROMETHEUS_METRICS

PATH = Path(__file__).resolve().parents[2] / "examples" / "telemetry" / "grafana.json"
NAMES = {metric.name: metric for metric in PROMETHEUS_METRICS}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(PATH.read_text(encoding="utf-8"))


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    """All that Prometheus is asked."""
    for panel in panels(dashboard):
        yield from (target["expr"] for target in panel["targets"])
    yield from (annotation["expr"] for annotation in dashboard["annotations"]["list"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def metrics_in(expression: str) -> list[str]:
    return re.findall(r"\bmegabit_\w+", re.sub(r'"[^"]*"', "", expression))


def test_every_panel_asks_for_what_is_exported(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            names = metrics_in(target["expr"])
            assert names, panel["title"]
            assert set(names) <= NAMES.keys(), panel["title"]
    for expression in expressions(dashboard):
        assert set(metrics_in(expression)) <= NAMES.keys(), expression


def test_every_metric_is_on_a_panel(dashboard: dict[str, Any]) -> None:
    shown = {
        name
        for panel in panels(dashboard)
        for target in panel["targets"]
        for name in metrics_in(target["expr"])
    }
    assert shown == NAMES.keys()


def test_labels_are_those_that_the_metric_has(dashboard: dict[str, Any]) -> None:
    """In legends and in aggregations; ``instance`` and ``job`` are Prometheus' own."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            (metric,) = (NAMES[name] for name in metrics_in(target["expr"]))
            used = re.findall(r"{{(\w+)}}", target["legendFormat"])
            used += re.findall(r"by \((\w+)\)", target["expr"])
            assert set(used) <= {"instance", *metric.labels}, target
            # Lines that differ in a label only would have the same name.
            assert set(metric.labels) <= set(used), target


def test_it_can_be_imported(dashboard: dict[str, Any]) -> None:
    assert dashboard["schemaVersion"] >= 39
    assert dashboard["id"] is None
    assert "datasource" in [v["name"] for v in dashboard["templating"]["list"]]
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Training", "Stability", "Ternary", "Communication", "Hardware"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    sources = {json.dumps(panel["datasource"]) for panel in panels(dashboard)}
    assert sources == {'{"type": "prometheus", "uid": "${datasource}"}'}
    for panel in panels(dashboard):
        assert panel["description"]
        assert panel["title"]


def test_no_two_panels_share_a_place(dashboard: dict[str, Any]) -> None:
    places = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24
