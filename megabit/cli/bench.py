"""``megabit bench``: measure this machine."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from megabit.cli.arguments import Settings
from megabit.config import load_config
from megabit.errors import UserError

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine, beside what others use on it.

    Example: megabit bench kernels --quick

    Example: megabit bench train examples/model/tiny.yaml --steps 4
    """


# The kernels can be measured where megabit is not installed, so their package has the options.
@app.command(
    "kernels",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def kernels(context: typer.Context) -> None:
    """Time ternary products beside torch's fp32, bf16, int8 and fake-quantized ones."""
    from megabit_kernels.benchmark.command import main

    sys.exit(main(context.args, "megabit bench kernels"))


@app.command("train")
def train(
    settings: Settings = None,
    nproc: Annotated[
        int, typer.Option(help="Ranks on this host, one thread each; they talk over gloo.", min=1)
    ] = 1,
    steps: Annotated[
        int, typer.Option(help="Optimizer steps to time, after two that do not count.", min=1)
    ] = 8,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Profile one more step of everyone: where it goes.")
    ] = False,
) -> None:
    """Time training steps of a configuration beside the same model in plain torch.

    Takes the SETTINGS that megabit train takes, and random tokens instead of data. Baselines are
    one process each: dense layers, and fake-quantized ones as Hugging Face's AutoBitLinear has
    them, in fp32 and in bf16. They take turns step by step, with the configuration too if it is one
    process. Runs on this host's CPU.

    Example: megabit bench train examples/model/tiny.yaml parallel.tp=2 --nproc 2
    """
    config = load_config(settings or [], nproc)
    if config.run.device == "cuda":
        raise UserError("run.device: megabit bench train measures on the CPU; use cpu or auto")
    # Read when torch is imported: its profiler is not to tell on stderr when it begins and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")

    from megabit.benchmark.console import run_and_report

    run_and_report(config, nproc, steps, breakdown)


@app.command("pipeline")
def pipeline(
    settings: Settings = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(help="A schedule, or file.py:function; may be repeated. Default: all."),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Optimizer steps to time, after two that do not count.", min=1)
    ] = 6,
) -> None:
    """Train with each pipeline schedule: its speed against one process, and its bubble against what
    the simulator says.

    Takes the SETTINGS that megabit train takes, with parallel.pp of 2 or more, and random tokens
    instead of data. Runs tp · pp ranks on this host's CPU, one thread each.

    Example: megabit bench pipeline examples/benchmarks/pipeline.yaml --schedule zb-h1
    """
    config = load_config(settings or [])
    if config.parallel.pp < 2:
        raise UserError("parallel.pp: a pipeline has 2 or more ranks; set it to 2 or more")
    if config.run.device == "cuda":
        raise UserError("run.device: megabit bench pipeline measures on the CPU; use cpu or auto")

    from megabit.benchmark.pipeline_report import run_and_report

    run_and_report(config, schedule, steps)


@app.command("checkpoint")
def checkpoint(
    settings: Settings = None,
    nproc: Annotated[
        int, typer.Option(help="Ranks on this host, one thread each; they talk over gloo.", min=1)
    ] = 1,
    repeats: Annotated[int, typer.Option(help="Saves of each kind.", min=1)] = 3,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to save, for the disk to be measured. Default: here."),
    ] = None,
) -> None:
    """Show how long training waits for a save, beside torch's distributed checkpoint.

    Takes the SETTINGS that megabit train takes, and random tokens instead of data. What is written
    is removed again. Runs on this host's CPU.

    Example: megabit bench checkpoint examples/benchmarks/checkpoint.yaml
    """
    config = load_config(settings or [], nproc)
    folder = folder or Path()
    if not folder.is_dir():
        raise UserError(f"--dir: {folder} is not a folder")

    from megabit.benchmark.checkpoint_report import run_and_report

    run_and_report(config, nproc, repeats, folder)


@app.command("overlap")
def overlap(
    share: Annotated[
        float,
        typer.Option(
            help="Of a microbatch's backward pass that reducing the gradients alone is to take.",
            min=0.05,
            max=1.0,
        ),
    ] = 0.7,
    steps: Annotated[int, typer.Option(help="Steps to time, after two warm-up ones.", min=1)] = 7,
) -> None:
    """Show how much of the gradients' reduction is hidden behind backward, on a slow link.

    Two data-parallel ranks in network namespaces of this host, joined by a link of limited
    bandwidth. Needs Linux, root, ip and tc; says so where they are missing.

    Example: megabit bench overlap --share 0.5
    """
    # Ended by a signal, it still takes the namespaces away.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    from megabit.benchmark.overlap import report

    report(share, steps)
