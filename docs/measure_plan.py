"""Measure docs/planning.md: what the planner predicts of this machine, beside what runs take.

    python docs/measure_plan.py calibrate   # constants, into docs/results/plan/machine.json
    python docs/measure_plan.py run         # every layout, into docs/results/plan/measured.json
    python docs/measure_plan.py report      # picture, and the tables into docs/planning.md

The first two want an idle machine without GPUs. ``calibrate`` is ``megabit plan --calibrate``.
``run`` *validates*: a dozen layouts of a model of 29 M parameters, step time and peak memory of
each. And it *ranks*: all layouts of a smaller model that four ranks allow with its microbatch kept,
to see whether the chosen one is the fastest. No constant of the planner is fitted to any of these
runs; ``report`` predicts them with the constants, and writes both into compared.json.

Each layout has processes of its own. Layouts take turns twice, and the better half of all steps
counts: what else the machine does makes steps longer, never shorter. Of memory, the rank that needs
most counts.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.progress import track

from megabit.benchmark.measure import Record, measure_layout
from megabit.config import load_config
from megabit.files import write_text
from megabit.launch import run_ranks
from megabit.plan.calibrate import calibrate
from megabit.plan.catalog import known_machine
from megabit.plan.layout import Layout, Schedules, make_layout
from megabit.plan.machine import Machine
from megabit.plan.memory import memory_of
from megabit.plan.search import Candidate, Search
from megabit.plan.step import step_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "plan"
DOCUMENT = ROOT / "docs" / "planning.md"
PICTURE = ROOT / "docs" / "planning.png"
RANKS = 4
STEPS, TURNS = 4, 2
TIMEOUT_S = 1800.0

VALIDATED = [
    *("examples/model/small_30m.yaml", "train.global_batch_size=8", "train.micro_batch_size=2"),
    "data.seq_length=256",
]
LAYOUTS = (
    (1, ""),
    (2, "parallel.tp=2"),
    (2, "parallel.pp=2"),
    (2, "optim.zero_stage=1"),
    (4, "parallel.tp=4"),
    (4, "parallel.pp=4"),
    (4, "optim.zero_stage=1"),
    (4, "optim.zero_stage=2"),
    (4, "parallel.tp=2 parallel.pp=2"),
    (4, "parallel.tp=2 parallel.sequence_parallel=true"),
    (4, "parallel.pp=2 train.recompute=selective"),
    (4, "parallel.pp=2 parallel.schedule=zb-v"),
    (4, "parallel.pp=2 parallel.schedule=interleaved train.recompute=full"),
    (4, "parallel.tp=2 parallel.pp=2 precision.compute=bfloat16"),
)
"""Ranks and settings, on top of ``VALIDATED``."""
RANKED = [
    *("examples/model/tiny.yaml", "train.global_batch_size=16", "train.micro_batch_size=2"),
    "data.seq_length=128",
]
KEPT = frozenset(
    {"train.micro_batch_size", "train.recompute", "parallel.row_reduce", "optim.zero_stage"}
)


def run() -> None:
    """All layouts, in turns."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": 1,
        "commit": _commit(),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {platform.platform()}",
        "validated": _run_all(_validated_cases(), "validate"),
        "ranked": _run_all(_ranked_cases(), "rank"),
        "load": os.getloadavg()[0],
    }
    _write("measured.json", document)


@dataclass(frozen=True)
class Case:
    """A layout to be measured."""

    name: str
    ranks: int
    settings: list[str]

    def layout(self, machine: Machine) -> Layout:
        return make_layout(load_config(self.settings, self.ranks), self.ranks, machine, Schedules())


def _validated_cases() -> list[Case]:
    return [Case(_name(ranks, text), ranks, [*VALIDATED, *text.split()]) for ranks, text in LAYOUTS]


def _ranked_cases() -> list[Case]:
    """All that there are; which machine does not matter."""
    machine = known_machine("cpu", RANKS, "eth25")
    found = Search(load_config(RANKED), RANKS, machine, KEPT, top=10**6).run()
    return [
        Case(
            _candidate_name(candidate),
            RANKS,
            [*RANKED, *(f"{k}={v}" for k, v in candidate.choices.items() if v is not None)],
        )
        for candidate in sorted(found.candidates, key=_candidate_name)
    ]


def _run_all(cases: list[Case], what: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = [{**asdict(case), "seconds": []} for case in cases]
    turns = [
        (case, result) for _ in range(TURNS) for case, result in zip(cases, results, strict=True)
    ]
    for case, result in track(turns, what):
        records = _in_processes(case)
        slowest = [max(step) for step in zip(*(r["seconds"] for r in records), strict=True)]
        result["seconds"] += slowest
        result["bytes"] = [record["bytes"] for record in records]
    return results


def _in_processes(case: Case) -> list[dict[str, Any]]:
    """Seconds of the steps and peak memory, by rank, in new processes: a fork of this one would
    begin with its peak."""
    command = [sys.executable, __file__, "layout", str(case.ranks), *case.settings]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    records: list[dict[str, Any]] = json.loads(done.stdout)
    return records


def measure(ranks: int, settings: list[str]) -> None:
    """One layout, as JSON on stdout."""
    config = load_config([*settings, f"train.steps={2 + STEPS}"], ranks)
    one = partial(measure_layout, config, STEPS, False, lambda step, steps: None)
    records: list[Record] = run_ranks(one, ranks, TIMEOUT_S)
    print(
        json.dumps([{"seconds": record.seconds, "bytes": record.peak_bytes} for record in records])
    )


def compare() -> dict[str, Any]:
    """What was measured, with what is predicted beside it."""
    machine = Machine.read(RESULTS / "machine.json")
    document: dict[str, Any] = json.loads((RESULTS / "measured.json").read_text(encoding="utf-8"))
    for part in ("validated", "ranked"):
        for result in document[part]:
            times = sorted(result["seconds"])
            result["measured_s"] = statistics.median(times[: max(1, len(times) // 2)])
            layout = Case(result["name"], result["ranks"], result["settings"]).layout(machine)
            step = step_of(layout)
            memory = [memory_of(shape, machine.device) for shape in layout.shapes]
            result["predicted_s"], result["parts_s"] = step.total_s, step.seconds
            result["predicted_bytes"] = [sum(each.values()) for each in memory]
            result["parts_bytes"] = memory
        document[part].sort(key=lambda result: result["predicted_s"] if part == "ranked" else 0)
    return document


def report() -> None:
    """The picture, and the tables in the document."""
    document = compare()
    _write("compared.json", document)
    _draw(document)
    text = DOCUMENT.read_text(encoding="utf-8")
    write_text(DOCUMENT, with_tables(text, document))


def _write(name: str, document: dict[str, Any]) -> None:
    write_text(RESULTS / name, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def with_tables(text: str, document: dict[str, Any]) -> str:
    """``text`` of the document with what ``document`` says between its markers."""
    for name, lines in (("validated", _validated(document)), ("ranked", _ranked(document))):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after
    return text


def _validated(document: dict[str, Any]) -> list[str]:
    lines = [
        "| layout | step predicted | measured | off by | memory predicted | measured | off by |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    time_errors, memory_errors = [], []
    for case in document["validated"]:
        time_errors.append(case["predicted_s"] / case["measured_s"] - 1)
        needed = max(case["predicted_bytes"]), max(case["bytes"])
        memory_errors.append(needed[0] / needed[1] - 1)
        lines.append(
            f"| {case['name']} | {case['predicted_s']:.2f} s | {case['measured_s']:.2f} s | "
            f"{time_errors[-1]:+.1%} | {needed[0] / 1e6:.0f} MB | {needed[1] / 1e6:.0f} MB | "
            f"{memory_errors[-1]:+.1%} |"
        )
    within = [
        sum(abs(e) <= limit for e in errors)
        for errors, limit in ((time_errors, 0.15), (memory_errors, 0.05))
    ]
    count = len(time_errors)
    mean = statistics.fmean(time_errors)
    lines += [
        "",
        f"Step time within 15 %: {within[0]} of {count}, the largest error "
        f"{max(time_errors, key=abs):+.1%}, the mean {mean:+.1%}. Peak memory within 5 %: "
        f"{within[1]} of {count}, the largest error {max(memory_errors, key=abs):+.1%}. "
        f"({document['machine']}, commit "
        f"`{document['commit'][:10]}`, load {document['load']:.1f} at the end.)",
    ]
    return lines


def _ranked(document: dict[str, Any]) -> list[str]:
    cases = document["ranked"]
    by_measured = sorted(cases, key=lambda case: case["measured_s"])
    chosen, fastest = cases[0], by_measured[0]
    shown = [
        *dict.fromkeys(case["name"] for case in [*cases[:3], *by_measured[:3], by_measured[-1]])
    ]
    lines = [
        "| layout | predicted | measured | place predicted | place measured |",
        "|---|---:|---:|---:|---:|",
    ]
    for case in sorted(cases, key=lambda case: case["predicted_s"]):
        if case["name"] in shown:
            lines.append(
                f"| {case['name']} | {case['predicted_s']:.3f} s | {case['measured_s']:.3f} s | "
                f"{cases.index(case) + 1} | {by_measured.index(case) + 1} |"
            )
    times = [case["predicted_s"] / case["measured_s"] - 1 for case in cases]
    peaks = [max(case["predicted_bytes"]) / max(case["bytes"]) - 1 for case in cases]
    lines += [
        "",
        f"Of {len(cases)} layouts, {chosen['name']} was chosen; it took "
        f"{chosen['measured_s'] / fastest['measured_s'] - 1:.1%} more than the fastest, "
        f"{fastest['name']}. Of all of them, {sum(abs(e) <= 0.15 for e in times)} are predicted "
        f"within 15 % ({min(times):+.1%} to {max(times):+.1%}), and the peak memory of "
        f"{sum(abs(e) <= 0.05 for e in peaks)} within 5 % "
        f"({min(peaks):+.1%} to {max(peaks):+.1%}).",
    ]
    return lines


def _draw(document: dict[str, Any]) -> None:
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2)
    for name, marker in (("validated", "o"), ("ranked", "x")):
        cases = document[name]
        time.plot(
            [case["measured_s"] for case in cases],
            [case["predicted_s"] for case in cases],
            marker,
            label=f"{name}, {len(cases)} layouts",
        )
        memory.plot(
            [max(case["bytes"]) / 1e6 for case in cases],
            [max(case["predicted_bytes"]) / 1e6 for case in cases],
            marker,
        )
    for axes, limit, unit, title in (
        (time, 0.15, "s", "Step time"),
        (memory, 0.05, "MB", "Peak memory of a rank"),
    ):
        low, high = axes.get_xlim()
        low = max(low, 1e-3)
        axes.plot([low, high], [low, high], color="0.5", linewidth=1)
        axes.fill_between(
            [low, high],
            [low * (1 - limit), high * (1 - limit)],
            [low * (1 + limit), high * (1 + limit)],
            color="0.9",
            label=f"± {limit:.0%}",
        )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel=f"measured, {unit}",
            ylabel=f"predicted, {unit}",
            title=title,
        )
    time.legend()
    figure.savefig(PICTURE, dpi=110)


def _name(ranks: int, text: str) -> str:
    """``TP 2 × PP 1 × DP 2``, and what else there is."""
    settings = dict(each.split("=") for each in text.split())
    tp, pp = (int(settings.pop(f"parallel.{axis}", 1)) for axis in ("tp", "pp"))
    more = [f"{key.split('.')[1]} {value}" for key, value in settings.items()]
    return ", ".join([f"TP {tp} × PP {pp} × DP {ranks // (tp * pp)}", *more])


def _candidate_name(candidate: Candidate) -> str:
    parallel = candidate.layout.config.parallel
    schedule = f" {parallel.schedule}" if parallel.pp > 1 else ""
    if parallel.schedule == "interleaved":
        schedule += f" v={parallel.chunks}"
    return candidate.name + schedule + (" SP" if parallel.sequence_parallel else "")


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def main(arguments: list[str]) -> None:
    """See above."""
    match arguments:
        case ["calibrate"]:
            RESULTS.mkdir(parents=True, exist_ok=True)
            machine = calibrate(created={"commit": _commit()})
            write_text(RESULTS / "machine.json", machine.to_json())
        case ["run"]:
            run()
        case ["layout", ranks, *settings]:
            measure(int(ranks), settings)
        case ["report"]:
            report()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
