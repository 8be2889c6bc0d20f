"""The horizontal axes that all plots of a page share: steps, and tokens where they are known."""

from collections.abc import Sequence
from dataclasses import dataclass

from megabit.report.run import Event, Run
from megabit.report.scale import Scale
from megabit.report.units import text_of

WIDTH, HEIGHT = 2000, 1000
"""Of a plot, in units of its own: it is stretched to whatever place it has."""


@dataclass(frozen=True)
class Frame:
    """Where a step of a run is, from left to right."""

    runs: tuple[Run, ...]
    axes: tuple[tuple[str, Scale], ...]
    """By name: ``steps`` and perhaps ``tokens``."""

    def x(self, axis: str, scale: Scale, run: int, step: float) -> float:
        """0 to 1."""
        return scale.place(step if axis == "steps" else self.runs[run].tokens_at(step))


def make_frame(runs: Sequence[Run]) -> Frame:
    """Axes from 0 to the end of the longest run."""
    last = max(1, *(run.last_step for run in runs))
    axes = [("steps", Scale(0, last))]
    if all(run.has_tokens for run in runs):
        axes.append(("tokens", Scale(0, max(run.tokens_at(run.last_step) for run in runs))))
    return Frame(tuple(runs), tuple(axes))


def x_labels(frame: Frame) -> str:
    """The numbers below a plot, for each axis."""
    parts = []
    for axis, scale in frame.axes:
        labels = []
        for value in scale.ticks(5):
            place = scale.place(value)
            side = ' class="end"' if place > 0.96 else ' class="start"' if place < 0.04 else ""
            labels.append(f'<span{side} style="left:{place:.2%}">{text_of(value, "count")}</span>')
        parts.append(f'<div class="x {axis}" aria-hidden="true">{"".join(labels)}</div>')
    return "".join(parts)


MARKS = {
    "checkpoint": "saved",
    "rollback": "rolled back",
    "guard": "guard",
    "alert": "alert",
}
"""Kinds of marks, in the order of painting, and their names for people."""


def marks(frame: Frame) -> str:
    """Events of the first run as lines, defined once; ``use_marks`` puts them into a plot."""
    groups = []
    for axis, scale in frame.axes:
        paths = []
        for mark in MARKS:
            places = {
                round(WIDTH * frame.x(axis, scale, 0, event.step))
                for event in events_of(frame.runs[0], mark)
            }
            top = HEIGHT - 50 if mark == "checkpoint" else 0
            if places:
                lines = "".join(f"M{x} {HEIGHT}V{top}" for x in sorted(places))
                paths.append(f'<path class="mark {mark}" d="{lines}"/>')
        groups.append(f'<g id="marks-{axis}">{"".join(paths)}</g>')
    return (
        '<svg class="defs" aria-hidden="true" width="0" height="0">'
        f"<defs>{''.join(groups)}</defs></svg>"
    )


def use_marks(frame: Frame) -> str:
    if not frame.runs[0].events:
        return ""
    return "".join(f'<use class="{axis}" href="#marks-{axis}"/>' for axis, _ in frame.axes)


def events_of(run: Run, mark: str) -> list[Event]:
    return [event for event in run.events if event.mark == mark]
