"""The result of a benchmark: what was measured, and the figures that people derive from it.

``times`` of a row are the ratios that get quoted: how many of these products fit into the time that
a baseline takes for the same layer, tokens and state of the caches, in the same run.
"""

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from megabit_kernels.benchmark.contestants import BASELINES
from megabit_kernels.benchmark.machine import Machine
from megabit_kernels.benchmark.measure import Timing
from megabit_kernels.benchmark.roofline import Operands, Roofline
from megabit_kernels.benchmark.shapes import Layer

Caches = Literal["cold", "hot"]
FORMAT = "megabit kernel benchmark 1"


@dataclass(frozen=True)
class Race:
    """What contestants have in common that are compared."""

    layer: Layer
    m: int
    caches: Caches
    threads: int

    def __str__(self) -> str:
        return f"{self.layer}, M = {self.m}, {self.caches}"


@dataclass(frozen=True)
class Finish:
    """The times of one contestant in a race."""

    race: Race
    contestant: str
    implementation: str
    is_ours: bool
    operands: Operands
    weight_bytes: int
    rotated_bytes: int
    """Of all the weights that calls went through before one came again"""
    timing: Timing


@dataclass(frozen=True)
class LeftOut:
    """What was not measured, and why not."""

    race: Race
    contestant: str
    reason: str

    def __str__(self) -> str:
        return f"{self.contestant}: {self.reason}"


@dataclass(frozen=True)
class Row:
    """The same in the units of people, with what follows from it."""

    model: str
    layer: str
    n: int
    k: int
    m: int
    caches: Caches
    threads: int
    contestant: str
    implementation: str
    is_ours: bool
    operands: Operands
    median_us: float
    min_us: float
    p90_us: float
    runs: int
    weight_bytes: int
    rotated_bytes: int
    gops: float
    """10⁹ operations per second; a product has 2·M·N·K"""
    gb_per_s: float
    """10⁹ bytes of weights per second"""
    roof: str
    """The roof that bounds it, see ``roofline.Bound``"""
    roof_percent: float
    exceeds_roof: bool
    """Then the roof was measured too low, or the machine was slower at that time"""
    scaling: float | None
    """The contestant's median with the fewest threads divided by this one"""
    times: dict[str, float]
    """By baseline: its median divided by this one"""


@dataclass
class Result:
    """A benchmark while it runs and afterwards."""

    machine: Machine
    rooflines: dict[int, Roofline]
    """By number of threads"""
    settings: dict[str, Any]
    finishes: list[Finish] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    is_complete: bool = False
    """Whether nothing stopped it: no time limit, no Ctrl-C"""
    elapsed_s: float = 0.0

    def rows(self) -> list[Row]:
        """Every finish with the figures derived from it, in the order of measurement."""
        medians = {(one.race, one.contestant): one.timing.median_s for one in self.finishes}
        return [self._row(one, medians) for one in self.finishes]

    def _row(self, one: Finish, medians: Mapping[tuple[Race, str], float]) -> Row:
        layer, m, timing = one.race.layer, one.race.m, one.timing
        operations = layer.operations(m)
        narrow = medians.get((replace(one.race, threads=min(self.rooflines)), one.contestant))
        roofline = self.rooflines[one.race.threads]
        bound = roofline.bound(one.operands, operations, one.weight_bytes, one.rotated_bytes)
        percent = bound.percent(timing.median_s)
        return Row(
            model=layer.model,
            layer=layer.name,
            n=layer.n,
            k=layer.k,
            m=m,
            caches=one.race.caches,
            threads=one.race.threads,
            contestant=one.contestant,
            implementation=one.implementation,
            is_ours=one.is_ours,
            operands=one.operands,
            median_us=timing.median_s * 1e6,
            min_us=timing.min_s * 1e6,
            p90_us=timing.p90_s * 1e6,
            runs=timing.runs,
            weight_bytes=one.weight_bytes,
            rotated_bytes=one.rotated_bytes,
            gops=operations / timing.median_s / 1e9,
            gb_per_s=one.weight_bytes / timing.median_s / 1e9,
            roof=bound.roof,
            roof_percent=percent,
            exceeds_roof=percent > 100,
            scaling=None if narrow is None else narrow / timing.median_s,
            times={
                name: medians[one.race, name] / timing.median_s
                for name in BASELINES
                if (one.race, name) in medians
            },
        )

    def to_json(self) -> str:
        """Everything, the roofs in operations and bytes per second."""
        whole = {
            "format": FORMAT,
            "is_complete": self.is_complete,
            "elapsed_s": round(self.elapsed_s, 1),
            "machine": asdict(self.machine),
            "rooflines": {count: asdict(one) for count, one in self.rooflines.items()},
            "settings": self.settings,
            "left_out": [asdict(one) for one in self.left_out],
            "rows": [asdict(row) for row in self.rows()],
        }
        return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"

    def to_csv(self) -> str:
        """The rows, with a column ``times_…`` for each baseline."""
        plain = [one.name for one in fields(Row) if one.name != "times"]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*plain, *(f"times_{name}" for name in BASELINES)])
        for row in self.rows():
            values = [getattr(row, name) for name in plain]
            writer.writerow([*values, *(row.times.get(name, "") for name in BASELINES)])
        return text.getvalue()

    def write(self, folder: Path) -> list[Path]:
        """Write ``kernels.json``, ``kernels.csv``, ``roofline.png``, each whole or not at all."""
        from megabit_kernels.benchmark.plot import draw_roofline  # matplotlib takes a second

        folder.mkdir(parents=True, exist_ok=True)
        return [
            _write(folder / "kernels.json", lambda path: _write_text(path, self.to_json())),
            _write(folder / "kernels.csv", lambda path: _write_text(path, self.to_csv())),
            _write(folder / "roofline.png", lambda path: draw_roofline(self, path)),
        ]


def _write(path: Path, write: Callable[[Path], object]) -> Path:
    draft = path.with_name(path.name + ".tmp")
    write(draft)
    draft.replace(path)
    return path


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
