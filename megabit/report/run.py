"""What a run left in its folder: rows of metrics, events, and the files beside them."""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from megabit.errors import UserError
from megabit.telemetry.metrics import read_metrics

Row = Mapping[str, Any]

MAX_STEP = 2**53
"""Whatever is beyond is no step."""


@dataclass(frozen=True)
class Event:
    """Something that happened at a step: an alert, what the guard did, a checkpoint."""

    step: int
    kind: str
    name: str
    action: str
    text: str
    evidence: Mapping[str, Any]

    @property
    def mark(self) -> str:
        """How it is marked in plots: ``checkpoint``, ``rollback``, ``guard`` or ``alert``."""
        if self.action == "rollback":
            return "rollback"
        return self.kind if self.kind in ("checkpoint", "guard") else "alert"


@dataclass(frozen=True)
class Run:
    """A run's folder, read. Rows are in the order of steps, one for each step."""

    name: str
    config: Mapping[str, Any]
    config_text: str
    summary: Mapping[str, Any]
    """Empty while the run goes on."""
    accounting: Mapping[str, Any]
    intervals: tuple[Row, ...]
    evaluations: tuple[Row, ...]
    events: tuple[Event, ...]

    @property
    def last_step(self) -> int:
        """Of anything that is known."""
        rows = [*self.intervals, *self.evaluations]
        return max([row["step"] for row in rows] + [event.step for event in self.events])

    def setting(self, name: str) -> Any:
        """A setting by its dotted name; None if ``config.yaml`` has no such."""
        return look_up(self.config, name)

    @cached_property
    def _token_table(self) -> list[tuple[float, float]]:
        """(steps, tokens consumed), both rising."""
        table = [(0.0, 0.0)]
        for row in self.intervals:
            tokens = number(row, "consumed_tokens")
            if tokens is not None and row["step"] > table[-1][0] and tokens >= table[-1][1]:
                table.append((float(row["step"]), tokens))
        return table

    @property
    def has_tokens(self) -> bool:
        return len(self._token_table) > 1

    def tokens_at(self, step: float) -> float:
        """Tokens consumed after ``step`` steps, in a straight line between those that are known,
        and on from the last two."""
        table = self._token_table
        after = min(max(1, bisect_left(table, (step, 0.0))), len(table) - 1)
        (s0, t0), (s1, t1) = table[after - 1], table[after]
        return t0 + (t1 - t0) * (step - s0) / (s1 - s0) if s1 > s0 else t0


def look_up(tree: Mapping[str, Any], name: str) -> Any:
    """A value by its dotted name, or None."""
    value: Any = tree
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def number(row: Mapping[str, Any], name: str) -> float | None:
    """A finite number of a row by its dotted name; None if it has none."""
    return finite(look_up(row, name))


def finite(value: Any) -> float | None:
    """``value`` if it is a finite number; None for anything else that a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def load_run(folder: Path) -> Run:
    """Read a run's folder; a run that still goes on is fine.

    Raises:
        UserError: it is no run's folder, has no rows yet, or a file in it cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a folder; give that of a run (run.dir)")
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: is not there; give the folder of a run (run.dir)")
    try:
        rows = read_metrics(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({_reason(error)})") from error
    intervals: dict[int, Row] = {}
    evaluations: dict[int, Row] = {}
    events: list[Event] = []
    for row in rows:
        if not 0 <= row["step"] <= MAX_STEP:
            continue
        if isinstance(row.get("event"), dict):
            events.append(_event(row["step"], row["event"]))
        elif row.get("abandoned") is True:
            continue
        elif "held_out_loss" in row or "validation" in row:
            evaluations[row["step"]] = row
        else:
            intervals[row["step"]] = row
    if not (intervals or evaluations):
        raise UserError(f"{path}: has no metrics yet; wait for the first train.log_interval")
    config_text = _text(folder / "config.yaml")
    return Run(
        name=folder.resolve().name,
        config=_tree(folder / "config.yaml", config_text),
        config_text=config_text,
        summary=_tree(folder / "summary.json", _text(folder / "summary.json")),
        accounting=_tree(folder / "accounting.json", _text(folder / "accounting.json")),
        intervals=tuple(intervals[step] for step in sorted(intervals)),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        events=tuple(sorted(events, key=lambda event: event.step)),
    )


def _event(step: int, values: Mapping[str, Any]) -> Event:
    evidence = values.get("evidence")
    words = {key: str(values.get(key) or "") for key in ("kind", "name", "action", "text")}
    return Event(step=step, evidence=evidence if isinstance(evidence, dict) else {}, **words)


def _text(path: Path) -> str:
    """A file that may be missing, as it is while a run goes on."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({_reason(error)})") from error


def _tree(path: Path, text: str) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise UserError(f"{path}: is not {kind}; remove it, or restore it") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must hold keys and values; remove it, or restore it")
    return tree


def _reason(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return error.strerror or str(error)
