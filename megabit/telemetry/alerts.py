"""Alert rules: a condition on the metrics of a log interval, how long it holds, what is done.

    when := METRIC (">" | ">=" | "<" | "<=") NUMBER | METRIC "is nan"

METRIC is a name of a row (``metrics.IntervalMetrics``), parts of a table by a dot, such as
``exposed_s.dp`` or ``layers.model.layers.0.mlp.down_proj.code_flips``. A number that is not there
(MFU without a peak, a GPU's temperature without a GPU) meets no condition.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal, get_args

from megabit.config import AlertRule
from megabit.errors import UserError
from megabit.reduce import Purpose
from megabit.telemetry.gpu import GPU_KEYS
from megabit.telemetry.metrics import AXES, PHASES, Event, IntervalMetrics, LayerMetrics, Row

Action = Literal["alert", "checkpoint", "stop"]

_OPERATORS = {
    ">=": lambda value, limit: value >= limit,
    "<=": lambda value, limit: value <= limit,
    ">": lambda value, limit: value > limit,
    "<": lambda value, limit: value < limit,
    "is": lambda value, _: math.isnan(value),
}
_COMPARISON = re.compile(r"(?P<metric>[^<>=]+?)\s*(?P<operator>>=|<=|>|<)\s*(?P<number>[^<>=]+)")
_IS_NAN = re.compile(r"(?P<metric>[^<>=]+?)\s+(?P<operator>is)\s+nan")
GRAMMAR = "write such as 'grad_norm > 10', 'exposed_s.dp >= 0.2' or 'loss is nan'"


@dataclass(frozen=True)
class Condition:
    """A parsed ``when``."""

    metric: str
    operator: str
    number: float
    """Not a number for ``is nan``."""

    @staticmethod
    def parse(when: str) -> "Condition":
        """Raises UserError, without the place of the rule."""
        text = when.strip()
        match = _IS_NAN.fullmatch(text) or _COMPARISON.fullmatch(text)
        if match is None:
            raise UserError(f"{when!r} is no condition; {GRAMMAR}")
        parts = match.groupdict()
        try:
            number = float(parts.get("number", "nan"))
        except ValueError:
            raise UserError(f"{parts['number']!r} is no number; {GRAMMAR}") from None
        if "number" in parts and not math.isfinite(number):
            raise UserError(f"{parts['number']!r} is no limit that a metric can pass; {GRAMMAR}")
        _check_name(parts["metric"])
        return Condition(parts["metric"], parts["operator"], number)

    def holds(self, value: float) -> bool:
        """Whether a number that is there meets it."""
        return bool(_OPERATORS[self.operator](value, self.number))


@dataclass(frozen=True)
class Alert:
    """A rule that fired."""

    rule: AlertRule
    metric: str
    value: float
    where: str = ""
    """Whom it is about, for people: a rank and its host."""

    @property
    def action(self) -> Action:
        """What the run is to do, beside saying so."""
        return self.rule.action

    @property
    def text(self) -> str:
        """For people."""
        count = self.rule.intervals
        during = "" if count == 1 else f", for {count} log intervals"
        where = f", {self.where}" if self.where else ""
        return (
            f"{self.rule.name}: {self.metric} is {self.value:.6g}{where} ({self.rule.when}{during})"
        )

    def event(self, step: int) -> Event:
        """For the log, after ``step`` steps."""
        return Event(
            step=step,
            kind="alert",
            name=self.rule.name,
            action=self.action,
            evidence={
                self.metric: self.value,
                "intervals": self.rule.intervals,
                **({"where": self.where} if self.where else {}),
            },
            text=self.text if self.action == "alert" else f"{self.text}: {self.action}",
        )


class AlertBook:
    """The rules of a run, and for how many intervals in a row each one's condition has held.

    All ranks judge the same rows, so all of them come to the same alerts.

    Raises:
        UserError: a rule is wrong; all that are, one line each.
    """

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        problems: list[str] = []
        self._rules: list[tuple[AlertRule, Condition]] = []
        self._held = [0] * len(rules)
        names = [rule.name for rule in rules]
        for number, rule in enumerate(rules):
            place = f"telemetry.alerts[{number}]"
            if not rule.name.strip():
                problems.append(f"{place}.name: must not be empty; it is what an alert says")
            elif rule.name in names[:number]:
                problems.append(f"{place}.name: {rule.name!r} is the name of another rule, too")
            if rule.intervals < 1:
                problems.append(f"{place}.intervals: must be at least 1, not {rule.intervals}")
            try:
                self._rules.append((rule, Condition.parse(rule.when)))
            except UserError as error:
                problems += [f"{place}.when: {problem}" for problem in error.problems]
        if problems:
            raise UserError(*problems)

    def judge(self, row: Row, where: Mapping[str, str] | None = None) -> list[Alert]:
        """The rules whose condition has now held for as many intervals as they ask for; each once,
        until its condition has not held in between.

        Args:
            where: whom a metric is about, by its name, where that is known.
        """
        alerts = []
        for index, (rule, condition) in enumerate(self._rules):
            value = lookup(row, condition.metric)
            if value is None or not condition.holds(value):
                self._held[index] = 0
                continue
            self._held[index] += 1
            if self._held[index] == rule.intervals:
                about = (where or {}).get(condition.metric, "")
                alerts.append(Alert(rule, condition.metric, value, about))
        return alerts


def lookup(row: Mapping[str, Any], name: str) -> float | None:
    """The number that a dotted name means; None if there is none. Keys may have dots themselves."""
    value = row.get(name)
    if isinstance(value, int | float):
        return value
    for key, table in row.items():
        if isinstance(table, Mapping) and name.startswith(f"{key}."):
            found = lookup(table, name.removeprefix(f"{key}."))
            if found is not None:
                return found
    return None


def metric_names() -> list[str]:
    """All names that a condition may have, but those of layers."""
    tables: dict[str, Sequence[str]] = {
        "time_s": PHASES,
        "exposed_s": AXES,
        "sent_mb": AXES,
        "sent_by_purpose_mb": [" ".join(pair) for pair in product(AXES, get_args(Purpose))],
        "gpu": (),
        "layers": (),
    }
    own = [field.name for field in fields(IntervalMetrics)]
    return [
        *(name for name in own if name not in tables),
        *(f"gpu_{key}" for key in GPU_KEYS),
        *(f"{table}.{key}" for table, keys in tables.items() for key in keys),
    ]


def _check_name(metric: str) -> None:
    names = metric_names()
    layer_keys = [field.name for field in fields(LayerMetrics)]
    first, _, rest = metric.partition(".")
    if metric in names or (first == "layers" and rest.rpartition(".")[2] in layer_keys):
        return
    if any(name.startswith(f"{metric}.") for name in names):
        parts = ", ".join(n.removeprefix(f"{metric}.") for n in names if n.startswith(f"{metric}."))
        raise UserError(f"{metric} is a table; name one of its parts: {parts}")
    near = difflib.get_close_matches(metric, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    raise UserError(f"{metric} is no metric; {hint}")
