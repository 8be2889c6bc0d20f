"""A folder that is whole or not there."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megabit.errors import UserError
from megabit.files import sync


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` to fill, which becomes ``path`` at the end of the block, durably; if
    the block fails nothing is left of it.

    The files in it are for the block to sync (``write_tensors`` and ``files.write_text`` can).

    Raises:
        UserError: ``path`` exists already, or cannot be written.
    """
    if path.exists() or path.is_symlink():
        raise UserError(f"{path}: exists already; name a new folder")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path}: cannot be written: there is no folder {path.parent}")
    draft = None
    try:
        # A name of its own: two processes that write to the same path must not share a draft.
        draft = Path(tempfile.mkdtemp(".tmp", f".{path.name}.", path.absolute().parent))
        inside = draft / path.name  # with the permissions of a folder made in the ordinary way
        inside.mkdir()
        yield inside
        sync(inside)
        if path.exists():  # meanwhile; an empty folder would be replaced without a word
            raise UserError(f"{path}: exists already; name a new folder")
        inside.rename(path)
        sync(path.absolute().parent)
    except OSError as error:
        raise UserError(f"{path}: cannot write it ({error.strerror or error})") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
