"""Put a folder in the place of another, as one of several processes that may do so at once."""

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path


def swap(
    draft: Path, folder: Path, is_wanted: Callable[[], bool], refuse: Callable[[], None]
) -> None:
    """Rename ``draft`` to ``folder``, moving what is there out of the way and removing it.

    Args:
        is_wanted: whether another process has put in place meanwhile what ``draft`` is; then that
            is kept.
        refuse: raises if what is there must not be removed.
    """
    retired: list[Path] = []
    try:
        while True:
            try:
                os.rename(draft, folder)  # works if the folder is absent or empty
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if is_wanted():
                return
            refuse()
            old = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
            try:
                os.rename(folder, old)
            except FileNotFoundError:  # another process has just moved it
                continue
            retired.append(old)
    finally:
        for old in retired:
            shutil.rmtree(old, ignore_errors=True)
