"""The benchmark of pipeline schedules in a terminal."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megabit.benchmark.environment import describe_place
from megabit.benchmark.parts import pipeline_part
from megabit.benchmark.pipeline import Comparison, run, with_schedule
from megabit.benchmark.tables import describe
from megabit.config import SCHEDULE_CHUNKS, Config
from megabit.errors import UserError
from megabit_kernels.benchmark.console import WIDTH
from megabit_kernels.benchmark.machine import Machine, counted

CPU = torch.device("cpu")
LEGEND = (
    "×: tokens/s of whole steps, divided by those of one process with one thread. pipeline: from "
    "the first start of a rank to the last end. bubble: idle time of the ranks, for each unit of "
    "time in which they compute. simulated: with what each stage was measured to take in the same "
    "step, and messages that take no time. even: with equal stages and F = B = W. peak: "
    "microbatches whose activations a rank keeps. layers: of each stage."
)


def run_and_report(
    config: Config, names: Sequence[str] | None, steps: int, json_file: Path | None = None
) -> None:
    """Measure, print, and write ``json_file``."""
    console = Console(width=max(WIDTH, Console().width), markup=False, highlight=False)
    chosen = list(names or _fitting(config))
    for name in chosen:
        with_schedule(config, name)  # so that what does not fit is told before anything runs
    for line in describe(config, config.parallel.tp * config.parallel.pp):
        console.print(line, soft_wrap=True)
    console.print(f"{Machine.describe(CPU)}")
    document = describe_place(CPU)
    with console.status("") as status:
        result = run(config, chosen, steps, lambda name: status.update(f"Running {name}"))
    console.print(_table(result, steps))
    console.print(LEGEND, style="dim")
    if json_file is not None:
        document.with_parts(pipeline_part(result, config)).write(json_file)


def _fitting(config: Config) -> list[str]:
    """The schedules that the configuration has enough layers for."""
    fitting = []
    for name in SCHEDULE_CHUNKS:
        try:
            with_schedule(config, name)
        except UserError:
            continue
        fitting.append(name)
    return fitting


def _table(result: Comparison, steps: int) -> Table:
    table = Table(
        title=f"Schedules, median of {counted(steps, 'step')}; one process: "
        f"{result.one_process_tokens_per_s:,.0f} tokens/s",
        box=SIMPLE_HEAD,
    )
    table.add_column("schedule", no_wrap=True)
    for heading in ("tokens/s", "×", "pipeline", "simulated", "bubble", "simulated", "even"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("peak", justify="right")
    table.add_column("layers")
    for name, own in result.schedules.items():
        table.add_row(
            name,
            f"{result.tokens_per_s(name):,.0f}",
            f"{result.tokens_per_s(name) / result.one_process_tokens_per_s:.2f}",
            f"{1e3 * own.pipeline_s:,.1f} ms",
            f"{1e3 * own.simulated_s:,.1f} ms",
            f"{own.bubble:.1%}",
            f"{own.simulated_bubble:.1%}",
            f"{own.even_bubble:.1%}",
            f"{own.peak_activations:g}",
            "/".join(map(str, own.layers_per_stage)),
        )
    return table
