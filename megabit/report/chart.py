"""A plot as HTML: lines in an SVG that is stretched to its place, text beside it, never stretched.

Every scale that a reader can choose is drawn here; the page shows one of them by its style sheet
alone. The script adds the read-out and draws nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megabit.report.frame import HEIGHT, WIDTH, Frame, use_marks, x_labels
from megabit.report.markup import escape
from megabit.report.panels import Panel
from megabit.report.scale import Scale, scale_of
from megabit.report.series import Point, Series
from megabit.report.units import axis_text, largest_unit, text_of

Placed = tuple[int, int]


def chart(panel: Panel, series: Sequence[Series], frame: Frame, index: int) -> str:
    """A plot of ``series``, of which there is one at least.

    Args:
        index: the plot's number in the data for the script.
    """
    scales = scales_of(panel, series)
    drawn = [
        _grid(panel, scale, name) + _curves(panel, series, frame, scale, name)
        for name, scale in scales.items()
    ]
    note = f'<p class="about">{escape(panel.about)}</p>' if panel.about else ""
    return (
        f'<figure class="panel{" wide" if panel.wide else ""}" data-panel="{index}">'
        f"<figcaption><h3>{escape(panel.title)}</h3>{note}</figcaption>"
        f"{legend(panel, series)}"
        f'<div class="plot" role="img" tabindex="0" aria-label="{summary(panel, series)}">'
        f"{''.join(_y_labels(panel, scale, name) for name, scale in scales.items())}"
        f'<div class="canvas">{svg("".join(drawn) + use_marks(frame))}</div>'
        f"{x_labels(frame)}</div></figure>"
    )


def scales_of(panel: Panel, series: Sequence[Series]) -> dict[str, Scale]:
    """Vertical scales by the classes of the elements that they are for."""
    tops = _stacked(series) if panel.stacked else [line.points for line in series]
    values = [value for points in tops for _, value in points if value is not None]
    reference = [panel.reference.value] if panel.reference else []
    linear = scale_of([*values, *reference], from_zero=panel.from_zero)
    if not panel.log or not any(value > 0 for value in values):
        return {"linear log": linear}
    return {"linear": linear, "log": scale_of([*values, *reference], log=True)}


def legend(panel: Panel, series: Sequence[Series]) -> str:
    """What each line is, and its last value; the script puts that under the pointer there."""
    items = "".join(
        f'<li><i class="key c{line.color} d{line.dash % 3}"></i><span>{escape(line.label)}</span> '
        f"<b>{text_of(line.last, panel.unit)}</b></li>"
        for line in series
    )
    if panel.reference:
        items += f'<li class="muted"><i class="key ref"></i>{escape(panel.reference.label)}</li>'
    return f'<ul class="legend">{items}</ul>'


def summary(panel: Panel, series: Sequence[Series]) -> str:
    """The plot in words, for those who do not see it."""
    parts = []
    for line in series:
        values = [text_of(value, panel.unit) for value in (*line.values[:1], *line.values[-1:])]
        low, high = (text_of(end(line.values), panel.unit) for end in (min, max))
        way = f"{values[0]} at first, {values[-1]} at last, between {low} and {high}"
        parts.append(f"{line.label}: {way}")
    return escape(f"{panel.title}. " + "; ".join(parts))


def panel_data(panel: Panel, series: Sequence[Series], places: Callable[[Series], int]) -> Any:
    """What the script needs to know of a plot; ``places`` gives the number of a line's steps."""
    return {
        "unit": panel.unit,
        "scales": {
            name.split()[0]: [scale.low, scale.high]
            for name, scale in scales_of(panel, series).items()
        },
        "series": [
            {
                "x": places(line),
                "y": [None if v is None else float(f"{v:.5g}") for _, v in line.points],
                "dot": not panel.stacked,
            }
            for line in series
        ],
    }


def svg(content: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f"{content}</svg>"
    )


def _y(scale: Scale, value: float) -> int:
    return round(HEIGHT * (1 - scale.place(value)))


def _ticks(panel: Panel, scale: Scale) -> list[float]:
    return scale.ticks(unit=largest_unit(scale.high, panel.unit))


def _grid(panel: Panel, scale: Scale, name: str) -> str:
    lines = "".join(f"M0 {_y(scale, tick)}H{WIDTH}" for tick in _ticks(panel, scale))
    grid = f'<path class="grid {name}" d="{lines}"/>'
    if panel.reference is None:
        return grid
    line = f"M0 {_y(scale, panel.reference.value)}H{WIDTH}"
    return grid + f'<path class="reference {name}" d="{line}"/>'


def _y_labels(panel: Panel, scale: Scale, name: str) -> str:
    labels = "".join(
        f'<span style="bottom:{scale.place(tick):.2%}">{axis_text(tick, panel.unit)}</span>'
        for tick in _ticks(panel, scale)
    )
    return f'<div class="y {name}" aria-hidden="true">{labels}</div>'


def _curves(panel: Panel, series: Sequence[Series], frame: Frame, scale: Scale, name: str) -> str:
    groups = []
    tops = _stacked(series) if panel.stacked else [line.points for line in series]
    for axis, x_scale in frame.axes:
        shapes = []
        for place, (line, points) in enumerate(zip(series, tops, strict=True)):
            runs = [
                [
                    (round(WIDTH * frame.x(axis, x_scale, line.run, step)), _y(scale, value))
                    for step, value in stretch
                ]
                for stretch in _stretches(points)
            ]
            style = f"c{line.color} d{line.dash % 3}"
            if panel.stacked:
                below = tops[place - 1] if place else [(step, 0.0) for step, _ in points]
                floor = {
                    round(WIDTH * frame.x(axis, x_scale, line.run, step)): _y(scale, value or 0.0)
                    for step, value in below
                }
                shapes.append(f'<path class="area {style}" d="{_areas(runs, floor)}"/>')
                continue
            shape = f'<path class="line {style}" d="{_lines(runs)}"/>'
            dots = [point for run in runs for point in run if line.dots or len(run) == 1]
            if dots:
                path = "".join(f"M{x} {y}h0" for x, y in dots)
                shape += f'<path class="dots {style}" d="{path}"/>'
            shapes.insert(0, shape)  # painted last: the first line, that of the main run
        groups.append(f'<g class="{axis} {name}">{"".join(shapes)}</g>')
    return "".join(groups)


def _stretches(points: Sequence[Point]) -> Iterator[list[tuple[int, float]]]:
    """The points between gaps."""
    stretch: list[tuple[int, float]] = []
    for step, value in points:
        if value is not None:
            stretch.append((step, value))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _lines(runs: Sequence[Sequence[Placed]]) -> str:
    return "".join("M" + "L".join(f"{x} {y}" for x, y in run) for run in runs if len(run) > 1)


def _areas(runs: Sequence[Sequence[Placed]], floor: dict[int, int]) -> str:
    """Each closed along what is below it; one point alone becomes a narrow bar."""
    parts = []
    for run in runs:
        edge = [(x, y, floor.get(x, HEIGHT)) for x, y in run]
        if len(edge) == 1:
            x, y, bottom = edge[0]
            edge = [(x - 12, y, bottom), (x + 12, y, bottom)]
        there = "L".join(f"{x} {y}" for x, y, _ in edge)
        back = "L".join(f"{x} {bottom}" for x, _, bottom in reversed(edge))
        parts.append(f"M{there}L{back}Z")
    return "".join(parts)


def _stacked(series: Sequence[Series]) -> list[tuple[Point, ...]]:
    """Each line on top of those before; a step counts where any of them is known."""
    total: dict[int, float] = {}
    tops = []
    known = {step for line in series for step, value in line.points if value is not None}
    for line in series:
        points: list[Point] = []
        for step, value in line.points:
            total[step] = total.get(step, 0.0) + (value or 0.0)
            points.append((step, total[step] if step in known else None))
        tops.append(tuple(points))
    return tops
