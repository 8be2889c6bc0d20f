"""The benchmark of training in a terminal."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from megabit.benchmark.environment import describe_place
from megabit.benchmark.parts import train_part
from megabit.benchmark.run import Result, run
from megabit.benchmark.tables import (
    describe,
    legends,
    limit,
    parts_table,
    rank_table,
    speed_table,
)
from megabit.config import Config
from megabit_kernels.benchmark.console import BUSY, WIDTH
from megabit_kernels.benchmark.machine import Machine

UNSTEADY = 1.25
"""How many times the shortest step a step may take"""


def run_and_report(
    config: Config, world_size: int, steps: int, breakdown: bool, json_file: Path | None = None
) -> None:
    """Measure, print, and write ``json_file``."""
    console = Console(width=max(WIDTH, Console().width), markup=False, highlight=False)
    for line in describe(config, world_size):
        console.print(line, soft_wrap=True)
    document = describe_place(torch.device("cpu"))
    result = run(config, world_size, steps, breakdown, _progress)
    _tell_machine(result.machine, world_size, console)
    _report(result, console)
    if json_file is not None:
        document.with_parts(train_part(result, world_size)).write(json_file)


def _tell_machine(machine: Machine, world_size: int, console: Console) -> None:
    console.print(f"{machine}")
    if machine.load > BUSY * machine.cores:
        console.print(
            f"The load of this machine was {machine.load} before: other programs are running on "
            "it, and the results tell about them, too.",
            style="yellow",
        )
    if world_size > 1:
        console.print(f"megabit computes with {world_size} threads, each baseline with one.")
    if world_size > machine.cores:
        console.print(
            f"{world_size} ranks share {machine.cores} cores, so they wait for each other more "
            "than they would on cores of their own.",
            style="yellow",
        )


def _report(result: Result, console: Console) -> None:
    tables = [speed_table(result), rank_table(result), parts_table(result)]
    for table in tables:
        if table is not None:
            console.print(table)
    console.print(limit(result), style="bold")
    unsteady = [name for name, seconds in result.all_seconds.items() if _is_unsteady(seconds)]
    if unsteady:
        console.print(
            f"Steps were not equally long ({', '.join(unsteady)}): something else used the "
            "machine. Do not rely on these ratios; repeat with more --steps when it is idle.",
            style="yellow",
        )
    for legend in legends(result):
        console.print(legend, style="dim")


def _is_unsteady(seconds: Sequence[float]) -> bool:
    """Whether a quarter of the steps took much longer than the shortest."""
    return sorted(seconds)[3 * len(seconds) // 4] > UNSTEADY * min(seconds)


def _progress(step: int, steps: int) -> None:
    """Runs in the processes that are measured, so it says no more than is needed."""
    if sys.stderr.isatty():
        end = "\n" if step == steps else ""
        print(f"\rstep {step} of {steps}", end=end, file=sys.stderr, flush=True)
