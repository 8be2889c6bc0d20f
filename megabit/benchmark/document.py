"""What benchmarks have measured, as one JSON file: the only source of ``docs/benchmarks.md``.

A ``Document`` is of one machine and one commit. It has a ``Part`` for each benchmark, a part has
``Row``s, and a row is our time beside that of a named baseline of the same run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megabit.errors import UserError
from megabit.files import write_text
from megabit_kernels.benchmark.measure import Timing

FORMAT = "megabit benchmarks"
VERSION = 1
MAX_RAW = 64
"""Times that a sample keeps one by one; of more there is the summary."""


@dataclass(frozen=True)
class Sample:
    """The times of one contestant."""

    name: str
    timing: Timing
    seconds: tuple[float, ...] = ()
    """One by one, in the order of measurement, if there were not too many."""
    amount: float = 1.0
    """What is done in such a time, in ``Row.unit``."""

    @staticmethod
    def of(name: str, seconds: Sequence[float], amount: float = 1.0) -> "Sample":
        raw = tuple(seconds) if len(seconds) <= MAX_RAW else ()
        return Sample(name, Timing.of(seconds), raw, amount)


@dataclass(frozen=True)
class Row:
    """A comparison."""

    what: str
    ours: Sample
    baseline: Sample
    unit: str = ""
    """Of the amounts, such as ``tokens``; empty: times count, not rates."""
    also: Mapping[str, float] = field(default_factory=dict)
    """What else was found, its unit at the end of the name: ``_bytes``, ``_s``, ``_share``, or
    nothing."""

    @property
    def ratio(self) -> float:
        """How many times as fast as the baseline ours is: of the median times."""
        return self._ratio(self.baseline.timing.median_s, self.ours.timing.median_s)

    @property
    def ratio_range(self) -> tuple[float, float]:
        """Lowest and highest of the ratios of median, shortest and 90th-percentile times."""
        ours, baseline = self.ours.timing, self.baseline.timing
        of_shortest = self._ratio(baseline.min_s, ours.min_s)
        of_long = self._ratio(baseline.p90_s, ours.p90_s)
        ratios = self.ratio, of_shortest, of_long
        return min(ratios), max(ratios)

    def _ratio(self, baseline_s: float, ours_s: float) -> float:
        return (self.ours.amount / ours_s) / (self.baseline.amount / baseline_s)


@dataclass(frozen=True)
class Part:
    """One benchmark."""

    name: str
    title: str
    settings: Mapping[str, Any]
    """What was measured, and how."""
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()
    """What was not measured, each with its reason."""
    command: str = ""
    """Which repeats it."""
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class Document:
    """Everything that was measured on one machine."""

    commit: str
    """Empty where the sources are no git checkout."""
    is_dirty: bool
    """Whether the sources were not those of the commit."""
    date: str
    """UTC, ISO 8601."""
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    parts: tuple[Part, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    """By part: why there is none."""
    is_quick: bool = False
    """Then it shows that the benchmarks run, and no speed."""

    def with_parts(self, *parts: Part) -> "Document":
        """The same with these parts instead."""
        return replace(self, parts=parts)

    def to_json(self) -> str:
        whole = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"

    def write(self, path: Path) -> None:
        """The file is whole or not there."""
        write_text(path, self.to_json())

    @staticmethod
    def read(path: Path) -> "Document":
        """What ``write`` wrote.

        Raises:
            UserError: it cannot be read, or is something else.
        """
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: cannot read it ({error.strerror})") from error
        except ValueError as error:
            raise UserError(f"{path}: is not JSON ({error})") from error
        found = (whole.get("format"), whole.get("version")) if isinstance(whole, dict) else None
        if found != (FORMAT, VERSION):
            raise UserError(f"{path}: is not a file of {FORMAT}, version {VERSION}; measure anew")
        try:
            return _document(whole)
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}: something is missing or wrong ({error})") from error


def _document(whole: dict[str, Any]) -> Document:
    values = {name: value for name, value in whole.items() if name not in ("format", "version")}
    return Document(**{**values, "parts": tuple(map(_part, whole["parts"]))})


def _part(value: dict[str, Any]) -> Part:
    rows, left_out = tuple(map(_row, value["rows"])), tuple(value["left_out"])
    return Part(**{**value, "rows": rows, "left_out": left_out})


def _row(value: dict[str, Any]) -> Row:
    return Row(**{**value, "ours": _sample(value["ours"]), "baseline": _sample(value["baseline"])})


def _sample(value: dict[str, Any]) -> Sample:
    timing = Timing(**value["timing"])
    return Sample(**{**value, "timing": timing, "seconds": tuple(value["seconds"])})
