"""``megabit bench``: measure this machine."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megabit.errors import UserError

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine, beside what others use on it.

    Example: megabit bench kernels --quick
    """


@app.command("kernels")
def kernels(
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Models whose layers are measured, of 2b4t, 3b, 70b and trainer "
            "(default 2b4t,3b,70b; with --quick 2b4t).",
            show_default=False,
        ),
    ] = None,
    m: Annotated[
        str | None,
        typer.Option(
            help="Numbers of tokens (default: powers of two up to 4096; with --quick 1,16,256).",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads on the CPU (default: as many as torch takes).", min=1, show_default=False
        ),
    ] = None,
    implementations: Annotated[
        str | None,
        typer.Option(
            help="Which of ours take part: default (as dispatch decides), bitlinear (the whole "
            "layer), or by name: native, native:avx2, triton, … (default: all for the device).",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Leave out what does not fit into so many (default 90; on cuda 7).",
            min=0,
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/bench-kernels"),
    quick: Annotated[bool, typer.Option("--quick", help="One model, short runs.")] = False,
) -> None:
    """Time ternary products beside torch's fp32, bf16, int8 and fake-quantized ones.

    Measures what the machine can do at best, then lets all of them take turns, with weights that
    come from memory and with weights that stay in the cache. Prints tables; writes kernels.json,
    kernels.csv and roofline.png. Ctrl-C keeps what was measured by then.

    Example: megabit bench kernels --shapes 2b4t --m 1,16,256 --threads 1
    """
    import torch

    from megabit_kernels.benchmark import Benchmark, Settings
    from megabit_kernels.benchmark.console import run_and_report
    from megabit_kernels.benchmark.shapes import QUICK_TOKENS, TOKENS, layers_of

    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise UserError(f"--threads: {threads} is more than the {cores} cores of this machine")
    torch.set_num_threads(threads or torch.get_num_threads())
    on_card = device == "cuda"
    models = _words(shapes) or (("2b4t",) if quick else ("2b4t", "3b", "70b"))
    try:
        settings = Settings(
            layers=layers_of(models),
            tokens=_numbers("--m", m) or (QUICK_TOKENS if quick else TOKENS),
            device=device,
            implementations=_words(implementations),
            budget_s=(0.06 if quick else 0.3) / (6 if on_card else 1),
            limit_s=60 * (minutes if minutes is not None else 7 if on_card else 90),
        )
        benchmark = Benchmark(settings)
        out.mkdir(parents=True, exist_ok=True)  # better refused now than after an hour
    except ValueError as error:
        raise UserError(f"--{error}") from None
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror}") from None
    if not run_and_report(benchmark, out):
        sys.exit(130)  # as a shell has it for Ctrl-C


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",")) if text else ()


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    words = _words(text)
    for word in words:
        if not word.isdecimal():
            raise UserError(f"{option}: {word!r} is not a number; write it like {option} 1,16,256")
    return tuple(sorted({int(word) for word in words}))
