"""``megabit``: the command and what is the same for all subcommands.

Subcommands import what they need when they run, so that ``--help`` and ``config`` answer at once.
"""

import sys
from typing import Annotated

import typer

from megabit import __version__
from megabit.cli import (
    bench,
    chat,
    checkpoint,
    config,
    doctor,
    evaluate,
    examples,
    export_model,
    generate,
    import_model,
    inject,
    owner,
    parity,
    plan,
    prepare,
    report,
    schedule,
    serve,
    train,
)
from megabit.cli.environment import speaks_for_host
from megabit.errors import RunError, UserError

app = typer.Typer(
    name="megabit",
    help=(
        "Train and serve BitNet b1.58 (ternary) language models with tensor, pipeline and data "
        "parallelism."
        "\n\n"
        "SETTINGS are YAML files and key=value pairs, merged from left to right. Those of "
        "generate, chat, serve and bench serve are parallel, engine and server; of all other "
        "commands that take them, what megabit config shows."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("prepare")(prepare.prepare)
app.command("parity")(parity.parity)
app.command("doctor")(doctor.doctor)
app.command("owner")(owner.owner)
app.command("config")(config.show_config)
app.command("examples")(examples.examples)
app.command("schedule")(schedule.schedule)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.add_typer(checkpoint.app, name="ckpt")
app.add_typer(inject.app, name="inject")
app.add_typer(import_model.app, name="import")
app.add_typer(export_model.app, name="export")
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"megabit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of the command itself; its help is above."""


def main() -> None:
    """Run the command line; what the user got wrong ends in one clear line each and code 2."""
    try:
        app()
    except UserError as error:
        _fail(error.problems, 2)
    except RunError as error:
        _fail([str(error)], 1)


def _fail(lines: tuple[str, ...] | list[str], code: int) -> None:
    if speaks_for_host():  # all ranks of a host meet the same error
        for line in lines:
            print(f"error: {line}", file=sys.stderr)
    sys.exit(code)
