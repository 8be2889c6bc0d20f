"""How far a command is that reads or writes a whole model: a bar, on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr, which is gone at the end of the block; nothing if that is a file.

    It is to be told what is done next, and what share of all is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    is_shown = sys.stderr.isatty()
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not is_shown
    ) as progress:
        task = progress.add_task("", total=1.0)

        def report(name: str, share: float) -> None:
            progress.update(task, description=name, completed=share)

        yield report
