"""``docs/benchmarks.md``: documents of measurements as Markdown. Every figure in it is of them."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from megabit.benchmark.document import Document, Part, Row, Sample
from megabit_kernels.benchmark.console import BUSY
from megabit_kernels.benchmark.machine import counted
from megabit_kernels.benchmark.tables import describe_seconds

HEAD = """\
# Benchmarks

Written by `megabit bench render` from the JSON files in `docs/results/benchmarks/`; a test compares
the two, so change neither by hand.

Each row has our time beside that of a baseline, which is named and was measured in the same run.
*Ratio*: how many times as fast as the baseline ours is, of median times; in brackets the lowest and
the highest of this one, that of the shortest times and that of the 90th percentiles. Behind a
median: the shortest and the 90th percentile against it, in percent, and of how many times. A ratio
below 1 means that the baseline is faster. Figures are of one machine at one time; yours will have
others, so measure there.

To repeat: `make bench` measures a CPU (about 12 minutes; other programs on the machine spoil it),
`make bench-gpu` one CUDA device (8 minutes). Both write `results.json` and a page like this one
below `runs/`, and leave this page alone. To publish, copy that file into
`docs/results/benchmarks/`, and run `make bench-docs`. All kernels at all shapes take longer:
`make bench-kernels`, see [kernels](../kernels/README.md).
"""
NO_CARD = """\
## GPUs

Not yet run on a GPU. `make bench-gpu` (`python -m megabit.benchmark.gpu`) has so far been run by
tests only, on a CPU with tiny shapes (`--device cpu --quick`). What only a GPU can show is
therefore untested in it: CUDA graphs and events, and what the driver tells.
"""
QUICK = "**Quick run: it shows that the benchmarks work, and no speed.**"

BUSY_WARNING = (
    "**Other programs were running (load {load:g} on {cores} cores): figures tell about them, too, "
    "and ratios are not to be relied on.**"
)


def render(documents: Sequence[Document]) -> str:
    """The page: a section for each document, CPUs first."""
    ordered = sorted(documents, key=lambda one: one.machine["device"] == "cuda")
    blocks = [HEAD.rstrip()]
    for document in ordered:
        blocks += _section(document)
    if all(document.machine["device"] != "cuda" for document in documents):
        blocks.append(NO_CARD.rstrip())
    return "\n\n".join(blocks) + "\n"


def _section(document: Document) -> Iterator[str]:
    machine = document.machine
    yield f"## {machine['name']}"
    if document.is_quick:
        yield QUICK
    if machine["load"] > BUSY * machine["cores"]:
        yield BUSY_WARNING.format(**machine)
    yield _table(("", ""), "ll", _facts(document))
    for part in document.parts:
        yield from _part(part)
    if document.failed:
        yield "### Not measured"
        yield "\n".join(f"- {name}: {reason}" for name, reason in document.failed.items())


def _facts(document: Document) -> Iterator[tuple[str, str]]:
    machine = document.machine
    gib = f"{machine['host_memory_bytes'] / 2**30:.0f} GiB of memory"
    if machine["device"] == "cuda":
        card = f"{machine['card_memory_bytes'] / 2**30:.0f} GiB"
        told = [f"driver {machine['driver']}"] if "driver" in machine else []
        yield "device", ", ".join([f"{machine['name']} ({machine['isa']})", card, *told])
        if "clock_mhz" in machine:
            yield (
                "card before",
                f"{machine['clock_mhz']} MHz, memory {machine['memory_clock_mhz']} MHz, "
                f"{machine['temperature_c']} °C, {machine['power_w']} of "
                f"{machine['power_limit_w']} W",
            )
        yield "host", f"{counted(machine['cores'], 'core')}, {gib}"
    else:
        yield "device", f"{counted(machine['cores'], 'core')}, {machine['isa']}, {gib}"
    yield "system", f"{machine['system']}; load before {machine['load']:g}"
    yield "versions", ", ".join(f"{name} {what}" for name, what in document.versions.items())
    changes = ", with changes that are not in it" if document.is_dirty else ""
    commit = f"`{document.commit[:12]}`{changes}" if document.commit else "not a checkout"
    yield "commit", commit
    minutes = sum(part.elapsed_s for part in document.parts) / 60
    date = datetime.fromisoformat(document.date)
    yield "when", f"{date:%Y-%m-%d %H:%M} UTC, {minutes:.0f} minutes of measuring"


def _part(part: Part) -> Iterator[str]:
    yield f"### {part.title}"
    if part.settings:
        settings = part.settings.items()
        yield "; ".join(f"{_words(name)} {_setting(name, value)}" for name, value in settings)
    if part.rows:
        extras = list(dict.fromkeys(name for row in part.rows for name in row.also))
        headings = ("what", "ours", "baseline", "ratio", *(_words(_stem(one)) for one in extras))
        rows = ([*_row(row), *(_extra(row, name) for name in extras)] for row in part.rows)
        yield _table(headings, "lllr" + "r" * len(extras), rows)
    if part.left_out:
        yield "\n".join(["Left out:", "", *(f"- {reason}" for reason in part.left_out)])
    if part.command:
        yield f"Repeat: `{part.command}`"


def _row(row: Row) -> list[str]:
    low, high = row.ratio_range
    return [
        row.what,
        _sample(row.ours, row.unit),
        _sample(row.baseline, row.unit),
        f"**{_digits(row.ratio)}** ({_digits(low)}–{_digits(high)})",
    ]


def _sample(sample: Sample, unit: str) -> str:
    timing = sample.timing
    if unit:
        value = f"{_digits(sample.amount / timing.median_s)} {unit}/s"
    else:
        value = describe_seconds(timing.median_s)
    spread = f"{_change(timing.min_s, timing.median_s)} {_change(timing.p90_s, timing.median_s)} %"
    return f"{sample.name}: {value} ({spread} of {timing.runs})"


def _extra(row: Row, name: str) -> str:
    return _setting(name, row.also[name]) if name in row.also else ""


def _stem(name: str) -> str:
    for ending in ("_bytes", "_share", "_s"):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name


def _words(name: str) -> str:
    return _stem(name).replace("_", " ")


def _setting(name: str, value: Any) -> str:
    """By the unit at the end of its name."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    if isinstance(value, str | Mapping) or value is None:
        return str(value)
    if name.endswith("_bytes"):
        return f"{value / 1e6:,.0f} MB"
    if name.endswith("_share"):
        return f"{value:.0%}"
    if name.endswith("_s"):
        return describe_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


def _change(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.0f}".replace("-", "−")


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _table(headings: Sequence[str], align: str, rows: Any) -> str:
    lines = [headings, ["---:" if side == "r" else "---" for side in align], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
