"""The benchmark of checkpoints in a terminal."""

from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megabit.benchmark.checkpoint import SYNCHRONOUS, CheckpointResult, run
from megabit.benchmark.environment import describe_place
from megabit.benchmark.parts import checkpoint_part
from megabit.benchmark.tables import describe
from megabit.config import Config
from megabit_kernels.benchmark.console import WIDTH
from megabit_kernels.benchmark.machine import Machine, counted

CPU = torch.device("cpu")
LEGEND = (
    "training waits: blocked by a save; ×: divided by that of a synchronous save. on disk: from "
    "the beginning of a save until its files are written and synced (megabit's: and hashed). While "
    "megabit saves asynchronously, training goes on, shares the cores, and looks between two steps "
    "whether it is over."
)


def run_and_report(
    config: Config, world_size: int, repeats: int, folder: Path, json_file: Path | None = None
) -> None:
    """Measure, print, and write ``json_file``."""
    console = Console(width=max(WIDTH, Console().width), markup=False, highlight=False)
    for line in describe(config, world_size):
        console.print(line, soft_wrap=True)
    console.print(f"{Machine.describe(CPU)}")
    document = describe_place(CPU)
    with console.status("") as status:
        result = run(
            config, world_size, repeats, folder, lambda name: status.update(f"Running {name}")
        )
    console.print(_table(result, repeats))
    slower = result.step_while_saving_s / result.step_s - 1
    console.print(
        f"A step takes {result.step_s:.3f} s, and {result.step_while_saving_s:.3f} s "
        f"({slower:+.0%}) while a checkpoint is written"
    )
    console.print(LEGEND, style="dim")
    if json_file is not None:
        document.with_parts(checkpoint_part(result, config, world_size)).write(json_file)


def _table(result: CheckpointResult, repeats: int) -> Table:
    table = Table(title=f"Saves, median of {counted(repeats, 'save')}", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("MB", "training waits", "×", "on disk", "MB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    baseline = result.saves[SYNCHRONOUS].blocked_s
    for name, save in result.saves.items():
        table.add_row(
            name,
            f"{save.bytes / 1e6:,.0f}",
            f"{save.blocked_s:.3f} s",
            f"{save.blocked_s / baseline:.2f}",
            f"{save.total_s:.3f} s",
            f"{save.bytes / 1e6 / save.total_s:,.0f}",
        )
    return table
