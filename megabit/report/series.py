"""From rows to the lines of a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megabit.report.panels import Line, Panel
from megabit.report.run import Run, finite, look_up

MAX_POINTS = 10_000
"""On a page, so that it stays small however long a run was."""
COLORS = 8
"""How many a page has; further lines are dashed."""

Point = tuple[int, float | None]


@dataclass(frozen=True)
class Series:
    """One line: (step, value) in the order of steps; None is a gap."""

    label: str
    run: int
    """Which of the page's runs it belongs to."""
    color: int
    dash: int
    points: tuple[Point, ...]
    dots: bool = False

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points if value is not None]

    @property
    def last(self) -> float:
        return self.values[-1]


def series_of(panel: Panel, runs: Sequence[Run]) -> list[Series]:
    """The lines of a plot: of one run each in a color of its own, of several each run in one."""
    found = []
    for index, run in enumerate(runs):
        for line in panel.lines:
            rows = run.evaluations if line.is_evaluation else run.intervals
            for path, label in _metrics(line, rows):
                points = tuple((row["step"], finite(_find(row, path))) for row in rows)
                values = {value for _, value in points if value is not None}
                if values and not (panel.neutral is not None and values == {panel.neutral}):
                    found.append(Series(label, index, 0, 0, points, line.is_evaluation))
    labels = list(dict.fromkeys(line.label for line in found))
    if len(runs) > 1 and not panel.stacked:
        return [
            replace(
                line,
                label=" · ".join([runs[line.run].name, line.label][: min(2, len(labels))]),
                color=line.run % COLORS,
                dash=labels.index(line.label),
            )
            for line in found
        ]
    # Parts of a whole have colors of their own; of several runs, each has its own plot.
    places = [labels.index(line.label) for line in found]
    return [
        replace(line, color=place % COLORS, dash=place // COLORS)
        for line, place in zip(found, places, strict=True)
    ]


def differs(series: Sequence[Series]) -> bool:
    """Whether two lines that may be the same (objective and loss) are not, in any run."""
    by_run: dict[int, set[tuple[Point, ...]]] = {}
    for line in series:
        by_run.setdefault(line.run, set()).add(line.points)
    return any(len(lines) > 1 for lines in by_run.values())


def thinned(series: Series, limit: int, evenly: bool = False) -> Series:
    """At most about ``limit`` points: the least and the greatest of each stretch, as they were.

    Args:
        evenly: the last point of each stretch instead, at the same steps for all lines of a stack.
    """
    points = series.points
    if len(points) <= limit:
        return series
    count = max(1, limit if evenly else limit // 2)
    kept: list[Point] = []
    for index in range(count):
        stretch = points[len(points) * index // count : len(points) * (index + 1) // count]
        known = [(value, step) for step, value in stretch if value is not None]
        if evenly or not known:
            kept.append(stretch[-1])
            continue
        kept += sorted((step, value) for value, step in {min(known), max(known)})
    return replace(series, points=tuple(kept))


def _metrics(line: Line, rows: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[str, ...], str]]:
    """The path of each metric that ``line`` names, and its label."""
    if "*" not in line.metric:
        return [(tuple(line.metric.split(".")), line.label or line.metric.replace("_", " "))]
    before, after = line.metric.split(".*")
    names: dict[str, None] = {}
    for row in rows:
        table = look_up(row, before)
        names |= dict.fromkeys(table) if isinstance(table, Mapping) else {}
    rest = tuple(after.split(".")[1:])
    return [((*before.split("."), name, *rest), name) for name in names]


def _find(row: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Unlike ``look_up``, of a table whose own keys may have dots: names of layers and texts."""
    value: Any = row
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
