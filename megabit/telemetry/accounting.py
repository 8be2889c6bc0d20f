"""What a step sends and what a rank keeps, measured and by formula, as tables for people."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Accounting:
    """Bytes as counted while training ran, beside what the configuration says (``training.traffic``
    and ``training.memory``). The two are equal, or one of them is wrong; only an overflow of
    ``row_reduce: exact16`` sends more than is expected."""

    sent_by_purpose_mb: dict[str, float]
    """MB that all ranks together send in a step, by axis and purpose."""
    expected_sent_by_purpose_mb: dict[str, float]
    megatron_sent_mb: dict[str, float]
    """For comparison, what Megatron-LM's distributed optimizer would send over dp."""
    rank: int
    """The one whose memory this is: that with the largest, of those that differ if any do."""
    memory_mib: dict[str, float]
    """MiB that stay from step to step, by what they are."""
    expected_memory_mib: dict[str, float]
    megatron_memory_mib: dict[str, float]
    """For comparison, what a rank would keep there."""
    peak_memory_mib: float
    """Of the process that had most, up to now."""

    @property
    def agrees(self) -> bool:
        """Whether all that is measured is as expected."""
        return all(
            is_same(*pair)
            for pair in (
                *_pairs(self.sent_by_purpose_mb, self.expected_sent_by_purpose_mb).values(),
                *_pairs(self.memory_mib, self.expected_memory_mib).values(),
            )
        )

    def expected_by_axis(self) -> dict[str, float]:
        """MB that all ranks together should send in a step."""
        total: dict[str, float] = {}
        for name, megabytes in self.expected_sent_by_purpose_mb.items():
            axis = name.split(" ", 1)[0]
            total[axis] = total.get(axis, 0.0) + megabytes
        return total

    def tables(self) -> list[Table]:
        """For the console; nothing of traffic where nothing is sent."""
        traffic = _table("Sent in a step, all ranks together", "axis", "purpose", unit="MB")
        for name, pair in _pairs(self.sent_by_purpose_mb, self.expected_sent_by_purpose_mb).items():
            rival = _rival(self.megatron_sent_mb, name)
            traffic.add_row(*name.split(" ", 1), *_compared(*pair), rival)
        memory = _table(f"What rank {self.rank} keeps in memory", "kind", unit="MiB")
        for kind, pair in _pairs(self.memory_mib, self.expected_memory_mib).items():
            memory.add_row(kind, *_compared(*pair), _rival(self.megatron_memory_mib, kind))
        memory.add_section()
        memory.add_row("peak of a process", f"{self.peak_memory_mib:,.1f}", "", "", "")
        return [traffic, memory] if traffic.row_count else [memory]


def is_same(measured: float, expected: float) -> bool:
    """Equal but for the rounding of sums of fractions in fp64: a third of a byte is none."""
    return math.isclose(measured, expected, rel_tol=1e-9)


def _pairs(
    measured: Mapping[str, float], expected: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """(measured, expected) by name, what was not measured last."""
    names = dict.fromkeys([*measured, *expected])
    return {name: (measured.get(name, 0.0), expected.get(name, 0.0)) for name in names}


def _table(title: str, *names: str, unit: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    table.add_column(f"measured {unit}", justify="right")
    table.add_column(f"expected {unit}", justify="right")
    table.add_column("")
    table.add_column(f"Megatron {unit}", justify="right")
    return table


def _rival(values: Mapping[str, float], name: str) -> Text:
    """What Megatron would have, where that is known."""
    return _number(values[name], "dim") if name in values else Text("")


def _compared(measured: float, expected: float) -> tuple[Text, Text, Text]:
    same = is_same(measured, expected)
    style = "" if same else "bold red"
    verdict = "=" if same else "DIFFERS"
    return _number(measured, style), _number(expected, style), Text(verdict, style)


def _number(value: float, style: str) -> Text:
    """A small one to the byte."""
    return Text(f"{value:,.3f}" if value >= 0.1 else f"{value:.6f}", style)
