"""``megabit`` called in this process: what it prints, and its exit code."""

import io
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from megabit.cli.main import main


def called(
    *arguments: str | Path | int, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """In ``cwd``, on a screen of 100 columns: as ``subprocess.run`` would have it, without the
    seconds that a process takes to import torch."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
        chdir(cwd or Path.cwd()),
    ):
        patch.setattr(sys, "argv", ["megabit", *map(str, arguments)])
        patch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as ended:
            main()
    code = int(ended.value.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def megabit(*arguments: str | Path | int) -> tuple[int, list[str], list[str]]:
    """Exit code, and the lines of stdout and stderr."""
    done = called(*arguments)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def refused(*arguments: str | Path | int, cwd: Path | None = None) -> str:
    """The line with which a command that must end with 2 says why."""
    done = called(*arguments, cwd=cwd)
    err = done.stderr.splitlines()
    assert (done.returncode, len(err)) == (2, 1), err
    assert err[0].startswith("error: ")
    return err[0].removeprefix("error: ")
