"""Timelines for people: as text for a terminal or a log, and as a picture."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

from rich.text import Text

from megabit.files import replacing
from megabit.pipeline.actions import Backward, Compute, Forward, InputGradient, WeightGradient
from megabit.pipeline.simulate import peak_activations
from megabit.pipeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What each kind is called, and its colour.
KINDS = {
    Forward: ("forward", "#5b93d6"),
    InputGradient: ("input gradient", "#f0914a"),
    WeightGradient: ("weight gradient", "#63b26a"),
    Backward: ("backward, fused", "#c5a33c"),
}
IDLE = "#ececec"


def kind_of(compute: Compute) -> str:
    """In words."""
    return KINDS[type(compute)][0]


def color_of(compute: Compute, chunks: int) -> str:
    """The colour of its kind; lighter for later ones of a rank's chunks."""
    color = KINDS[type(compute)][1]
    light = 0.55 * compute.chunk / max(1, chunks - 1)
    parts = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * light):02x}" for part in parts)


def _computes(timeline: Timeline) -> Iterator[Compute]:
    return (span.compute for spans in timeline.ranks for span in spans)


def _typical(timeline: Timeline) -> float:
    """The duration of a typical span, the shorter one if there are two kinds."""
    return median_low(
        span.duration for spans in timeline.ranks for span in spans if span.duration > 0
    )


# As text. A label is a compute as it writes itself: F3, and W3.1 on a rank's chunk 1. Where that is
# too long, and a rank has two chunks, lower case says chunk 1: w3. Where there is no room for a
# number, the letters stay.


def timeline_text(
    timeline: Timeline, width: int | None = None, duration: float | None = None
) -> str:
    """One row for each rank, time to the right and to scale; idle time is blank.

    Args:
        timeline: simulated or measured. What takes less than half a column may not be seen.
        width: columns, with the ranks' names; None for as many as labels need.
        duration: the time that they stand for, the same for timelines to compare; by default the
            timeline's own.
    """
    return "\n".join(
        "".join(text.ljust(columns, "-" if compute else " ") for text, columns, compute in row)
        for row in _rows(timeline, width, duration)
    )


def timeline_colored(
    timeline: Timeline, width: int | None = None, duration: float | None = None
) -> Text:
    """``timeline_text`` for a terminal: colour by kind, shade by chunk."""
    chunks = timeline.placement.chunks
    return Text("\n").join(
        Text.assemble(
            *(
                (text.ljust(columns), f"black on {color_of(compute, chunks)}" if compute else "")
                for text, columns, compute in row
            )
        )
        for row in _rows(timeline, width, duration)
    )


def label_width(timeline: Timeline, duration: float | None = None) -> int:
    """The columns with which labels fit."""
    return _width(timeline, _longest_label(timeline) + 1, duration)


def least_width(timeline: Timeline, duration: float | None = None) -> int:
    """The columns below which most spans have none of their own."""
    return _width(timeline, 1, duration)


def _width(timeline: Timeline, columns: int, duration: float | None) -> int:
    """With which a typical span gets so many ``columns``."""
    whole = timeline.duration if duration is None else duration
    return len(_name(0, timeline)) + math.ceil(columns * whole / _typical(timeline) - 1e-6)


def _longest_label(timeline: Timeline) -> int:
    return max(len(str(compute)) for compute in _computes(timeline))


def _name(rank: int, timeline: Timeline) -> str:
    return f"rank {rank:>{len(str(timeline.placement.ranks - 1))}}  "


def _rows(
    timeline: Timeline, width: int | None, duration: float | None
) -> Iterator[list[tuple[str, int, Compute | None]]]:
    """Each rank's row: texts, the columns that they are to fill, and what is computed there."""
    name = len(_name(0, timeline))
    columns = max(1, (width or label_width(timeline, duration)) - name)
    scale = columns / (timeline.duration if duration is None else duration)
    # Half of the cells have at least so many columns; labels are as long as these permit, and not
    # now long, now short.
    room = math.floor(_typical(timeline) * scale + 1e-6)
    is_short = room < _longest_label(timeline) and timeline.placement.chunks == 2

    def column(time: float) -> int:
        # Rounds halves up, also where a sum of costs is off by its last bit.
        return math.floor((time - timeline.start) * scale + 0.5 + 1e-6)

    def label(compute: Compute, columns: int) -> str:
        letters = compute.letters.lower() if compute.chunk else compute.letters
        whole = f"{letters}{compute.microbatch}" if is_short else str(compute)
        return whole if room > 1 and len(whole) <= columns else letters[:columns]

    for rank, spans in enumerate(timeline.ranks):
        row: list[tuple[str, int, Compute | None]] = [(_name(rank, timeline), name, None)]
        done = 0
        for span in spans:
            start, end = column(span.start), column(span.end)
            row.append(("", start - done, None))
            row.append((label(span.compute, end - start), end - start, span.compute))
            done = end
        yield row


# As a picture. Sizes are in inches, fonts in points.

ROW = 0.26
LEFT, RIGHT = 0.75, 0.2
TITLE, LEGEND, HEAD, BOTTOM = 0.42, 0.32, 0.36, 0.5
"""Heights; a head is above each panel. With the fonts, they grow in a wide picture."""
WIDTHS = (9.0, 28.0)
FONTS = (4.5, 8.0)
"""Of the numbers in bars"""
DIGIT = 0.64
"""Width of a digit, in the font's size"""


def draw_timelines(
    named: Mapping[str, Timeline], path: Path, title: str = "", unit: str = ""
) -> None:
    """Write a PNG: a panel for each timeline, a bar for each span, one scale of time for all.

    Colour tells the kind, shade the chunk, and the number is the microbatch, where it fits. The
    file is either whole or not there.
    """
    # Not at import time: matplotlib takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timelines = list(named.values())
    longest = max(timeline.duration for timeline in timelines)
    # So wide that numbers of 6 points fit.
    wanted = max(_room(timeline) * 6 / _typical(timeline) for timeline in timelines) * longest / 72
    width = min(max(LEFT + wanted + RIGHT, WIDTHS[0]), WIDTHS[1])
    grown = math.sqrt(width / WIDTHS[0])
    left = LEFT * grown
    inner = width - left - RIGHT

    panels = [ROW * len(timeline.ranks) for timeline in timelines]
    above = grown * (LEGEND + (TITLE if title else 0.1))
    height = above + sum(panels) + grown * (HEAD * len(panels) + BOTTOM)
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    if title:
        place = 1 - 0.12 * grown / height
        figure.text(0.5, place, title, ha="center", va="top", fontsize=13 * grown)
    _add_legend(figure, timelines, 1 - (above - LEGEND * grown) / height, 9 * grown)
    for (name, timeline), panel in zip(named.items(), panels, strict=True):
        above += HEAD * grown + panel
        box = (left / width, 1 - above / height, inner / width, panel / height)
        axes = figure.add_axes(box)
        _draw_panel(axes, timeline, inner * 72 / longest)
        axes.set_xlim(0, longest)
        axes.set_title(f"{name}: {_figures(timeline, unit)}", loc="left", fontsize=10 * grown)
        axes.tick_params(labelbottom=False, length=0, labelsize=8.5 * grown)
    axes.tick_params(axis="x", labelbottom=True, length=3)
    axes.set_xlabel(f"time ({unit})" if unit else "time", fontsize=10 * grown)

    with replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=130)


def _draw_panel(axes: "Axes", timeline: Timeline, points: float) -> None:
    """``points`` are those of a unit of time."""
    chunks = timeline.placement.chunks
    typical = _typical(timeline) * points
    font = min(max(typical / _room(timeline), FONTS[0]), FONTS[1])
    axes.axvspan(0, timeline.duration, color=IDLE, linewidth=0)
    for rank, spans in enumerate(timeline.ranks):
        axes.broken_barh(
            [(span.start - timeline.start, span.duration) for span in spans],
            (rank - 0.46, 0.92),
            facecolors=[color_of(span.compute, chunks) for span in spans],
            edgecolor="white",
            # Thin where bars are, so that their colour remains.
            linewidth=min(0.8, 0.08 * typical),
        )
        for span in spans:
            number = str(span.compute.microbatch)
            if len(number) * DIGIT * font <= span.duration * points:
                middle = (span.start + span.end) / 2 - timeline.start
                axes.text(middle, rank, number, ha="center", va="center_baseline", fontsize=font)
    ranks = len(timeline.ranks)
    axes.set_ylim(ranks - 0.5, -0.5)
    every = math.ceil(ranks / 16)
    axes.set_yticks(range(0, ranks, every), [f"rank {rank}" for rank in range(0, ranks, every)])
    for side in axes.spines.values():
        side.set_visible(False)


def _add_legend(figure: "Figure", timelines: Sequence[Timeline], top: float, font: float) -> None:
    """A colour for each kind that there is, and how much lighter the last chunk's are."""
    from matplotlib.patches import Patch

    used = {type(compute) for timeline in timelines for compute in _computes(timeline)}
    patches = [
        Patch(color=color, label=name) for kind, (name, color) in KINDS.items() if kind in used
    ]
    if any(timeline.placement.chunks > 1 for timeline in timelines):
        patches.append(Patch(color=color_of(Forward(0, 1), 2), label="forward, last chunk"))
    patches.append(Patch(color=IDLE, label="idle"))
    figure.legend(
        handles=patches,
        loc="upper center",
        bbox_to_anchor=(0.5, top),
        ncols=len(patches),
        frameon=False,
        fontsize=font,
        borderaxespad=0,
    )


def _figures(timeline: Timeline, unit: str) -> str:
    peak = max(peak_activations(timeline))
    time = f"{timeline.duration:.4g}" + (f" {unit}" if unit else "")
    return f"time {time}, bubble {timeline.bubble:.1%}, peak {peak:.4g} activations"


def _room(timeline: Timeline) -> float:
    """The width that the longest microbatch number needs, in the font's size."""
    return DIGIT * max(len(str(compute.microbatch)) for compute in _computes(timeline)) + 0.25
