"""Read runs, write their page."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megabit.errors import UserError
from megabit.files import write_text
from megabit.report.page import make_page
from megabit.report.run import Run, load_run
from megabit.report.series import COLORS


def write_report(folder: Path, out: Path | None = None, others: Sequence[Path] = ()) -> Path:
    """Write the page of the run in ``folder``, drawn over ``others``; returns its path.

    Args:
        out: default: ``report.html`` in ``folder``. A page that is there is replaced.

    Raises:
        UserError: a folder is not a run's, or the page cannot be written.
    """
    if len(others) >= COLORS:
        raise UserError(f"--compare: {len(others)} runs are too many; give {COLORS - 1} or fewer")
    runs = _named([load_run(path) for path in (folder, *others)], [folder, *others])
    out = folder / "report.html" if out is None else out
    if out.is_dir():
        raise UserError(f"{out}: is a folder; give a file, such as {out / 'report.html'}")
    page = make_page(runs)
    try:
        write_text(out, page)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error
    return out


def _named(runs: Sequence[Run], folders: Sequence[Path]) -> list[Run]:
    """Names that tell runs apart: those of their folders, or more of their paths."""
    paths = [folder.resolve() for folder in folders]
    for parts in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    raise UserError("--compare: names the same run twice; give each once")
