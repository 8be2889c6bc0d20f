"""``megabit schedule``: compare pipeline schedules before anything is trained."""

import difflib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabit.config import SCHEDULE_CHUNKS
from megabit.errors import UserError
from megabit.units import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megabit.pipeline.actions import Schedule
    from megabit.pipeline.simulate import Costs
    from megabit.pipeline.timeline import Timeline

FILE_WIDTH = 240
"""The most columns of timelines that do not go to a terminal"""
TRACE_UNIT_S = 1e-3
LEGEND = (
    "time: of a step, in the unit of the options. bubble: idle time for each unit of busy time. "
    "peak: the most that a rank keeps for its backward passes, from F to the end of W; 1 is what "
    "all of its layers keep of one microbatch."
)
LABELS = "F3: forward of microbatch 3; B: input gradient; W: weight gradient; BW: both at once"
CHUNK_LABELS = "; F3.1 or f3: on the rank's second stage"


@dataclass(frozen=True)
class Candidate:
    """A schedule and what it costs."""

    name: str
    schedule: "Schedule"
    timeline: "Timeline"
    peaks: Sequence[float]

    @property
    def peak(self) -> float:
        return max(self.peaks)

    @property
    def cost(self) -> tuple[float, float]:
        """What decides: time, without the last bits of its sum, then memory."""
        return float(f"{self.timeline.duration:.9g}"), self.peak

    def fits(self, memory: float | None) -> bool:
        return memory is None or self.peak <= memory + 1e-9


def schedule(
    pp: Annotated[int, typer.Option(help="Pipeline ranks.", show_default=False)],
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.", show_default=False)],
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--schedule",
            metavar="NAME",
            help="gpipe, 1f1b, interleaved, zb-h1, zb-v, v-half, v-min, or yours, "
            "my_file.py:my_function; may be given several times. Default: all that can run.",
            show_default=False,
        ),
    ] = None,
    vpp: Annotated[
        int | None,
        typer.Option(
            help="Stages on each rank, for interleaved (default 2) and yours (default 1).",
            show_default=False,
        ),
    ] = None,
    forward: Annotated[float, typer.Option(help="Time of F.")] = 1.0,
    backward: Annotated[float, typer.Option(help="Time of B, the input gradient alone.")] = 1.0,
    weight: Annotated[float, typer.Option(help="Time of W, the weight gradient.")] = 1.0,
    p2p: Annotated[float, typer.Option(help="Time of a message between two ranks.")] = 0.0,
    memory: Annotated[
        float | None,
        typer.Option(
            help="Choose among those that keep no more than this on any rank; 1 is what all of a "
            "rank's layers keep of one microbatch.",
            show_default=False,
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw the timelines to this file.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write them as a trace for ui.perfetto.dev; a unit of time is a millisecond.",
            show_default=False,
        ),
    ] = None,
    actions: Annotated[
        bool, typer.Option("--actions", help="Also print each compute and exchange.")
    ] = False,
    width: Annotated[
        int | None,
        typer.Option(
            help="Columns of the timelines; default: the terminal's, in a file as many as labels "
            f"need, up to {FILE_WIDTH}.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare pipeline schedules: time of a step, bubble, memory, and who computes what when.

    Times are those of a rank for one microbatch, for all of its stages, in any unit. A schedule
    that does not split the backward pass takes B and W at once.

    Example: megabit schedule --pp 4 --microbatches 8 --memory 3

    Example: megabit schedule --pp 4 --microbatches 8 --schedule zb-h1 --p2p 0.1 --png out.png
    """
    from rich.console import Console

    from megabit.pipeline.simulate import Costs

    times = {"forward": forward, "backward": backward, "weight": weight, "p2p": p2p}
    names = [*dict.fromkeys(names or [])]
    problems = [
        *_number_problems(pp, microbatches, vpp, memory, width, times),
        *_name_problems(names, vpp),
        *_file_problems({"--png": png, "--trace": trace}),
    ]
    if problems:
        raise UserError(*problems)

    schedules, left_out = _schedules(names, pp, microbatches, vpp)
    candidates = [
        _simulated(name, made, Costs.even(made.placement, forward, backward, weight, p2p))
        for name, made in schedules.items()
    ]
    best = _best(candidates, memory)
    title = (
        f"{counted(pp, 'rank')}, {counted(microbatches, 'microbatch', 'es')}: "
        f"F {forward:g}, B {backward:g}, W {weight:g}, message {p2p:g}"
    )
    _write(candidates, png, trace, title)

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:  # nothing to fit a table into
        console = Console(markup=False, highlight=False, emoji=False, width=1000)
    console.print(title)
    console.print(_table(candidates, best, memory))
    for line in _verdict(candidates, best, memory):
        console.print(line, style="bold", soft_wrap=True)
    for name, problem in left_out.items():
        console.print(f"Left out: {name}: {problem}", style="dim", soft_wrap=True)
    console.print(LEGEND, style="dim")
    _print_timelines(candidates, width, console)
    if actions:
        for candidate in candidates:
            console.print(f"\n{candidate.name}, actions", soft_wrap=True)
            console.print(f"{candidate.schedule}", soft_wrap=True)


# What can be wrong with the options.


def _number_problems(
    pp: int,
    microbatches: int,
    vpp: int | None,
    memory: float | None,
    width: int | None,
    times: dict[str, float],
) -> Iterator[str]:
    counts = {"pp": pp, "microbatches": microbatches, "vpp": vpp, "width": width}
    for option, count in counts.items():
        if count is not None and count < 1:
            yield f"--{option}: must be 1 or more, not {count}"
    for option, time in times.items():
        if not (math.isfinite(time) and time >= 0):
            yield f"--{option}: must be a time of 0 or more, not {time:g}"
    if not any(time for option, time in times.items() if option != "p2p"):
        yield "--forward, --backward, --weight: one of them must take time"
    if memory is not None and not memory > 0:
        yield f"--memory: must be more than 0, not {memory:g}"


def _name_problems(names: Sequence[str], vpp: int | None) -> Iterator[str]:
    from megabit.pipeline.catalog import is_user_schedule

    known = [name for name in names if name in SCHEDULE_CHUNKS]
    for name in names:
        if name not in known and not is_user_schedule(name):
            near = difflib.get_close_matches(name, SCHEDULE_CHUNKS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(SCHEDULE_CHUNKS)
            yield f"--schedule: unknown schedule {name!r}; {hint}"
    if vpp == 1 and ("interleaved" in names or not names):
        yield "--vpp: interleaved needs 2 or more stages on each rank; or use 1f1b"
    fixed = [name for name in known if name != "interleaved"]
    if vpp is not None and names and len(fixed) == len(names):
        yield from (
            f"--vpp: is for interleaved; {name} has "
            f"{counted(SCHEDULE_CHUNKS[name], 'stage')} on each rank"
            for name in fixed
            if SCHEDULE_CHUNKS[name] != vpp
        )


def _file_problems(files: dict[str, Path | None]) -> Iterator[str]:
    given = {option: path for option, path in files.items() if path is not None}
    for option, path in given.items():
        folder = path.absolute().parent
        if path.is_dir():
            yield f"{option}: {path} is a folder, not a file"
        elif not folder.is_dir():
            yield f"{option}: {path} cannot be written: there is no folder {path.parent}"
        elif not os.access(folder, os.W_OK):
            yield f"{option}: {path} cannot be written: its folder is read-only"
    if len({path.absolute() for path in given.values()}) < len(given):
        yield f"{' and '.join(given)}: name the same file"


# What the schedules cost.


def _schedules(
    names: Sequence[str], pp: int, microbatches: int, vpp: int | None
) -> tuple[dict[str, "Schedule"], dict[str, str]]:
    """The schedules by name and, if all were asked for, why others cannot run."""
    from megabit.pipeline.catalog import make_schedule

    made = {}
    problems: dict[str, list[str]] = {}
    for name in names or SCHEDULE_CHUNKS:
        # What isn't known is a function of the user's.
        chunks = SCHEDULE_CHUNKS.get(name, 1)
        if vpp is not None and (name == "interleaved" or name not in SCHEDULE_CHUNKS):
            chunks = vpp
        try:
            made[name] = make_schedule(name, pp, microbatches, chunks)
        except UserError as error:
            problems[name] = [line.removeprefix("parallel.schedule: ") for line in error.problems]
    if problems and (names or not made):
        raise UserError(*(f"--schedule: {line}" for lines in problems.values() for line in lines))
    return made, {name: lines[0] for name, lines in problems.items()}


def _simulated(name: str, schedule: "Schedule", costs: "Costs") -> Candidate:
    from megabit.pipeline.simulate import peak_activations, simulate

    return Candidate(name, schedule, simulate(schedule, costs), peak_activations(schedule))


def _best(candidates: Sequence[Candidate], memory: float | None) -> Candidate:
    """The quickest that fits; of equally quick ones, the one that needs least memory."""
    fitting = [candidate for candidate in candidates if candidate.fits(memory)]
    if not fitting:
        least = min(candidates, key=lambda candidate: candidate.peak)
        raise UserError(
            f"--memory: {memory:g} is too little for any of these schedules; {least.name} needs "
            f"least, {least.peak:g}"
        )
    return min(fitting, key=lambda candidate: candidate.cost)


# What is told.


def _table(candidates: Sequence[Candidate], best: Candidate, memory: float | None) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for heading in ("stages/rank", "time", "bubble", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("peak of each rank")
    if memory is not None:
        table.add_column("fits")
    for candidate in candidates:
        cells = [
            candidate.name,
            str(candidate.schedule.placement.chunks),
            f"{candidate.timeline.duration:.6g}",
            f"{candidate.timeline.bubble:.1%}",
            f"{candidate.peak:.4g}",
            " ".join(f"{peak:.4g}" for peak in candidate.peaks),
        ]
        if memory is not None:
            cells.append("yes" if candidate.fits(memory) else "no")
        table.add_row(*cells, style="bold" if candidate is best else None)
    return table


def _verdict(
    candidates: Sequence[Candidate], best: Candidate, memory: float | None
) -> Iterator[str]:
    if len(candidates) > 1 or memory is not None:
        scope = "" if memory is None else f" with --memory {memory:g}"
        figures = f"time {best.timeline.duration:.6g}, peak {best.peak:.4g}"
        yield f"Best{scope}: {best.name}, {figures}"
    too_large = [candidate for candidate in candidates if not candidate.fits(memory)]
    if too_large:
        yield "Does not fit: " + ", ".join(
            f"{candidate.name} (needs {candidate.peak:.4g})" for candidate in too_large
        )


def _print_timelines(
    candidates: Sequence[Candidate], width: int | None, console: "Console"
) -> None:
    """All on one scale of time, if that leaves a column for what they compute."""
    from megabit.pipeline.draw import label_width, least_width, timeline_colored, timeline_text

    timelines = {candidate.name: candidate.timeline for candidate in candidates}
    longest = max(timeline.duration for timeline in timelines.values())
    least = max(least_width(timeline, longest) for timeline in timelines.values())
    if width is None:
        width = max(label_width(timeline, longest) for timeline in timelines.values())
        width = min(width, console.width if console.is_terminal else FILE_WIDTH)
    if width < least:
        console.print(
            f"\nThe timelines need {least} columns: --width {least} prints them, --png draws them.",
            soft_wrap=True,
        )
        return
    has_chunks = any(timeline.placement.chunks > 1 for timeline in timelines.values())
    console.print(LABELS + (CHUNK_LABELS if has_chunks else ""), style="dim")
    draw = timeline_colored if console.color_system else timeline_text
    for name, timeline in timelines.items():
        console.print(f"\n{name}")
        console.print(draw(timeline, width, longest), soft_wrap=True)


def _write(
    candidates: Sequence[Candidate], png: Path | None, trace: Path | None, title: str
) -> None:
    from megabit.files import write_text
    from megabit.pipeline.draw import draw_timelines
    from megabit.pipeline.trace import chrome_trace

    try:
        if png is not None:
            option, path = "--png", png
            draw_timelines({each.name: each.timeline for each in candidates}, png, title)
        if trace is not None:
            option, path = "--trace", trace
            events = [
                event
                for process, each in enumerate(candidates, 1)
                for event in chrome_trace(each.timeline, TRACE_UNIT_S, process, each.name)[
                    "traceEvents"
                ]
            ]
            write_text(trace, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written: {error.strerror}") from None
