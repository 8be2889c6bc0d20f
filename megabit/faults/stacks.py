"""Stacks of a rank that hangs, in ``run.dir/faults/rank_{r}_stacks.txt``.

The watchdog's thread writes them. If it cannot run, since some code holds the interpreter's lock,
a timer of the C library does (``faulthandler.dump_traceback_later``) and ends the process.
"""

import faulthandler
from contextlib import suppress
from pathlib import Path
from typing import IO


class StackFile:
    """The file of one rank; it is there while the timer is set, and stays if something was
    written, now or in a run before."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank_{rank}_stacks.txt"
        self._file: IO[str] | None = None

    def set_timer(self, seconds: float) -> None:
        """Write the stacks and end the process (exit code 1) in so many seconds; set again, it
        begins anew."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._open())

    def stop_timer(self) -> None:
        """Do not."""
        faulthandler.cancel_dump_traceback_later()

    def write(self, heading: str) -> None:
        """The stacks of all threads as they are."""
        self.stop_timer()
        file = self._open()
        file.write(f"{heading}\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)

    def close(self) -> None:
        """Stop the timer, and remove the file if it is empty."""
        self.stop_timer()
        if self._file is not None:
            is_empty = self._file.tell() == 0
            self._file.close()
            if is_empty:
                with suppress(OSError):
                    self.path.unlink()

    def _open(self) -> IO[str]:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        return self._file
