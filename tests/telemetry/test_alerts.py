"""Alert rules: what they say, when they fire, and which ones are refused."""

import math
from pathlib import Path
from typing import Any

import pytest

from megabit.config import AlertRule, load_config, shipped_alerts
from megabit.errors import UserError
from megabit.telemetry import AXES, AlertBook, GpuMetrics
from megabit.telemetry.alerts import Condition, lookup, metric_names
from megabit.telemetry.metrics import flatten
from megabit.telemetry.prometheus_names import INTERVAL_METRICS
from tests.telemetry.rows import full_metrics, metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "telemetry" / "alerts.yaml"
LAYER = "layers.model.layers.0.mlp.down_proj.code_flips"


def fired(rule: AlertRule, rows: list[dict[str, Any]]) -> list[int]:
    """The numbers of the rows at which it fires."""
    book = AlertBook([rule])
    return [number for number, row in enumerate(rows) if book.judge(row)]


def rows_of(name: str, *values: float | None) -> list[dict[str, Any]]:
    """Rows that are good but for a metric, with and without a number for it."""
    good = metrics(5).row()
    return [good if value is None else {**good, name: value} for value in values]


@pytest.mark.parametrize(
    ("when", "values", "expected"),
    [
        ("grad_norm > 10", (9.9, 10.0, 10.1), [2]),
        ("grad_norm >= 10", (9.9, 10.0), [1]),
        ("grad_norm < 10", (10.1, 10.0, 9.9), [2]),
        ("grad_norm<=1e1", (10.1, 10.0), [1]),
        ("  grad_norm   is nan ", (1.0, math.inf, math.nan), [2]),
        ("grad_norm > -5", (-6.0, 0.0), [1]),
        ("grad_norm > 10", (math.nan, math.inf), [1]),
        ("grad_norm < 10", (math.nan, -math.inf), [1]),
    ],
)
def test_a_condition(when: str, values: tuple[float, ...], expected: list[int]) -> None:
    assert fired(AlertRule("x", when), rows_of("grad_norm", *values)) == expected


@pytest.mark.parametrize(
    ("intervals", "values", "expected"),
    [
        (1, (1, 1, 1, 0, 1, 1), [0, 4]),
        (3, (1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1), [5, 12]),
        (2, (1, None, 1, 1, None, 1, 1), [3, 6]),
    ],
    ids=["once", "in-a-row", "absent"],
)
def test_it_fires_once_when_it_has_held_for_long_enough(
    intervals: int, values: tuple[float | None, ...], expected: list[int]
) -> None:
    """And again only after it has not held; a number that is not there breaks a row."""
    rule = AlertRule("x", "mfu > 0.5", intervals)
    assert fired(rule, rows_of("mfu", *values)) == expected


@pytest.mark.parametrize("when", ["gpu_utilization < 0.9", "gpu_utilization is nan", "mfu < 1"])
def test_what_is_absent_never_fires(when: str) -> None:
    assert fired(AlertRule("x", when), [metrics(step).row() for step in range(5)]) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exposed_s.tp", 0.02),
        ("time_s.forward_backward", 0.25),
        ("sent_by_purpose_mb.pp activation gradients", 0.3),
        ("gpu_power_w", 612.5),
        (LAYER, 5e-4),
    ],
)
def test_parts_of_tables_by_a_dot(name: str, value: float) -> None:
    row = full_metrics(5).row()
    assert lookup(row, name) == value
    assert fired(AlertRule("x", f"{name} >= {value}"), [row]) == [0]
    assert fired(AlertRule("x", f"{name} > {value}"), [row]) == []


def test_what_an_alert_says() -> None:
    rule = AlertRule("it explodes", "grad_norm > 10", 2, "checkpoint")
    book = AlertBook([AlertRule("calm", "grad_norm > 100"), rule])
    assert book.judge(metrics(5, grad_norm=12.0).row()) == []
    (alert,) = book.judge(metrics(10, grad_norm=12.5).row())
    assert alert.action == "checkpoint"
    event = alert.event(10)
    assert event.text == (
        "it explodes: grad_norm is 12.5 (grad_norm > 10, for 2 log intervals): checkpoint"
    )
    assert event.row() == {
        "step": 10,
        "event": {
            "kind": "alert",
            "name": "it explodes",
            "action": "checkpoint",
            "evidence": {"grad_norm": 12.5, "intervals": 2},
            "text": event.text,
        },
    }


def test_an_alert_says_whom_it_is_about() -> None:
    book = AlertBook([AlertRule("straggler", "straggler_ratio > 1.3"), AlertRule("x", "loss > 1")])
    row = metrics(5, straggler_ratio=1.75, straggler_rank=3).row()
    straggler, other = book.judge(row, {"straggler_ratio": "rank 3 on node-b"})
    assert straggler.text == (
        "straggler: straggler_ratio is 1.75, rank 3 on node-b (straggler_ratio > 1.3)"
    )
    assert straggler.event(5).evidence == {
        "straggler_ratio": 1.75,
        "intervals": 1,
        "where": "rank 3 on node-b",
    }
    assert "where" not in other.event(5).evidence


@pytest.mark.parametrize(
    ("when", "problem"),
    [
        ("grad_nrm > 10", "grad_nrm is no metric; did you mean grad_norm?"),
        ("exposed_s.ddp > 1", "exposed_s.ddp is no metric; did you mean exposed_s.dp?"),
        (
            "exposed_s > 1",
            "exposed_s is a table; name one of its parts: tp, pp, dp, dp_inter, outer, world",
        ),
        ("layers.x.code_flop > 1", "layers.x.code_flop is no metric; "),
        ("gpu.power_w > 1", "gpu.power_w is no metric; did you mean gpu_power_w?"),
        ("held_out_loss > 5", "held_out_loss is no metric; "),
        ("", "'' is no condition; write such as 'grad_norm > 10'"),
        ("grad_norm", "'grad_norm' is no condition; "),
        ("grad_norm == 10", "'grad_norm == 10' is no condition; "),
        ("grad_norm > ten", "'ten' is no number; "),
        ("grad_norm > nan", "'nan' is no limit that a metric can pass; "),
        ("1 < grad_norm < 10", "'1 < grad_norm < 10' is no condition; "),
        ("loss is infinite", "'loss is infinite' is no condition; "),
    ],
)
def test_a_condition_that_is_none_is_refused(when: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        AlertBook([AlertRule("fine", "loss is nan"), AlertRule("x", when)])
    (line,) = caught.value.problems
    assert line.startswith(f"telemetry.alerts[1].when: {problem}")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        AlertBook(
            [AlertRule("", "loss is nan"), AlertRule("x", "loss > 1", 0), AlertRule("x", "los > 1")]
        )
    places = [line.split(":")[0] for line in caught.value.problems]
    rules = ("[0].name", "[1].intervals", "[2].name", "[2].when")
    assert places == [f"telemetry.alerts{rule}" for rule in rules]


def test_the_shipped_rules() -> None:
    """Quiet in a good run, and each fires when it should."""
    rules = shipped_alerts()
    book = AlertBook(rules)
    good = GpuMetrics(utilization=0.97)
    for step in range(20):
        calm = {"grad_norm_std": 0.01, "exposed_share": 0.05, "data_share": 0.001}
        row = metrics(step, gpu=good, straggler_ratio=1.1, **calm).row()
        assert book.judge(row) == []
    bad = metrics(
        20,
        loss=math.nan,
        grad_norm=11.0,
        grad_norm_std=0.06,
        exposed_share=0.2,
        straggler_ratio=1.5,
        gpu=GpuMetrics(utilization=0.5),
    ).row()
    fired = [alert.rule for _ in range(20) for alert in book.judge(bad)]
    assert sorted(fired, key=rules.index) == rules


def test_the_example_is_what_is_shipped() -> None:
    config = load_config([str(EXAMPLE)])
    assert config.telemetry.alerts == shipped_alerts()


def test_there_is_a_name_for_every_number_of_a_row() -> None:
    """And every name has one, but those of layers, axes and purposes, of which there are many."""
    names = {name for name in metric_names() if not name.startswith("sent_by_purpose_mb.")}
    row = full_metrics(5).row()
    for table in ("sent_mb", "exposed_s"):
        row[table] |= dict.fromkeys(AXES, 0.0)
    numbers = {
        name.replace("/", ".")
        for name in flatten(row)
        if not name.startswith(("layers/", "sent_by_purpose_mb/"))
    }
    assert numbers == names
    keys = {metric.key.split(".")[0] for metric in INTERVAL_METRICS}
    assert keys == row.keys()
    assert Condition.parse(f"{LAYER} > 0.5") == Condition(LAYER, ">", 0.5)
