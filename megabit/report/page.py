"""The page as one text: style, plots, tables, and the numbers for the script, all within it."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from megabit.report.chart import chart, panel_data
from megabit.report.facts import comparison, differences, facts, state_of, tiles
from megabit.report.frame import MARKS, Frame, events_of, make_frame, marks
from megabit.report.heat import heat_map
from megabit.report.markup import embedded_json, escape, section
from megabit.report.panels import LAYER_PANELS, SECTIONS, Panel
from megabit.report.run import Run
from megabit.report.series import MAX_POINTS, Series, differs, series_of, thinned
from megabit.report.tables import accounting_table, evaluation_table, event_table


def make_page(runs: Sequence[Run]) -> str:
    """HTML of a run, or of several in comparison, the first of which is the main one."""
    frame = make_frame(runs)
    plots, data = _plots(frame)
    script, style = (
        (files("megabit.report") / "assets" / name).read_text(encoding="utf-8")
        for name in ("report.js", "report.css")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    # Nothing is loaded from anywhere, and no other script runs, whatever a file put into the page.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )
    title = " · ".join(run.name for run in runs)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} – megabit</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"{_switches(frame)}\n{_header(runs)}\n{_toolbar(frame)}\n<main>\n{marks(frame)}\n"
        f"{plots}\n{_tables(runs)}\n</main>\n"
        f'<script type="application/json" id="data">{embedded_json(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _header(runs: Sequence[Run]) -> str:
    main = runs[0]
    if len(runs) > 1:
        names = " · ".join(
            f'<span class="run"><i class="key c{place}"></i>{escape(run.name)}</span>'
            for place, run in enumerate(runs)
        )
        return f'<header><p class="kind">Comparison</p><h1>{names}</h1>{comparison(runs)}</header>'
    state = f'<span class="state">{escape(state_of(main))}</span>'
    return (
        f'<header><p class="kind">Training run</p><h1>{escape(main.name)} {state}</h1>'
        f"{facts(main)}{tiles(main)}</header>"
    )


def _switches(frame: Frame) -> str:
    """What the style sheet shows a scale by: so it works without the script."""
    names = [("x", "steps", True), ("y", "linear", True), ("y", "log", False)]
    if len(frame.axes) > 1:
        names.insert(1, ("x", "tokens", False))
    return "".join(
        f'<input class="switch" type="radio" name="{group}" id="{group}-{name}"'
        f'{" checked" if is_on else ""} aria-label="{_switch_label(group, name)}">'
        for group, name, is_on in names
    )


def _switch_label(group: str, name: str) -> str:
    return f"Horizontal axis: {name}" if group == "x" else f"Loss and gradient norm: {name} scale"


def _toolbar(frame: Frame) -> str:
    axes = "".join(f'<label for="x-{axis}">{axis}</label>' for axis, _ in frame.axes)
    scales = "".join(f'<label for="y-{name}">{name}</label>' for name in ("linear", "log"))
    counts = [(mark, len(events_of(frame.runs[0], mark))) for mark in MARKS]
    shown = "".join(
        f'<li><i class="flag {mark}"></i>{MARKS[mark]} <b>{count:,}</b></li>'
        for mark, count in counts
        if count
    )
    of = f" of {frame.runs[0].name}" if len(frame.runs) > 1 else ""
    events = f'<ul class="flags" aria-label="Events{escape(of)}">{shown}</ul>' if shown else ""
    return (
        '<nav class="toolbar" aria-label="Scales">'
        f'<div class="choice">{axes}</div>'
        f'<div class="pair"><span>loss, norms</span><div class="choice">{scales}</div></div>'
        f'{events}<output id="readout"></output></nav>'
    )


def _plots(frame: Frame) -> tuple[str, dict[str, Any]]:
    """All sections of plots, and their numbers."""
    chosen = [
        (part.title, [made for panel in part.panels for made in _shown(panel, frame)])
        for part in SECTIONS
    ]
    lines = sum(len(lines) for _, panels in chosen for _, lines in panels)
    limit = min(600, max(60, MAX_POINTS // max(1, lines)))
    steps: dict[tuple[int, tuple[int, ...]], int] = {}

    def place(series: Series) -> int:
        key = (series.run, tuple(step for step, _ in series.points))
        return steps.setdefault(key, len(steps))

    sections: list[str] = []
    panels: list[dict[str, Any]] = []
    for title, shown in chosen:
        figures = []
        for panel, full in shown:
            drawn = [thinned(series, limit, evenly=panel.stacked) for series in full]
            figures.append(chart(panel, drawn, frame, len(panels)))
            panels.append(panel_data(panel, drawn, place))
        wide = sum(panel.wide for panel, _ in shown)
        sections.append(section(title, _grid(figures, len(figures) - wide)))
    layers, heats = _layers(frame)
    data = {
        "axes": {axis: scale.high for axis, scale in frame.axes},
        "xs": [
            {
                axis: [
                    step if axis == "steps" else round(frame.runs[run].tokens_at(step))
                    for step in own
                ]
                for axis, _ in frame.axes
            }
            for run, own in steps
        ],
        "panels": panels,
        "heats": heats,
        "events": [
            {
                "at": {
                    axis: event.step if axis == "steps" else frame.runs[0].tokens_at(event.step)
                    for axis, _ in frame.axes
                },
                "mark": event.mark,
                "text": (event.name or event.text)[:120],
            }
            for event in frame.runs[0].events
            if event.mark != "checkpoint"  # seen as it is, and there may be very many
        ],
    }
    return "\n".join([*sections, layers]), data


def _shown(panel: Panel, frame: Frame) -> list[tuple[Panel, list[Series]]]:
    """The plots that a panel makes, with their lines: of parts of a whole, one for each run."""
    series = series_of(panel, frame.runs)
    if not series or (panel.title == "Objective" and not differs(series)):
        return []
    if not panel.stacked or len(frame.runs) == 1:
        return [(panel, series)]
    return [
        (replace(panel, title=f"{panel.title} · {run.name}"), own)
        for place, run in enumerate(frame.runs)
        if (own := [line for line in series if line.run == place])
    ]


def _grid(figures: Sequence[str], count: int) -> str:
    """In as many columns as leave the fewest places empty; ``count`` of them take one."""
    if not figures:
        return ""
    columns = 2 if count < 3 else min((3, 4), key=lambda columns: -count % columns)
    return f'<div class="grid of-{columns}">{"".join(figures)}</div>'


def _layers(frame: Frame) -> tuple[str, list[dict[str, Any]]]:
    figures: list[str] = []
    heats: list[dict[str, Any]] = []
    for panel in LAYER_PANELS:
        for place, run in enumerate(frame.runs):
            made = heat_map(panel, run, place, frame, len(heats))
            if made is not None:
                figures.append(made[0])
                heats.append(made[1])
    grid = _grid(figures, len(figures))
    return section("Layers", grid, "Each row is a layer, from the first to the last."), heats


def _tables(runs: Sequence[Run]) -> str:
    main = runs[0]
    sample = main.summary.get("sample") if len(runs) == 1 else None
    settings = (
        f"<details><summary>config.yaml</summary><pre>{escape(main.config_text)}</pre></details>"
        if main.config_text and len(runs) == 1
        else ""
    )
    return "\n".join(
        (
            section("Differences", differences(runs) if len(runs) > 1 else ""),
            section("Events", event_table(runs), "Newest first."),
            section("Evaluations", evaluation_table(runs), "Newest first."),
            section(
                "Bytes",
                accounting_table(main) if len(runs) == 1 else "",
                "Measured, beside what the configuration says.",
            ),
            section("Sample", f"<blockquote>{escape(sample)}</blockquote>" if sample else ""),
            section("Settings", settings),
        )
    )
