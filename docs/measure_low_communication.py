"""Measure docs/low_communication.md: loss and bytes of islands that meet now and then.

    examples/fetch_shakespeare.sh
    python docs/measure_low_communication.py run [FOLDER]     # what has not been trained yet
    python docs/measure_low_communication.py report [FOLDER]  # JSON, picture, tables on stdout

Trains the quickstart model with the quickstart recipe, once for each arm, in FOLDER (default:
runs/low_communication), and a model of a sixth of its size for what is asked by the way. All arms
take the same samples in the same order, and make one model of the same initial weights.
"""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megabit.telemetry.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "low_communication"
FILES = ("model/tiny", "data/shakespeare", "recipe/quickstart")
RANKS = 2
EVERY = 20
"""Steps between two evaluations, and between two meetings."""


@dataclass(frozen=True)
class Arm:
    """One way to bring two ranks together."""

    name: str
    settings: tuple[str, ...] = ()
    color: str = "black"


def islands(name: str, *settings: str, color: str = "black") -> Arm:
    """Two islands of one rank each."""
    common = ("outer.method=diloco", "outer.islands=2", f"outer.inner_steps={EVERY}")
    return Arm(name, (*common, *settings), color)


def with_rate(lr: float, momentum: float) -> tuple[str, str]:
    return f"outer.lr={lr}", f"outer.momentum={momentum}"


MEAN = with_rate(1.0, 0.0)
"""Best of ``RATES``."""
HIGHER = "optim.lr=[5.6e-3,3.5e-3]"
"""The recipe's peaks × √2: what two islands, with half of a batch each, take in place of these."""
INT8, FRAGMENTS = "outer.wire=int8", "outer.fragments=4"
ARMS = (
    Arm("synchronous"),
    islands("DiLoCo, fp32", *MEAN, color="C0"),
    islands("DiLoCo, bf16", *MEAN, "outer.wire=bfloat16", color="C2"),
    islands("DiLoCo, int8", *MEAN, INT8, color="C1"),
    islands("DiLoCo, int8, 4 fragments", *MEAN, INT8, FRAGMENTS, color="C3"),
    islands("DiLoCo, int8, rate × 1.4", *MEAN, INT8, HIGHER, color="C4"),
)
SMALL = (
    *("model.hidden_size=128", "model.intermediate_size=384", "model.num_hidden_layers=3"),
    "precision.compute=float32",
)
RATES = ((1.0, 0.0), (0.9, 0.2), (0.7, 0.6), (0.7, 0.9))
"""(lr, momentum) of the outer step."""
SMALL_ARMS = (
    Arm("synchronous, small", SMALL),
    *(
        islands(f"outer lr {lr}, momentum {momentum}", *with_rate(lr, momentum), *SMALL)
        for lr, momentum in RATES
    ),
    Arm("synchronous, rate × 1.4, small", (*SMALL, HIGHER)),
    islands("outer lr 1.0, momentum 0.0, rate × 1.4", *MEAN, *SMALL, HIGHER),
)


def folder_of(arm: Arm, runs: Path) -> Path:
    return runs / "_".join("".join(c if c.isalnum() else " " for c in arm.name).split())


def train(arms: tuple[Arm, ...], runs: Path) -> None:
    """Train every arm, unless that is done."""
    for arm in arms:
        folder = folder_of(arm, runs)
        if (folder / "summary.json").exists():
            continue
        print(arm.name, flush=True)
        command = [sys.executable, "-m", "megabit", "train", "--nproc-per-node", str(RANKS)]
        command += [str(ROOT / "examples" / f"{file}.yaml") for file in FILES]
        command += [f"data.dir={runs / 'data'}", f"run.dir={folder}", "run.sample_tokens=0"]
        command += [f"train.eval_interval={EVERY}", f"train.log_interval={EVERY}", *arm.settings]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".log").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=log, env=environment)


def measured(arm: Arm, runs: Path) -> dict[str, Any]:
    """What a finished run has to say. MB are those of all ranks and axes, up to each step."""
    rows = read_metrics(folder_of(arm, runs) / "metrics.jsonl")
    intervals = [row for row in rows if "sent_mb" in row]
    steps = [row["step"] for row in intervals]
    lengths = [after - before for before, after in itertools.pairwise([0, *steps])]
    sent = [sum(row["sent_mb"].values()) * n for row, n in zip(intervals, lengths, strict=True)]
    return {
        "arm": arm.name,
        "settings": arm.settings,
        "step": steps,
        "loss": [row["loss"] for row in intervals],
        "sent_mb": [*itertools.accumulate(sent)],
        "held_out_step": [row["step"] for row in rows if "held_out_loss" in row],
        "held_out_loss": [row["held_out_loss"] for row in rows if "held_out_loss" in row],
    }


def report(arms: tuple[Arm, ...], runs: Path, name: str) -> list[dict[str, Any]]:
    """Write what was found, and a table against the first of ``arms``."""
    missing = [arm.name for arm in arms if not (folder_of(arm, runs) / "summary.json").exists()]
    if missing:
        sys.exit(f"not trained yet: {', '.join(missing)}")
    found = [measured(arm, runs) for arm in arms]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(
        "| | held-out loss | against synchronous | MB sent | fewer bytes |\n|---|---|---|---|---|"
    )
    loss, sent = found[0]["held_out_loss"][-1], found[0]["sent_mb"][-1]
    for run in found:
        own, mb = run["held_out_loss"][-1], run["sent_mb"][-1]
        difference = "" if run is found[0] else f"{own / loss - 1:+.2%}"
        ratio = "" if run is found[0] else f"{sent / mb:.1f} ×"
        print(f"| {run['arm']} | {own:.4f} | {difference} | {mb:,.0f} | {ratio} |")
    return found


def draw(found: list[dict[str, Any]]) -> None:
    """Held-out loss by step, and by bytes."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for arm, run in zip(ARMS, found, strict=True):
        sent = dict(zip(run["step"], run["sent_mb"], strict=True))
        # The last evaluation is of all held-out text, as the table is; the others of 64 windows.
        steps, losses = run["held_out_step"][:-1], run["held_out_loss"][:-1]
        left.plot(steps, losses, label=arm.name, color=arm.color, linewidth=1.2)
        right.plot([sent[step] for step in steps], losses, color=arm.color, linewidth=1.2)
    left.set(xlabel="step", ylabel="held-out loss, nats", title="Two ranks, the same samples")
    left.legend(fontsize=8)
    right.set(xscale="log", xlabel="MB sent so far by both ranks", title="The same by bytes")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(ROOT / "docs" / "low_communication.png", dpi=120)


def main(command: str, runs: Path) -> None:
    match command:
        case "run":
            train((*ARMS, *SMALL_ARMS), runs)
        case "report":
            draw(report(ARMS, runs, "quickstart"))
            report(SMALL_ARMS, runs, "small")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "runs" / "low_communication"
    main(sys.argv[1] if len(sys.argv) > 1 else "", folder)
