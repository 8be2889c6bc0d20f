"""All that is wrong with a checkpoint, where ``verify`` stops at the first problem."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from megabit.checkpoint.manifest import Manifest
from megabit.checkpoint.verify import check_file, check_names, check_tensors
from megabit.errors import UserError


def diagnose(folder: Path, report: Callable[[str, int], None] | None = None) -> list[str]:
    """A line for each problem of the checkpoint in ``folder``; none if it is what was saved.

    Tensors are looked at only if the files are in order: they could say nothing else.

    Args:
        report: told the name and the size of each file before it is read.
    """
    try:
        manifest = Manifest.read(folder)
    except UserError as error:
        return [*error.problems]
    problems = _problems(partial(check_names, folder, manifest))
    for name, expected in manifest.files.items():
        if report is not None:
            report(name, expected.bytes)
        if (folder / name).exists():  # else it is among the problems
            problems += _problems(partial(check_file, folder, name, expected))
    return problems or _problems(partial(check_tensors, folder, manifest))


def _problems(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except UserError as error:
        return [*error.problems]
    return []
