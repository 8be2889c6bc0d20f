"""The result for a terminal: one table for each layer and state of the caches.

A table has our contestants and their ratios to the baselines; the baselines' own figures are in
the CSV file. Of an implementation that ``default`` chose, only ``default`` is shown.
"""

from collections.abc import Iterator
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from megabit_kernels.benchmark.contestants import BASELINES
from megabit_kernels.benchmark.results import Result, Row
from megabit_kernels.benchmark.roofline import OPERANDS, Roofline

HEADINGS = {
    "fp32": "×fp32",
    "bf16": "×bf16",
    "int_mm": "×_int_mm",
    "fake_quantized": "×fake",
}
LEGEND = (
    "time: median; spread: the shortest and the 90th percentile against it. GOPS: of 2·M·N·K "
    "operations. GB/s: of bytes of weights. roof: how much of the bound named there was reached. "
    "×: the time of torch.mm in fp32 and bf16, of torch._int_mm and of a fake-quantized BitLinear, "
    "divided by this one."
)


def tables(result: Result) -> Iterator[Table]:
    """Tables in the order of measurement."""
    rows = [row for row in result.rows() if row.is_ours]
    chosen = {
        (*_group(row), row.m, row.implementation) for row in rows if row.contestant == "default"
    }
    shown = [row for row in rows if (*_group(row), row.m, row.contestant) not in chosen]
    for _, group in groupby(shown, _group):
        yield _table(list(group))


def describe_roofs(roofline: Roofline) -> str:
    """One line with the measured roofs."""
    peaks = ", ".join(f"{name} {roofline.peaks[name] / 1e9:,.0f}" for name in OPERANDS)
    return (
        f"{peaks} GOPS; memory {roofline.memory_bandwidth / 1e9:,.1f} GB/s, "
        f"cache {roofline.cache_bandwidth / 1e9:,.1f} GB/s"
    )


def describe_seconds(seconds: float) -> str:
    """About three digits and a unit."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{_digits(seconds * scale)} {unit}"
    return f"{_digits(seconds)} s"


def _group(row: Row) -> tuple[str, str, str]:
    return row.model, row.layer, row.caches


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    table = Table(
        title=f"{first.model} {first.layer}: {first.n} × {first.k}, {first.caches} caches",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("M", justify="right")
    table.add_column("contestant", no_wrap=True)
    for heading in ("time", "spread", "GOPS", "GB/s", "roof"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in BASELINES:
        table.add_column(HEADINGS[name], justify="right", no_wrap=True)
    for m, group in groupby(rows, lambda row: row.m):
        for index, row in enumerate(group):
            table.add_row(str(m) if index == 0 else "", *_cells(row))
    return table


def _cells(row: Row) -> Iterator[str | Text]:
    is_named = row.contestant == row.implementation
    yield row.contestant if is_named else f"{row.contestant} ({row.implementation})"
    yield Text(describe_seconds(row.median_us / 1e6), style="bold")
    yield _spread(row)
    yield f"{row.gops:,.0f}"
    yield f"{row.gb_per_s:,.1f}"
    mark = "!" if row.exceeds_roof else ""
    yield Text(f"{row.roof_percent:.0f} % {row.roof}{mark}", style="yellow" if mark else "")
    for name in BASELINES:
        times = row.times.get(name)
        yield "" if times is None else f"{_digits(times)}"


def _spread(row: Row) -> str:
    """Least and 90th percentile, as differences from the median in percent."""
    return f"{_change(row.min_us, row.median_us)} {_change(row.p90_us, row.median_us)} %"


def _change(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.0f}".replace("-", "−")


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
