"""The one exception that means "the input is wrong", as opposed to "megabit is wrong"."""


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
