"""The study in ``README.md`` beside this file: run it, tabulate it, draw it.

    docs/results/fetch_text.sh
    python docs/results/study.py run [ARM ...]     # trains what has not been trained yet
    python docs/results/study.py report            # results.csv, results.png, the table on stdout

A run's seed is of its initialisation, of the order of its data and of the choice of held-out
documents. Arms of one seed see the same tokens in the same order, so they are compared in pairs.
"""

import csv
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
RUNS = Path("runs/study")
SEEDS = (1, 2, 3)
T_975 = 4.303
"""Student's t for a 95 % interval of three pairs."""

WIDE = (
    *("model.hidden_size=256", "model.intermediate_size=768"),
    *("model.num_attention_heads=8", "model.num_key_value_heads=4"),
)
TWO_STAGE_8 = "optim.lr=[8.0e-3,5.2e-3]"
SHORT = "train.steps=250"


@dataclass(frozen=True)
class Arm:
    """One kind of run."""

    name: str
    settings: tuple[str, ...]
    against: str | None = None
    """The arm that it is compared with."""


ARMS = (
    Arm("dense fp32, 1×", ("model.linear=dense", TWO_STAGE_8)),
    Arm(
        "dense bf16, 1×",
        ("model.linear=dense", "precision.compute=bfloat16", TWO_STAGE_8),
        "dense fp32, 1×",
    ),
    Arm("ternary, 1×", (TWO_STAGE_8,), "dense fp32, 1×"),
    Arm("ternary, 2×", (*WIDE, TWO_STAGE_8), "dense fp32, 1×"),
)
ABLATIONS = (
    Arm("ternary, half as long", (SHORT, TWO_STAGE_8)),
    Arm(
        "scale_mult 0.866", (SHORT, TWO_STAGE_8, "model.scale_mult=0.866"), "ternary, half as long"
    ),
    Arm(
        "scale_mult 1.1547",
        (SHORT, TWO_STAGE_8, "model.scale_mult=1.1547"),
        "ternary, half as long",
    ),
    Arm(
        "cosine",
        (SHORT, "optim.schedule=cosine", "optim.lr=[8.0e-3]", "optim.weight_decay=[0.1]"),
        "ternary, half as long",
    ),
    Arm(
        "λ ramp over 20 %",
        (SHORT, TWO_STAGE_8, "train.quantization_ramp=0.2"),
        "ternary, half as long",
    ),
    Arm(
        "full-precision activations",
        (SHORT, TWO_STAGE_8, "model.activations=full"),
        "ternary, half as long",
    ),
    Arm(
        "int8 backward",
        (SHORT, TWO_STAGE_8, "precision.ternary_backward=int8"),
        "ternary, half as long",
    ),
)


def folder_of(arm: Arm, seed: int) -> Path:
    name = "".join(c if c.isalnum() or c == "." else "_" for c in arm.name)
    return RUNS / f"{name}_seed{seed}"


def run(chosen: list[str]) -> None:
    """Train every arm (or those chosen by name) with every seed, unless that is done."""
    for seed in SEEDS:
        for arm in (*ARMS, *ABLATIONS):
            folder = folder_of(arm, seed)
            if (folder / "summary.json").exists() or (chosen and arm.name not in chosen):
                continue
            print(f"{arm.name}, seed {seed}", flush=True)
            command = [sys.executable, "-m", "megabit", "train", str(FOLDER / "study.yaml")]
            command += [f"data.dir=data/study/seed{seed}", f"train.seed={seed}"]
            command += [f"run.dir={folder}", *arm.settings]
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_suffix(".log").open("w") as log:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)


def losses() -> dict[str, dict[int, float]]:
    """Held-out bits per byte after the last step, by arm and seed."""
    found: dict[str, dict[int, float]] = {}
    for arm in (*ARMS, *ABLATIONS):
        for seed in SEEDS:
            summary = folder_of(arm, seed) / "summary.json"
            if summary.exists():
                value = json.loads(summary.read_text())["held_out_bits_per_byte"]
                found.setdefault(arm.name, {})[seed] = value
    return found


def gap(of: dict[int, float], against: dict[int, float]) -> tuple[float, float]:
    """Mean relative difference over pairs of equal seeds, and half its 95 % interval."""
    gaps = [of[seed] / against[seed] - 1 for seed in SEEDS]
    return statistics.fmean(gaps), T_975 * statistics.stdev(gaps) / math.sqrt(len(gaps))


def report() -> None:
    """Write what was found."""
    found = losses()
    missing = [a.name for a in (*ARMS, *ABLATIONS) if len(found.get(a.name, {})) < len(SEEDS)]
    if missing:
        sys.exit(f"not trained yet, with all seeds: {', '.join(missing)}")
    with (FOLDER / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", "held_out_bits_per_byte", "settings"])
        for arm in (*ARMS, *ABLATIONS):
            for seed, value in found.get(arm.name, {}).items():
                writer.writerow([arm.name, seed, f"{value:.6f}", " ".join(arm.settings)])
    print("| arm | bits per byte, seeds 1, 2, 3 | mean | gap, 95 % interval |\n|---|---|---|---|")
    for arm in (*ARMS, *ABLATIONS):
        values = found[arm.name]
        row = [arm.name, ", ".join(f"{values[seed]:.4f}" for seed in SEEDS)]
        row.append(f"{statistics.fmean(values.values()):.4f}")
        if arm.against is None:
            row.append("")
        else:
            mean, half = gap(values, found[arm.against])
            row.append(f"{mean:+.2%} ± {half:.2%}")
        print("| " + " | ".join(row) + " |")
    draw(found)


def draw(found: dict[str, dict[int, float]]) -> None:
    """Left the curves of the four arms, right the gaps of all."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for color, arm in zip(("black", "tab:gray", "tab:blue", "tab:green"), ARMS, strict=True):
        for seed in SEEDS:
            lines = (folder_of(arm, seed) / "metrics.jsonl").read_text().splitlines()
            rows = [row for row in map(json.loads, lines) if "held_out_loss" in row]
            left.plot(
                [row["step"] * 4096 / 1e6 for row in rows],
                [row["held_out_bits_per_byte"] for row in rows],
                color=color,
                linewidth=1,
                label=arm.name if seed == 1 else None,
            )
    left.set(xlabel="M tokens", ylabel="held-out bits per byte", title="Three seeds each")
    left.grid(alpha=0.3)
    left.legend()
    compared = [arm for arm in (*ARMS, *ABLATIONS) if arm.against is not None]
    for place, arm in enumerate(reversed(compared)):
        mean, half = gap(found[arm.name], found[str(arm.against)])
        color = "tab:blue" if arm in ARMS else "tab:orange"
        right.errorbar(100 * mean, place, xerr=100 * half, fmt="o", color=color, capsize=3)
    right.axvline(0, color="black", linewidth=0.8)
    right.set_yticks(range(len(compared)), [arm.name for arm in reversed(compared)])
    right.set(
        xlabel="gap in bits per byte, %, with 95 % interval",
        title="To dense fp32 (blue), to ternary (orange)",
    )
    right.grid(alpha=0.3, axis="x")
    figure.savefig(FOLDER / "results.png", dpi=120)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", *chosen]:
            run(chosen)
        case ["report"]:
            report()
        case _:
            sys.exit(__doc__)
