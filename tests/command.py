"""``megabit`` called in this process: what it prints, and its exit code."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from megabit.cli.main import main


def megabit(*arguments: str | Path | int) -> tuple[int, list[str], list[str]]:
    """Exit code, and the lines of stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["megabit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0), out.getvalue().splitlines(), err.getvalue().splitlines()


def refused(*arguments: str | Path | int) -> str:
    """The line with which a command that must end with 2 says why."""
    code, _, err = megabit(*arguments)
    assert (code, len(err)) == (2, 1), err
    assert err[0].startswith("error: ")
    return err[0].removeprefix("error: ")
