"""The benchmark of the engine in a terminal, and as JSON."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megabit.benchmark.engine import MEGABIT, ONE_BY_ONE, TRANSFORMERS, Dtype, Load, Speeds, measure
from megabit.benchmark.environment import describe_place
from megabit.benchmark.parts import engine_part
from megabit.benchmark.random_model import save_random_model
from megabit.config import ModelConfig
from megabit.inference.ranks import usable_cores
from megabit.model import num_parameters
from megabit_kernels.benchmark.console import WIDTH
from megabit_kernels.benchmark.machine import Machine, counted

CPU = torch.device("cpu")
LEGEND = (
    "tokens/s: generated ones, of the median turn, prompts included in the time. ×: how many times "
    "as fast as that the engine is, median over turns. transformers: generate with a cache, "
    "greedy, its quantizers compiled where there is a C++ compiler. one at a time: the engine, "
    "with the same requests one after the other."
)


def run_and_report(
    model: ModelConfig, load: Load, threads: int | None, dtype: Dtype, json_file: Path | None
) -> None:
    """Measure, print, and write ``json_file``."""
    threads = threads or usable_cores()
    console = Console(width=max(WIDTH, Console().width), markup=False, highlight=False)
    console.print(
        f"Model: {num_parameters(model) / 1e6:.1f} M parameters, random, "
        f"{model.num_hidden_layers} layers × {model.hidden_size}, feed-forward "
        f"{model.intermediate_size}, vocabulary {model.vocab_size}, {dtype}; transformers has it "
        "as offline autobitlinear",
        soft_wrap=True,
    )
    machine, document = Machine.describe(CPU), describe_place(CPU)
    console.print(f"{machine}; {counted(threads, 'thread')} for each")
    with TemporaryDirectory() as folder, console.status("writing the model") as status:
        path = Path(folder) / "model"
        save_random_model(path, model, load.max_length, dtype)
        results = measure(path, load, threads, dtype, lambda what: status.update(what))
    console.print(_table(results, load))
    console.print(LEGEND, style="dim")
    if json_file is not None:
        part = engine_part(results, model, load, threads, dtype)
        document.with_parts(part).write(json_file)


def _table(results: list[Speeds], load: Load) -> Table:
    title = (
        f"{load.new_tokens} tokens after prompts of {load.prompt_tokens}, "
        f"median of {counted(load.turns, 'turn')} after one"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("requests", justify="right")
    for heading in (MEGABIT, TRANSFORMERS, "×", ONE_BY_ONE, "×"):
        table.add_column(heading, justify="right", no_wrap=True)
    for speeds in results:
        cells = [Text(f"{speeds.tokens_per_s(MEGABIT):,.1f} tokens/s", style="bold")]
        for name in (TRANSFORMERS, ONE_BY_ONE):
            has_run = name in speeds.seconds
            cells.append(Text(f"{speeds.tokens_per_s(name):,.1f}" if has_run else ""))
            cells.append(Text(f"{speeds.ratio(name):.2f}" if has_run else ""))
        table.add_row(str(speeds.requests), *cells)
    return table
