"""Measure docs/communication.md: what compressed gradients save in bytes and cost in loss.

    examples/fetch_shakespeare.sh
    python docs/measure_communication.py run [FOLDER]      # what has not been trained yet
    python docs/measure_communication.py report [FOLDER]   # JSON, picture, the table on stdout

Trains docs/results/communication/study.yaml on two data-parallel ranks, once for each arm and seed,
in FOLDER (default: runs/communication). A run's seed is of its initialisation, of the order of its
data and of the choice of held-out documents. Arms of one seed see the same tokens in the same
order, so they are compared in pairs.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megabit.config import Config, load_config
from megabit.data_parallel.codecs import codec_of
from megabit.pipeline.plan import plan_stages
from megabit.telemetry.metrics import read_metrics
from megabit.training.traffic import total_traffic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "communication"
RANKS = 2
SEEDS = (1, 2, 3)
WEIGHT_COLUMNS = 128
"""Of most of the model's matrices: rows for which bytes for each weight are given."""
GRADIENTS = "dp weight gradients"


@dataclass(frozen=True)
class Arm:
    """One way to send gradients."""

    name: str
    wire: str
    settings: tuple[str, ...] = ()

    @property
    def all_settings(self) -> tuple[str, ...]:
        return (f"precision.gradients={self.wire}", *self.settings)

    @property
    def feeds_back(self) -> bool:
        return NO_FEEDBACK not in self.settings


NO_FEEDBACK = "communication.error_feedback=false"
TENTH, HUNDREDTH = "communication.topk_ratio=0.1", "communication.topk_ratio=0.01"
ARMS = (
    Arm("float32", "float32"),
    Arm("bfloat16", "bfloat16"),
    Arm("int8", "int8"),
    Arm("int4", "int4"),
    Arm("int4, no feedback", "int4", (NO_FEEDBACK,)),
    Arm("topk 10 %", "topk", (TENTH,)),
    Arm("topk 10 %, no feedback", "topk", (TENTH, NO_FEEDBACK)),
    Arm("topk 1 %", "topk", (HUNDREDTH,)),
    Arm("topk 1 %, no feedback", "topk", (HUNDREDTH, NO_FEEDBACK)),
    Arm("ternary", "ternary"),
)


def config_of(arm: Arm) -> Config:
    return load_config([str(RESULTS / "study.yaml"), *arm.all_settings])


def folder_of(arm: Arm, seed: int, runs: Path) -> Path:
    name = "_".join("".join(c if c.isalnum() else " " for c in arm.name).split())
    return runs / f"{name}_seed{seed}"


def run(runs: Path) -> None:
    """Train every arm with every seed, unless that is done."""
    for seed in SEEDS:
        for arm in ARMS:
            folder = folder_of(arm, seed, runs)
            if (folder / "summary.json").exists():
                continue
            print(f"{arm.name}, seed {seed}", flush=True)
            command = [sys.executable, "-m", "megabit", "train", "--nproc-per-node", str(RANKS)]
            command += [str(RESULTS / "study.yaml"), *arm.all_settings, f"run.dir={folder}"]
            command += [f"train.seed={seed}", f"data.dir={runs / 'data' / str(seed)}"]
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_suffix(".log").open("w") as log:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                subprocess.run(
                    command, check=True, cwd=ROOT, stdout=log, stderr=log, env=environment
                )


def measured(arm: Arm, seed: int, runs: Path) -> dict[str, Any]:
    """What a finished run has to say, for ``compression.json``."""
    rows = read_metrics(folder_of(arm, seed, runs) / "metrics.jsonl")
    (sent,) = {json.dumps(r["sent_by_purpose_mb"]) for r in rows if "sent_by_purpose_mb" in r}
    by_purpose = json.loads(sent)
    return {
        "arm": arm.name,
        "seed": seed,
        "settings": arm.all_settings,
        "gradients_mb": by_purpose[GRADIENTS],
        "dp_mb": sum(mb for key, mb in by_purpose.items() if key.startswith("dp ")),
        "held_out_loss": {
            row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row
        },
    }


def expected_mb(arm: Arm) -> float:
    """MB of gradients that all ranks send in a step, by formula."""
    config = config_of(arm)
    sent = total_traffic(config, RANKS, plan_stages(config, RANKS))
    return sent["dp", "weight gradients"] / 1e6


def weight_bytes(arm: Arm) -> float:
    """For each weight that is sent once, by formula."""
    codec = codec_of(config_of(arm))
    if codec is None:
        return {"float32": 4.0, "bfloat16": 2.0}[arm.wire]
    return codec.tensor_bytes(WEIGHT_COLUMNS, WEIGHT_COLUMNS) / WEIGHT_COLUMNS**2


def differences(losses: list[float], others: list[float]) -> str:
    """Mean of the differences of pairs, and each of them."""
    found = [loss - other for loss, other in zip(losses, others, strict=True)]
    return f"{statistics.fmean(found):+.3f} ({', '.join(f'{x:+.3f}' for x in found)})"


def report(runs: Path) -> None:
    """Write what was found."""
    missing = [
        f"{arm.name}, seed {seed}"
        for arm in ARMS
        for seed in SEEDS
        if not (folder_of(arm, seed, runs) / "summary.json").exists()
    ]
    if missing:
        sys.exit(f"not trained yet: {'; '.join(missing)}")
    found = [measured(arm, seed, runs) for arm in ARMS for seed in SEEDS]
    (RESULTS / "compression.json").write_text(json.dumps(found, indent=1) + "\n")
    print(
        "| gradients | bytes/weight | gradients, MB/step | DP, MB/step | held-out loss | "
        "to float32 (by seed) |\n|---|---|---|---|---|---|"
    )
    whole = last_losses(found, ARMS[0])
    for arm in ARMS:
        losses = last_losses(found, arm)
        own = next(item for item in found if item["arm"] == arm.name)
        if not math.isclose(own["gradients_mb"], expected_mb(arm), rel_tol=1e-9):
            sys.exit(f"{arm.name}: {own['gradients_mb']} MB sent, {expected_mb(arm)} expected")
        row = [arm.name, f"{weight_bytes(arm):.3f}", f"{own['gradients_mb']:.3f}"]
        row += [f"{own['dp_mb']:.3f}", f"{statistics.fmean(losses):.3f}"]
        row.append("" if arm is ARMS[0] else differences(losses, whole))
        print("| " + " | ".join(row) + " |")
    draw(found)


def last_losses(found: list[dict[str, Any]], arm: Arm) -> list[float]:
    """Held-out loss after the last step, by seed."""
    return [[*run["held_out_loss"].values()][-1] for run in found if run["arm"] == arm.name]


def draw(found: list[dict[str, Any]]) -> None:
    """Left held-out loss by step, a mean of all seeds; right that of the end by bytes sent."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    wires = [*dict.fromkeys(arm.name.removesuffix(", no feedback") for arm in ARMS)]
    for arm in ARMS:
        runs = [run for run in found if run["arm"] == arm.name]
        color = f"C{wires.index(arm.name.removesuffix(', no feedback'))}"
        style = "-" if arm.feeds_back else "--"
        steps = [*runs[0]["held_out_loss"]]
        means = [statistics.fmean(run["held_out_loss"][step] for run in runs) for step in steps]
        left.plot(steps, means, style, color=color, linewidth=1.2, label=arm.name)
        marker = "o" if arm.feeds_back else "x"
        ends = last_losses(found, arm)
        right.plot([runs[0]["gradients_mb"]] * len(ends), ends, marker, color=color)
    left.set(xlabel="step", ylabel="held-out loss", title=f"Mean of {len(SEEDS)} seeds")
    left.legend(fontsize=7)
    right.set(
        xscale="log",
        xlabel="MB of gradients in a step",
        ylabel="held-out loss after the last step",
        title="Each seed; crosses: without error feedback",
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(RESULTS / "compression.png", dpi=120)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run" | "report" as what, *rest] if len(rest) < 2:
            runs = Path(rest[0]).resolve() if rest else ROOT / "runs" / "communication"
            (run if what == "run" else report)(runs)
        case _:
            sys.exit(__doc__)
