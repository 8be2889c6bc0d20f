"""The benchmark in a terminal: what it will do and for how long, how far it is, what came out."""

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megabit_kernels.benchmark.machine import counted
from megabit_kernels.benchmark.results import Race, Result
from megabit_kernels.benchmark.run import Benchmark
from megabit_kernels.benchmark.tables import describe_roofs, describe_seconds, legend, tables

BUSY = 0.3
"""Load of the machine, for each of its cores, from which a benchmark warns"""
WIDTH = 130
"""Of the tables: on a narrower terminal lines wrap, but no digit gets lost"""


def run_and_report(benchmark: Benchmark, folder: Path) -> bool:
    """Run ``benchmark``, print its tables and write its files into ``folder``.

    Returns:
        False if Ctrl-C ended it; what was measured by then is printed and written all the same.
    """
    console = Console(width=max(WIDTH, Console().width), markup=False)
    _announce(benchmark, console)
    finished = _run(benchmark)
    result = benchmark.result
    if result.finishes:
        written = result.write(folder)
        _report(result, console)
        for path in written:
            console.print(f"wrote {path}", soft_wrap=True)
    else:
        _tell_left_out(result, console)
        console.print("nothing was measured, nothing is written")
    return finished


def _announce(benchmark: Benchmark, console: Console) -> None:
    machine = benchmark.result.machine
    console.print(f"{machine}")
    for threads, roofline in benchmark.result.rooflines.items():
        console.print(f"Roofs{machine.with_threads(threads)}: {describe_roofs(roofline)}")
    contestants = max(len(benchmark.names_of(race)) for race in benchmark.races)
    console.print(
        f"{counted(len(benchmark.races), 'race')} of {contestants} contestants, about "
        f"{_minutes(benchmark.predicted_s())}",
    )
    if machine.load > BUSY * machine.cores:
        console.print(
            f"The load of this machine is {machine.load}: other programs are running on it, and "
            "the results will tell about them, too.",
            style="yellow",
        )


def _run(benchmark: Benchmark) -> bool:
    progress = Progress(
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True, markup=False),
    )
    try:
        with progress:
            task = progress.add_task(
                "making weights", total=sum(map(benchmark.predicted_race_s, benchmark.races))
            )
            for race in benchmark.run():
                latest = _latest(benchmark.result, race)
                progress.update(task, advance=benchmark.predicted_race_s(race), description=latest)
                if not progress.console.is_terminal:
                    progress.console.print(latest, soft_wrap=True)
    except KeyboardInterrupt:
        return False
    return True


def _latest(result: Result, race: Race) -> str:
    """The race and its first finish, which is that of ours that was named first."""
    at = f"{race}{result.machine.with_threads(race.threads)}"
    finish = next((one for one in result.finishes if one.race == race), None)
    if finish is None:
        return f"{at}: nobody"
    return f"{at}: {finish.contestant} {describe_seconds(finish.timing.median_s)}"


def _report(result: Result, console: Console) -> None:
    for table in tables(result):
        console.print(table)
    console.print(legend(result), style="dim")
    if any(row.exceeds_roof for row in result.rows()):
        console.print(
            "! above its roof: that was measured too low, or the machine was slower at that time.",
            style="yellow",
        )
    _tell_left_out(result, console)


def _tell_left_out(result: Result, console: Console) -> None:
    for reason, count in Counter(map(str, result.left_out)).items():
        console.print(f"left out of {counted(count, 'race')}: {reason}", soft_wrap=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
