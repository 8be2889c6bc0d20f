"""A diagnosis for a terminal, and as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megabit.doctor import clocks, collectives, disk, gpu, interfaces, links, products, storage
from megabit.doctor.examine import Diagnosis
from megabit.doctor.finding import Severity, worst_first
from megabit.doctor.links import Links
from megabit.units import counted, rate_text, size_text

FORMAT = 1
"""Version of the JSON."""
MAX_MATRIX = 16
MAX_RANKS = 32
STYLES: dict[Severity, str] = {"wrong": "bold red", "warning": "yellow", "note": "dim"}


def print_diagnosis(found: Diagnosis, checkpoint_bytes: float, console: Console) -> None:
    """What was measured, then what is wrong, then one line that says how many things that are."""
    console.print(_ranks(found))
    console.print(_measured(found, checkpoint_bytes))
    if found.collectives:
        console.print(_collectives(found))
    for each in (found.hosts, *found.locals):
        if each is not None and 2 < len(each.members) <= MAX_MATRIX:
            console.print(_matrix(found, each))
    for finding in worst_first(found.findings):
        line = Text(f"{finding.severity:<8} ", style=STYLES[finding.severity])
        line.append(f"{finding.check}: {finding.what}", style="default")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Padding(Text(f"→ {finding.advice}", style="dim"), (0, 0, 0, 9)))
    console.print(verdict(found), soft_wrap=True)


def verdict(found: Diagnosis) -> str:
    """``Nothing is wrong.`` or ``2 things are wrong, 1 warning.``"""
    wrong = sum(finding.severity == "wrong" for finding in found.findings)
    warnings = sum(finding.severity == "warning" for finding in found.findings)
    text = {0: "Nothing is wrong", 1: "1 thing is wrong"}.get(wrong, f"{wrong} things are wrong")
    return text + (f", {counted(warnings, 'warning')}." if warnings else ".")


def to_json(found: Diagnosis) -> str:
    """All measurements and findings."""
    tree = {"format": FORMAT, "is_fine": found.is_fine, **asdict(found)}
    settings = [software.pop("settings") for software in tree["software"]]
    tree["settings"] = settings[0]  # what differs is a finding
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


def _ranks(found: Diagnosis) -> Table:
    """Who is where; hosts only, where there are many ranks."""
    places = found.cluster.places
    hosts = len(found.cluster.hosts)
    title = f"{counted(len(places), 'rank')} on {counted(hosts, 'host')}"
    if len(places) > MAX_RANKS:
        table = _table(title, "host", "ranks", "first rank's device")
        for host in found.cluster.hosts:
            table.add_row(host.name, str(len(host.ranks)), places[host.speaker].device)
        return table
    table = _table(title, "rank", "host", "process", "device")
    for place in places:
        name = found.cluster.host_of(place.rank).name
        table.add_row(str(place.rank), name, str(place.pid), place.device)
    return table


def _measured(found: Diagnosis, checkpoint_bytes: float) -> Table:
    table = _table("Measured", "", "")
    table.show_header = False
    for name, text in _figures(found, checkpoint_bytes):
        table.add_row(name, text)
    return table


def _figures(found: Diagnosis, checkpoint_bytes: float) -> Iterator[tuple[str, str]]:
    own = found.software[0]
    yield "software", f"megabit {own.megabit}, torch {own.torch}, Python {own.python}"
    if found.machines:
        first = found.machines[0]
        yield (
            "processors",
            f"{first.cores} cores, {len(first.allowed)} allowed, "
            f"{counted(first.threads, 'thread')} on each rank, "
            f"kernels for {first.isa or 'none'}",
        )
        least = min(found.machines, key=lambda machine: machine.free_bytes)
        yield (
            "memory",
            f"{size_text(least.free_bytes)} of {size_text(least.memory_bytes)} free on the host "
            "with the least",
        )
    yield from gpu.figures(found.gpus)
    if found.interfaces:
        on_gpu = any(place.device != "cpu" for place in found.cluster.places)
        yield from interfaces.figures(found.interfaces, on_gpu)
    yield from clocks.figures(found.clocks, found.cluster)
    if found.storage is not None:
        yield from storage.figures(found.storage, checkpoint_bytes)
    yield from disk.figures(found.disks, checkpoint_bytes)
    for each in (found.hosts, *found.locals[:1]):
        if each is not None:
            yield from links.figures(each)
    if found.products:
        yield from products.figures(found.products)


def _collectives(found: Diagnosis) -> Table:
    table = _table(
        "Collectives over all ranks, against a ring over the slowest link",
        "operation",
        *("size", "time", "expected", "×", "algbw", "busbw"),
    )
    for row in collectives.rows(found.collectives):
        table.add_row(*row)
    return table


def _matrix(found: Diagnosis, of: Links) -> Table:
    """Rates from each row to each column."""
    names = {
        rank: found.cluster.host_of(rank).name if of.between == "hosts" else str(rank)
        for rank in of.members
    }
    rates = {
        **{(pair.first, pair.second): pair.rate_there for pair in of.pairs},
        **{(pair.second, pair.first): pair.rate_back for pair in of.pairs},
    }
    title = f"From {of.between} in rows to {of.between} in columns"
    if of.between == "ranks" and len(found.cluster.hosts) > 1:
        title += f" on {found.cluster.host_of(of.members[0]).name}"
    table = _table(title, "", *names.values())
    for sender, name in names.items():
        cells = [
            rate_text(rates[sender, receiver]) if (sender, receiver) in rates else ""
            for receiver in names
        ]
        table.add_row(name, *cells)
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right" if len(others) > 3 else "left")
    return table
