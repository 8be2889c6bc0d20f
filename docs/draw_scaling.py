"""Draw docs/scaling.png: how models of 3, 70 and 400 B parameters scale to 16,384 GPUs, on paper.

    python docs/draw_scaling.py search   # about ten minutes: docs/results/scaling/h100_ib400.json
    python docs/draw_scaling.py draw     # docs/scaling.png from it

``search`` looks for the fastest layout of each model on each number of GPUs, as ``megabit plan``
does, ternary and dense in bf16. What the file has already is not searched again; delete it first
where the planner has changed. All of it is predicted: no such cluster was there.
"""

import sys
from pathlib import Path

from megabit.config import load_config
from megabit.plan.catalog import known_machine
from megabit.plan.draw import Scaling, draw_scaling, scaled, write_scaling

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "scaling" / "h100_ib400.json"
PICTURE = ROOT / "docs" / "scaling.png"
MODELS = {"3B": "3b", "70B": "70b", "400B": "400b"}
"""Recipes by what the picture calls their models."""
GPUS = (8, 32, 128, 512, 2048, 8192, 16384)


def search() -> None:
    """Write ``RESULTS``, after each point."""
    machine = known_machine("h100", 8, "ib400")
    configs = {
        name: load_config([str(ROOT / "examples" / "recipe" / f"{recipe}.yaml")])
        for name, recipe in MODELS.items()
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    done = Scaling.read(RESULTS).points if RESULTS.exists() else []
    for scaling in scaled(configs, GPUS, machine, done):
        write_scaling(RESULTS, scaling)
        point = scaling.points[-1]
        found = f"{point.layout}, {point.tokens_per_s:,.0f} tokens/s" if point.layout else "none"
        print(f"{point.model} {point.kind}, {point.gpus:,} GPUs: {found}", flush=True)


def main() -> None:
    match sys.argv[1:]:
        case ["search"]:
            search()
        case ["draw"]:
            draw_scaling(Scaling.read(RESULTS), PICTURE)
        case _:
            print(__doc__)
            sys.exit(2)


if __name__ == "__main__":
    main()
