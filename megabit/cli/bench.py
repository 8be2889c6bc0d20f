"""``megabit bench``: measure this machine."""

import sys

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine, beside what others use on it.

    Example: megabit bench kernels --quick
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
