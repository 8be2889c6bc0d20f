"""A heat map of the layers: rows are layers, columns are steps; strength of one color is value."""

import base64
import re
import struct
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from megabit.report.chart import svg
from megabit.report.frame import Frame, use_marks, x_labels
from megabit.report.markup import escape
from megabit.report.panels import Panel
from megabit.report.run import Run, number
from megabit.report.scale import Scale
from megabit.report.units import text_of

COLUMNS = 200
COLOR = (57, 135, 229)
LEVELS = 255
"""Of strength; 0 is no value."""
MAX_LABELS = 26


def heat_map(
    panel: Panel, run: Run, run_index: int, frame: Frame, index: int
) -> tuple[str, dict[str, Any]] | None:
    """A heat map of one metric of all layers, and what the script needs to read values from the
    picture; None if no row has any."""
    metric = panel.lines[0].metric
    rows = [row for row in run.intervals if isinstance(row.get("layers"), Mapping)]
    # Layers that share an input (q, k, v) have some numbers once.
    names = sorted(
        {
            name
            for row in rows
            for name, layer in row["layers"].items()
            if _cell(layer, metric) is not None
        },
        key=_natural,
    )
    cells = [[_cell(row["layers"].get(name), metric) for row in rows] for name in names]
    values = [value for line in cells for value in line if value is not None]
    if not values:
        return None
    low, high = min(values), max(values)
    shades = Scale(low, high, log=low > 0 and high / low > 10)
    levels = [[_level(value, shades) for value in line] for line in cells]
    images = []
    for axis, scale in frame.axes:
        columns = _columns([frame.x(axis, scale, run_index, row["step"]) for row in rows])
        pixels = [bytes(0 if at is None else line[at] for at in columns) for line in levels]
        images.append(f'<img class="{axis}" alt="" src="data:image/png;base64,{_png(pixels)}">')
    height = max(90, min(460, 13 * len(names)))
    title = panel.title if len(frame.runs) == 1 else f"{panel.title} · {run.name}"
    ends = [text_of(value, panel.unit) for value in (low, high)]
    about = f"{title} of {len(names)} layers, between {ends[0]} and {ends[1]}"
    page = (
        f'<figure class="panel heat" data-heat="{index}">'
        f"<figcaption><h3>{escape(title)}</h3></figcaption>"
        f'<p class="legend"><span>{ends[0]}</span><i class="ramp"></i><span>{ends[1]}</span>'
        f'<span class="muted">{"&ensp;log scale" if shades.log else ""}</span>'
        '<b class="cell"></b></p>'
        f'<div class="plot" role="img" tabindex="0" aria-label="{escape(about)}">'
        f"{_labels(names, height)}"
        f'<div class="canvas" style="height:{height}px">{"".join(images)}{svg(use_marks(frame))}'
        f"</div>{x_labels(frame)}</div></figure>"
    )
    data = {"unit": panel.unit, "rows": names, "range": [low, high], "log": shades.log}
    return page, data


def _level(value: float | None, shades: Scale) -> int:
    """0 where there is no value, else 1 to ``LEVELS``."""
    if value is None:
        return 0
    return 1 + round((LEVELS - 1) * shades.place(value)) if shades.high > shades.low else LEVELS


def _cell(layer: Any, metric: str) -> float | None:
    return number(layer, metric) if isinstance(layer, Mapping) else None


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _columns(starts: Sequence[float]) -> list[int | None]:
    """For each column the row that it shows: an interval ends at its step, so the next one."""
    columns: list[int | None] = []
    for column in range(COLUMNS):
        at = bisect_right(starts, column / COLUMNS + 1e-9)
        columns.append(at if at < len(starts) else None)
    return columns


def _labels(names: Sequence[str], height: int) -> str:
    """Of all rows; where there is no room, of the first row of each layer, or of some layers."""
    short = [re.sub(r"^(model\.)?layers\.", "", name) for name in names]
    places = list(range(len(short)))
    if len(short) > MAX_LABELS:
        layers = [re.split(r"\D", name, maxsplit=1)[0] or name for name in short]
        places = [at for at in places if at == 0 or layers[at] != layers[at - 1]]
        every = -(-len(places) // MAX_LABELS)
        places, short = places[::every], layers
    width = min(110, 14 + max(6 * len(short[place]) for place in places))
    labels = "".join(
        f'<span style="top:{(place + 0.5) / len(short):.2%}">{escape(short[place])}</span>'
        for place in places
    )
    style = f"height:{height}px;width:{width}px"
    return f'<div class="y rows" aria-hidden="true" style="{style}">{labels}</div>'


def _png(pixels: Sequence[bytes]) -> str:
    """Base64 of a PNG with a palette of one color, from transparent to opaque."""
    palette = bytes(COLOR) * (LEVELS + 1)
    # What is least is still seen to be there.
    alpha = bytes([0, *(round(14 + (255 - 14) * level / LEVELS) for level in range(1, 256))])
    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 3, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + line for line in pixels), 9)
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"tRNS", alpha), (b"IDAT", data)]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in [*chunks, (b"IEND", b"")]
    )
    return base64.b64encode(png).decode("ascii")
