"""The roofline as a picture: how near to the machine's limits each contestant comes.

A product with M tokens does 2·M operations for each weight, so its intensity, operations for each
byte of weights, is a contestant's own multiple of M: 8 M for 2 bits a weight, 2 M for int8, M for
bf16 and M/2 for fp32. A contestant is a small dot for each layer and number of tokens, and a line
through the medians over layers.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from megabit_kernels.benchmark.contestants import BASELINES
from megabit_kernels.benchmark.roofline import Operands, Roofline

if TYPE_CHECKING:
    from megabit_kernels.benchmark.results import Caches, Result, Row

LINES = {
    # label, colour
    "default": ("megabit ternary_matmul", "#d1345b"),
    "bitlinear": ("megabit BitLinear, whole", "#f08a4b"),
    "int_mm": ("torch._int_mm", "#2a9d8f"),
    "bf16": ("torch.mm bf16", "#3a6ea5"),
    "fp32": ("torch.mm fp32", "#7d8597"),
    "fake_quantized": ("fake-quantized BitLinear", "#b79c5a"),
}
OTHER_COLOURS = ("#8e5aa8", "#5f8a3b", "#a34f2d", "#4b4e6d")
INK = "#2b2d42"
FAINT = "#9a9db0"
TITLES = {
    "cold": "Cold: another weight each time, from memory",
    "hot": "Hot: the same weight again",
}
PEAKS: dict[Operands, str] = {"int8": "int8", "bfloat16": "bf16", "float32": "fp32"}


def draw_roofline(result: "Result", png: Path) -> None:
    """Draw every contestant under the measured roofs, cold caches left and hot ones right.

    Of several numbers of threads the last.
    """
    threads, roofline = list(result.rooflines.items())[-1]
    rows = [row for row in result.rows() if row.threads == threads]
    present = {row.contestant for row in rows}
    lines = {name: line for name, line in _lines(result).items() if name in present}
    rows = [row for row in rows if row.contestant in lines]
    states: list[Caches] = [
        state for state in ("cold", "hot") if any(row.caches == state for row in rows)
    ] or ["cold"]
    figure = Figure(figsize=(1.6 + 5.8 * len(states), 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(states), sharex=True, sharey=True, squeeze=False)[0]
    for axes, state in zip(panels, states, strict=True):
        _prepare(axes, rows, roofline)
        _draw_roofs(axes, roofline, state)
        for name, (label, colour) in lines.items():
            own = [row for row in rows if row.contestant == name and row.caches == state]
            _draw_contestant(axes, own, label, colour, is_subject=name == "default")
        axes.set_xlabel("operations for each byte of weights", color=INK)
        axes.set_title(TITLES[state], loc="left", fontsize=11, color=INK, pad=10)
    panels[0].set_ylabel("10⁹ operations per second", color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    models = ", ".join(dict.fromkeys(row.model for row in rows))
    figure.legend(
        handles,
        labels,
        title=f"A dot for each layer of {models} and number of tokens M; lines through the medians",
        title_fontsize=9,
        fontsize=9.5,
        labelcolor=INK,
        loc="outside lower center",
        ncols=3 * len(states),
        frameon=False,
    )
    title = f"Ternary products on {result.machine}{result.machine.with_threads(threads)}"
    size = 6 + 3.5 * len(states)
    figure.suptitle(title, x=0.008, ha="left", fontsize=size, fontweight="bold", color=INK)
    figure.savefig(png, format="png")


def _lines(result: "Result") -> dict[str, tuple[str, str]]:
    """Label and colour of each contestant to draw, ours first.

    Of the other implementations, which ``default`` passed over, only those that were asked for.
    """
    asked = result.settings["implementations"]
    others = iter(OTHER_COLOURS * (1 + len(asked)))
    lines = {name: line for name, line in LINES.items() if name not in BASELINES}
    lines |= {name: (name, next(others)) for name in asked if name not in lines}
    return lines | {name: LINES[name] for name in BASELINES}


def _prepare(axes: Axes, rows: Sequence["Row"], roofline: Roofline) -> None:
    intensities = [_intensity(row) for row in rows] or [1.0]
    rates = [row.gops for row in rows] or [1.0]
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    ridge = max(roofline.peaks.values()) / roofline.cache_bandwidth
    axes.set_xlim(min(min(intensities) / 2, ridge / 8), max(intensities) * 3)  # slopes have room
    axes.set_ylim(min(rates) / 1.5, max(roofline.peaks.values()) / 1e9 * 1.6)
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(color="#eceef3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)


def _draw_roofs(axes: Axes, roofline: Roofline, state: "Caches") -> None:
    """Bandwidths as slopes, peaks as the ceilings at which they end."""
    left, right = axes.get_xlim()
    bottom, _ = axes.get_ylim()
    bandwidths = {"memory": roofline.memory_bandwidth / 1e9}
    if state == "hot":
        bandwidths["cache"] = roofline.cache_bandwidth / 1e9
    peaks = {PEAKS[operands]: peak / 1e9 for operands, peak in roofline.peaks.items()}
    highest, steepest = max(peaks.values()), max(bandwidths.values())
    for name, bandwidth in bandwidths.items():
        start = max(left, bottom / bandwidth)
        style = _roof_style(bandwidth == steepest)
        axes.plot([start, highest / bandwidth], [start * bandwidth, highest], **style)
        x, above = start * 1.2, 1.2 * bandwidth  # a parallel, on logarithmic axes
        axes.text(
            x,
            x * above,
            f"{name} {bandwidth:,.0f} GB/s",
            rotation=math.degrees(math.atan(above)),
            rotation_mode="anchor",
            transform_rotates_text=True,
            **LABEL,
        )
    for name, peak in peaks.items():
        axes.plot([peak / steepest, right], [peak, peak], **_roof_style(peak == highest))
        axes.annotate(
            f"{name}\n{peak:,.0f}",
            (right, peak),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            linespacing=0.95,
            annotation_clip=False,
            **LABEL,
        )


LABEL: dict[str, Any] = {"color": INK, "fontsize": 8.5}


def _roof_style(is_outer: bool) -> dict[str, Any]:
    if is_outer:
        return {"color": INK, "linewidth": 1.8, "solid_capstyle": "round"}
    return {"color": FAINT, "linewidth": 1.0, "linestyle": (0, (5, 3))}


def _draw_contestant(
    axes: Axes, rows: Sequence["Row"], label: str, colour: str, is_subject: bool
) -> None:
    tokens = sorted({row.m for row in rows})
    by_tokens = [[row for row in rows if row.m == m] for m in tokens]
    x = [float(np.median([_intensity(row) for row in same])) for same in by_tokens]
    y = [float(np.median([row.gops for row in same])) for same in by_tokens]
    axes.scatter(
        [_intensity(row) for row in rows],
        [row.gops for row in rows],
        s=14 if is_subject else 8,
        color=colour,
        alpha=0.45,
        linewidths=0,
        zorder=4 if is_subject else 2,
    )
    axes.plot(
        x,
        y,
        color=colour,
        label=label,
        linewidth=2.6 if is_subject else 1.5,
        marker="o",
        markersize=6 if is_subject else 3.5,
        markeredgecolor="white",
        markeredgewidth=0.8 if is_subject else 0.5,
        zorder=5 if is_subject else 3,
    )
    if is_subject:
        below: dict[str, Any] = {"xytext": (0, -16), "ha": "center"}
        beside: dict[str, Any] = {"xytext": (8, 0), "ha": "left", "va": "center"}
        for m, at in zip(tokens, zip(x, y, strict=True), strict=True):
            if m in LABELLED_TOKENS:
                axes.annotate(
                    f"M = {m:,}",
                    at,
                    **(below if len(tokens) > 1 else beside),  # dots of one M stand in a column
                    textcoords="offset points",
                    color=colour,
                    fontsize=8.5,
                    path_effects=[withStroke(linewidth=2.5, foreground="white")],
                    zorder=6,
                )


LABELLED_TOKENS = (1, 16, 256, 4096)


def _intensity(row: "Row") -> float:
    return 2 * row.m * row.n * row.k / row.weight_bytes
