"""Documents from the files that users have: text, Markdown, JSON lines, Parquet, folders, wheels.

Everything streams: one document (for Parquet, one batch of rows) is in memory at a time.
"""

import hashlib
import json
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megabit.errors import UserError, first_line

PLAIN_SUFFIXES = (".txt", ".md")
ARCHIVE_SUFFIXES = (".whl", ".zip")
FOLDER_SUFFIXES = (*PLAIN_SUFFIXES, ".jsonl", ".parquet")
"""Files that are read from a folder; others in it are passed over."""

LARGEST_MEMBER_BYTES = 1 << 30
"""A member of an archive is decompressed in memory; larger ones are refused."""

# What zipfile raises, beside OSError, on damaged, encrypted or exotic archives.
_DAMAGED_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
    ValueError,
)

_ABOUT_THE_PACKAGE = ("readme", "license", "licence", "notice", "changelog", "changes", "authors")


@dataclass(frozen=True)
class Document:
    """One text. ``name`` says where it is, relative to the source; it is unique in the source."""

    name: str
    text: str


def read_documents(path: Path, text_field: str) -> Iterator[Document]:
    """The documents of ``path`` that are not blank, in an order that depends on contents only.

    Args:
        path: a .txt or .md file (one document), a .jsonl (one a line) or .parquet file (one a row),
            a folder of those (by relative path), or a .whl or .zip with .txt and .md members.
        text_field: field or column that holds the text in JSON lines and Parquet.

    Raises:
        UserError: at the first document that cannot be read, or at the end if there was none.
    """
    empty = True
    for name, file in source_files(path):
        try:
            for document in _read_file(name, file, text_field):
                if document.text and not document.text.isspace():
                    empty = False
                    yield document
        except OSError as error:
            raise UserError(f"{file}: cannot read it ({error.strerror or error})") from error
    if empty:
        raise UserError(f"{path}: holds no text; give a file or folder with at least one document")


def source_digest(path: Path) -> str:
    """SHA-256 (hex) over the names and bytes of all files that ``read_documents`` would read."""
    digest = hashlib.sha256()
    for name, file in source_files(path):
        try:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{file}: cannot read it ({error.strerror})") from error
        digest.update(f"{content} {name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def source_files(path: Path) -> list[tuple[str, Path]]:
    """The files of a source, each with its name relative to the source.

    Raises:
        UserError: ``path`` is missing, of a kind that megabit cannot read, or an empty folder.
    """
    if path.is_dir():
        files = [
            (file.relative_to(path).as_posix(), file)
            for file in _walk(path)
            if file.suffix.lower() in FOLDER_SUFFIXES
        ]
        if not files:
            raise UserError(f"{path}: the folder holds no {_listed(FOLDER_SUFFIXES)} file")
        return sorted(files)
    if not path.exists():
        raise UserError(f"{path}: does not exist; give a text file, a folder or a wheel")
    known = (*FOLDER_SUFFIXES, *ARCHIVE_SUFFIXES)
    if path.suffix.lower() not in known:
        raise UserError(f"{path}: unknown kind of file; give a {_listed(known)} file or a folder")
    return [(path.name, path)]


def _walk(folder: Path) -> Iterator[Path]:
    """All files below ``folder`` but hidden ones; a folder that cannot be listed is an error."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot list it ({error.strerror})") from error

    for root, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root, name) for name in files if not name.startswith("."))


def _read_file(name: str, file: Path, text_field: str) -> Iterator[Document]:
    suffix = file.suffix.lower()
    if suffix == ".jsonl":
        yield from _read_jsonl(name, file, text_field)
    elif suffix == ".parquet":
        yield from _read_parquet(name, file, text_field)
    elif suffix in ARCHIVE_SUFFIXES:
        yield from _read_archive(file)
    else:
        yield Document(name, _decode(file.read_bytes(), str(file)))


def _read_jsonl(name: str, file: Path, text_field: str) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            source = _decode(line, where)
            if not source or source.isspace():
                continue
            try:
                row = json.loads(source)
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise UserError(f"{where}: not valid JSON ({reason})") from error
            if not isinstance(row, dict):
                raise UserError(f'{where}: must be an object such as {{"{text_field}": "…"}}')
            text = _field_text(row, text_field, where)
            try:
                text.encode()
            except UnicodeEncodeError as error:  # JSON can escape half a surrogate pair
                raise UserError(f"{where}: {text_field!r} is not valid Unicode") from error
            yield Document(f"{name}:{number}", text)


def _field_text(row: dict[str, Any], text_field: str, where: str) -> str:
    if text_field not in row:
        raise UserError(_missing_field(where, text_field, list(row)))
    text = row[text_field]
    if text is None:  # as in Parquet: a row without text
        return ""
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_field!r} must be text, not {type(text).__name__}")
    return text


def _read_parquet(name: str, file: Path, text_field: str) -> Iterator[Document]:
    # Slow to import, and few corpora need it.
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                raise UserError(_missing_field(str(file), text_field, names))
            kind = table.schema_arrow.field(text_field).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise UserError(f"{file}: column {text_field!r} must be text, not {kind}")
            for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield Document(f"{name}:{number}", text or "")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: a text after row {number} is not UTF-8") from error
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable Parquet file ({first_line(error)})") from error


def _read_archive(file: Path) -> Iterator[Document]:
    """Read members in place: nothing is extracted to disk, and no package is imported."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if _is_text(member, file)]
            for member in sorted(members, key=lambda member: member.filename):
                where = f"{file}/{member.filename}"
                if member.file_size > LARGEST_MEMBER_BYTES:
                    raise UserError(
                        f"{where}: has {member.file_size} bytes, more than the "
                        f"{LARGEST_MEMBER_BYTES} that megabit reads from an archive; unpack it"
                    )
                yield Document(member.filename, _decode(archive.read(member), where))
    except _DAMAGED_ARCHIVE as error:
        raise UserError(f"{file}: not a readable archive ({error})") from error


def _is_text(member: zipfile.ZipInfo, file: Path) -> bool:
    """Whether a member is text that the package carries, not text about the package."""
    path = PurePosixPath(member.filename)
    at_the_top_of_a_wheel = file.suffix.lower() == ".whl" and len(path.parts) < 2
    return not (
        member.is_dir()
        or path.suffix.lower() not in PLAIN_SUFFIXES
        or path.stem.lower() in _ABOUT_THE_PACKAGE
        or at_the_top_of_a_wheel
        or any(part.startswith(".") or part.endswith(".dist-info") for part in path.parts)
    )


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text (byte {error.start}); convert it") from error


def _missing_field(where: str, text_field: str, present: list[str]) -> str:
    return f"{where}: has no field {text_field!r}; set data.text_field to one of: " + (
        ", ".join(map(str, present)) or "(it has none)"
    )


def _listed(suffixes: tuple[str, ...]) -> str:
    return ", ".join(suffixes[:-1]) + f" or {suffixes[-1]}"
