"""The exceptions that mean "the input is wrong" and "a run cannot go on", as opposed to "megabit is
wrong", and what those of others say on one line."""

import re

_PLACE = re.compile(r"^(?:\[[^]]*(?:gloo|c10d)[^]]*\] )+")
"""How errors of torch's back ends begin: with a place in their sources."""


class UserError(Exception):
    """Something the user gave is wrong: a setting, a file, a world size.

    Each problem is one line that names the key or file and says what would be right. The command
    line prints the lines without a traceback and exits with code 2.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RunError(Exception):
    """A run cannot go on, through no fault of the input; its ranks raise it together.

    The command line prints the message without a traceback and exits with code 1.
    """


def first_line(error: BaseException) -> str:
    """What ``error`` says first, without a place in torch's sources; its type if that is
    nothing."""
    text = (str(error).splitlines() or [""])[0]
    return _PLACE.sub("", text) or type(error).__name__


def named_line(error: BaseException) -> str:
    """The same with its type: ``ValueError: too many``."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
