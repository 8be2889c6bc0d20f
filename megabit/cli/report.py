"""``megabit report``: a page with the plots of a run."""

from pathlib import Path
from typing import Annotated

import typer

from megabit.units import file_size_text


def report(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", help="A run's folder (run.dir).", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; default: report.html in RUN_DIR.", show_default=False),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Draw this run, too; may be given several times.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write one HTML page with a run's plots, events and tables; it needs no network.

    Works while the run goes on. A page that is there is replaced.

    Example: megabit report runs/default

    Example: megabit report runs/ternary --compare runs/dense --out both.html
    """
    from megabit.report import write_report

    path = write_report(run_dir, out, compare or [])
    print(f"Report: {path} ({file_size_text(path.stat().st_size)})")
