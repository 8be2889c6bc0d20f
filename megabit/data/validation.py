"""Validation sets: texts beside the corpus, encoded once with its tokenizer, each by itself.

Set ``NAME`` is the folder ``validation/NAME`` of the corpus, with ``text.bin``, ``text.idx`` and a
manifest that says what they were made from. ``NAME`` is that of the text's file or folder, without
suffix.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megabit.data import corpus as files
from megabit.data.corpus import HELD_OUT, CorpusInfo, SplitInfo
from megabit.data.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype
from megabit.data.sources import read_documents, source_digest
from megabit.data.swap import swap
from megabit.data.tokenizer import encode_documents, num_ids
from megabit.errors import UserError
from megabit.files import FileInfo, describe_file, write_text

FORMAT = "megabit validation set"
VERSION = 1
TEXT = "text"
DATA_FILES = (f"{TEXT}.bin", f"{TEXT}.idx")


@dataclass(frozen=True)
class ValidationSet:
    """A prepared set, in ``dir``."""

    dir: Path
    fingerprint: str
    """SHA-256 of all that went in: the text, its field, the tokenizer."""
    split: SplitInfo
    files: Mapping[str, FileInfo]

    def open(self) -> IndexedDataset:
        """Its tokens.

        Raises:
            UserError: they are damaged.
        """
        dataset = IndexedDataset(self.dir / TEXT)
        if (len(dataset), dataset.num_tokens) != (self.split.documents, self.split.tokens):
            raise _damaged(self.dir, "its tokens are not those of its manifest")
        return dataset

    def verify(self) -> None:
        """Read every file and compare it with its SHA-256.

        Raises:
            UserError: naming the first file that differs.
        """
        for name, expected in self.files.items():
            if describe_file(self.dir / name) != expected:
                raise _damaged(self.dir / name, "differs from what was prepared")


def set_names(paths: Sequence[str], key: str = "data.validation") -> dict[str, Path]:
    """The texts by name, in order.

    Args:
        key: where they were given, for messages.

    Raises:
        UserError: a name is taken twice, or is none for a set.
    """
    named: dict[str, Path] = {}
    for text in paths:
        name = Path(os.path.abspath(text)).stem
        if name in named:
            raise UserError(
                f"{key}: {named[name]} and {text} have the same name, {name}; rename one of them"
            )
        if not name or name.startswith(".") or name == HELD_OUT or not name.isprintable():
            raise UserError(f"{key}: {text} cannot be a set named {name!r}; give it another name")
        named[name] = Path(text)
    return named


@dataclass(frozen=True)
class Source:
    """A text that is to be a set."""

    path: Path
    sha256: str


def find_sources(paths: Sequence[str]) -> dict[str, Source]:
    """The texts by name, with their digests; writes nothing.

    Raises:
        UserError: as ``set_names``, or a text cannot be read.
    """
    return {name: Source(path, source_digest(path)) for name, path in set_names(paths).items()}


def prepare_validation(
    corpus: CorpusInfo,
    sources: Mapping[str, Source],
    text_field: str,
    report: Callable[[str], None],
) -> None:
    """Make sure that the folder of ``corpus`` holds each of the texts as a set.

    A set made from the same text is kept; another one of its name is replaced.

    Raises:
        UserError: a text cannot be read, or the folder not written.
    """
    if not sources:
        return
    tokenizer = corpus.load_tokenizer()
    tokenizer_digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    for name, source in sources.items():
        made_from = {
            "version": VERSION,
            "source_sha256": source.sha256,
            "text_field": text_field,
            "tokenizer_sha256": tokenizer_digest,
            "end_of_text": corpus.end_of_text,
        }
        fingerprint = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        if _is_intact(corpus, name, fingerprint):
            report(f"validation set is up to date: {name}")
            continue
        report(f"tokenizing the validation set {name}, {source.path}")
        _prepare(corpus, name, source.path, text_field, tokenizer, fingerprint, made_from)


def load_validation(corpus: CorpusInfo, name: str) -> ValidationSet:
    """The set ``name`` of ``corpus``; reads its manifest.

    Raises:
        UserError: there is none, or it is damaged.
    """
    folder = corpus.dir / files.VALIDATION / name
    manifest = files.read_manifest(folder, FORMAT)
    if manifest is None:
        raise UserError(f"{folder}: holds no prepared validation set; prepare the corpus again")
    try:
        split = SplitInfo(*(int(manifest[key]) for key in ("documents", "tokens", "bytes")))
        listed = {
            name: FileInfo(int(info["bytes"]), str(info["sha256"]))
            for name in DATA_FILES
            for info in [manifest["files"][name]]
        }
        return ValidationSet(folder, str(manifest["fingerprint"]), split, listed)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, f"its manifest is not as written, {error!r}") from error


def encode_text(
    source: Path, text_field: str, tokenizer: Tokenizer, end_of_text: str, prefix: Path
) -> SplitInfo:
    """Write the tokens of all documents of ``source`` to ``PREFIX.bin`` and ``PREFIX.idx``.

    Raises:
        UserError: the text cannot be read.
    """
    documents = tokens = text_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal documents, text_bytes
        for document in read_documents(source, text_field):
            documents += 1
            text_bytes += len(document.text.encode())
            yield document.text

    with IndexedDatasetWriter(prefix, token_dtype(num_ids(tokenizer))) as writer:
        # Whole texts: whether parts would give the same ids depends on the tokenizer.
        for ids in encode_documents(tokenizer, texts(), end_of_text, in_segments=False):
            writer.add_document(ids)
            tokens += ids.size
    return SplitInfo(documents, tokens, text_bytes)


def foreign_files(corpus: Path) -> set[str]:
    """What the folder of sets of a corpus holds beside sets, relative to the corpus."""
    folder = corpus / files.VALIDATION
    if not folder.is_dir():
        return set()
    foreign = set()
    for entry in folder.iterdir():
        name = f"{files.VALIDATION}/{entry.name}"
        if entry.name.startswith("."):  # a draft of ours, of a process that may have died
            continue
        if not entry.is_dir() or files.read_manifest(entry, FORMAT) is None:
            foreign.add(name)
        else:
            known = {*DATA_FILES, files.MANIFEST}
            foreign |= {f"{name}/{inner.name}" for inner in entry.iterdir()} - {
                f"{name}/{inner}" for inner in known
            }
    return foreign


def _prepare(
    corpus: CorpusInfo,
    name: str,
    source: Path,
    text_field: str,
    tokenizer: Tokenizer,
    fingerprint: str,
    made_from: Mapping[str, Any],
) -> None:
    folder = corpus.dir / files.VALIDATION / name
    draft = folder.with_name(f".{name}.{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True)
        split = encode_text(source, text_field, tokenizer, corpus.end_of_text, draft / TEXT)
        manifest = {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "made_from": {"source": str(source), **made_from},
            **asdict(split),
            "files": {name: asdict(describe_file(draft / name)) for name in DATA_FILES},
        }
        write_text(draft / files.MANIFEST, json.dumps(manifest, indent=2) + "\n")
        swap(
            draft,
            folder,
            is_wanted=lambda: _is_intact(corpus, name, fingerprint),
            refuse=lambda: _refuse_user_files(corpus.dir),
        )
    except OSError as error:
        raise UserError(f"data.dir: cannot write {folder} ({error.strerror})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _refuse_user_files(corpus: Path) -> None:
    foreign = foreign_files(corpus)
    if foreign:
        raise UserError(
            f"data.dir: {corpus} holds files that are not part of a megabit corpus "
            f"(such as {min(foreign)}); move them elsewhere"
        )


def _is_intact(corpus: CorpusInfo, name: str, fingerprint: str) -> bool:
    """Whether the set is there, made from the same, and no byte of it is damaged."""
    try:
        found = load_validation(corpus, name)
        if found.fingerprint != fingerprint:
            return False
        found.verify()
    except UserError:
        return False
    return True


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: {reason}; prepare the corpus again")
