"""One run at a time in a folder: two would take each other's checkpoints away."""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megabit.checkpoint import on_all_ranks
from megabit.errors import UserError
from megabit.mesh import ParallelMesh


@contextmanager
def exclusive(folder: Path, mesh: ParallelMesh) -> Iterator[None]:
    """The run's folder, made if need be, for the length of the block; collective over the mesh.

    The main rank holds a lock on a file in it, which ends with its process, however that ends.

    Raises:
        UserError: another run has it, or it cannot be written.
    """
    with ExitStack() as stack:

        def lock() -> None:
            if not mesh.is_main:
                return
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((folder / "lock").open("a"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"run.dir: another run is at work in {folder}; wait for it, end all of its "
                    "processes, or use another folder"
                ) from error
            except OSError as error:
                raise UserError(f"run.dir: cannot write {folder} ({error.strerror})") from error

        on_all_ranks(lock, mesh)
        yield
