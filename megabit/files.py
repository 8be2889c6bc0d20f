"""Files that are whole or not there: what everything that writes has in common."""

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megabit.errors import UserError


@dataclass(frozen=True)
class FileInfo:
    """What a file must be."""

    bytes: int
    sha256: str


def describe_file(path: Path) -> FileInfo:
    """Size and SHA-256 of a file; reads all of it.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileInfo(bytes=file.tell(), sha256=digest)
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror})") from error


def read_text(path: Path) -> str:
    """The text in a file.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; what is there at the end of the block becomes ``path``,
    unless the block fails."""
    # A name of its own: nobody else's file, and not that of another process that does the same.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Write ``text`` so that the file is either whole or not there.

    Args:
        durable: wait until it would survive a loss of power, its name too.
    """
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
        if durable:
            sync(draft)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until what was written to a file, or the names in a folder, would survive a loss of
    power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
