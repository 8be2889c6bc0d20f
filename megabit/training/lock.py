"""One run at a time in a folder: two would take each other's checkpoints away."""

import errno
import fcntl
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from megabit.checkpoint import on_all_ranks
from megabit.errors import UserError
from megabit.mesh import ParallelMesh

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""From file systems that have none, such as some of clusters."""


class RunLock:
    """The right to work in a run's folder, for the length of a block; collective over the mesh.

    The main rank holds a lock on a file in it, which ends with its process, however that ends.
    Where a run has been before, it is taken at once, so that what is read there stays as it is;
    a new folder is made by ``make_folder`` only.

    Args:
        alert: told if the file system has no locks: then nobody watches.

    Raises:
        UserError: another run has it, or the folder cannot be written.
    """

    def __init__(self, folder: Path, mesh: ParallelMesh, alert: Callable[[str], None]) -> None:
        self._folder, self._mesh, self._alert = folder, mesh, alert
        self._open = ExitStack()
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        on_all_ranks(lambda: self._lock(only_if_used=True), self._mesh)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def make_folder(self) -> None:
        """Make the folder if it is not there, and have the lock."""
        on_all_ranks(lambda: self._lock(only_if_used=False), self._mesh)

    def _lock(self, only_if_used: bool) -> None:
        path = self._folder / "lock"
        if not self._mesh.is_main or self._file is not None:
            return
        if only_if_used and not path.is_file():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = self._open.enter_context(path.open("a"))
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"run.dir: another run is at work in {self._folder}; wait for it, end all of its "
                "processes, or use another folder"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise UserError(
                    f"run.dir: cannot write {self._folder} ({error.strerror})"
                ) from error
            self._alert(
                f"{path} cannot be locked on this file system; see to it that no other run "
                "works in the folder"
            )
