"""The result for a terminal: one table for each layer, state of the caches, threads.

A table has all contestants, ours first, and their ratios to the baselines. With several numbers of
threads there is a table for each, which compares them with the fewest.
"""

from collections.abc import Iterator
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from megabit_kernels.benchmark.contestants import BASELINES
from megabit_kernels.benchmark.machine import counted
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
SCALING_LEGEND = " ×1 thread and the like: the contestant's time with so many, divided by this one."


def tables(result: Result) -> Iterator[Table]:
    """Tables in the order of measurement."""
    groups: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in result.rows():  # those of several numbers of threads alternate
        groups.setdefault((row.model, row.layer, row.caches, row.threads), []).append(row)
    fewest = min(result.rooflines)
    for rows in groups.values():
        yield _table(rows, result.machine.with_threads(rows[0].threads), fewest)


def legend(result: Result) -> str:
    """What the columns of ``tables`` mean."""
    return LEGEND + SCALING_LEGEND if len(result.rooflines) > 1 else LEGEND


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


def _table(rows: list[Row], with_threads: str, fewest_threads: int) -> Table:
    first = rows[0]
    compares_threads = first.threads > fewest_threads
    table = Table(
        title=f"{first.model} {first.layer}: {first.n} × {first.k}, {first.caches} caches"
        + with_threads,
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
    if compares_threads:
        heading = f"×{counted(fewest_threads, 'thread')}"
        table.add_column(heading, justify="right", no_wrap=True)
    for m, group in groupby(rows, lambda row: row.m):
        for index, row in enumerate(group):
            cells = [*_cells(row), *([_ratio(row.scaling)] if compares_threads else [])]
            style = None if row.is_ours else "dim"
            table.add_row(str(m) if index == 0 else "", *cells, style=style)
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
        yield _ratio(row.times.get(name))


def _ratio(value: float | None) -> str:
    return "" if value is None else _digits(value)


def _spread(row: Row) -> str:
    """Least and 90th percentile, as differences from the median in percent."""
    return f"{_change(row.min_us, row.median_us)} {_change(row.p90_us, row.median_us)} %"


def _change(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.0f}".replace("-", "−")


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
