"""A prepared corpus: a folder with two token files, a tokenizer, and a manifest that binds them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from megabit.data.indexed import IndexedDataset, Load
from megabit.data.tokenizer import END_OF_TEXT, load_tokenizer
from megabit.errors import UserError
from megabit.files import FileInfo, describe_file

T = TypeVar("T")

FORMAT = "megabit corpus"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TRAIN = "train"
HELD_OUT = "held_out"
VALIDATION = "validation"
"""Folder of validation sets (``data.validation``), beside the files of the corpus."""
DATA_FILES = (
    *(f"{name}.{kind}" for name in (TRAIN, HELD_OUT) for kind in ("bin", "idx")),
    TOKENIZER,
)
"""All files of a corpus but the manifest, which lists them."""


@dataclass(frozen=True)
class SplitInfo:
    """How much one split holds."""

    documents: int
    tokens: int
    """Ids, with the ``END_OF_TEXT`` of each document."""
    bytes: int
    """UTF-8 bytes of the text: what bits per byte are counted over."""


@dataclass(frozen=True)
class CorpusInfo:
    """What a manifest says of the corpus in ``dir``."""

    dir: Path
    fingerprint: str
    """SHA-256 of all that went in: sources, field, held-out fraction, vocabulary size, seed."""
    vocab_size: int
    """Ids that the tokenizer has; a short text may give fewer than asked for."""
    train: SplitInfo
    held_out: SplitInfo
    held_out_names: tuple[str, ...]
    """Documents that are never trained on."""
    files: Mapping[str, FileInfo]
    end_of_text: str = END_OF_TEXT
    """The token that ends every document."""

    @property
    def tokenizer_path(self) -> Path:
        return self.dir / TOKENIZER

    @property
    def train_prefix(self) -> Path:
        return self.dir / TRAIN

    @property
    def held_out_prefix(self) -> Path:
        return self.dir / HELD_OUT

    def open_train(self, load: Load | None = None) -> IndexedDataset:
        return _open(self.train_prefix, self.train, load)

    def open_held_out(self) -> IndexedDataset:
        return _open(self.held_out_prefix, self.held_out)

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_path, self.end_of_text)

    def verify(self) -> None:
        """Read every file and compare it with its SHA-256.

        Raises:
            UserError: naming the first file that differs.
        """
        for name, expected in self.files.items():
            if describe_file(self.dir / name) != expected:
                raise UserError(f"{self.dir / name}: is damaged; prepare the corpus again")


def load_corpus(folder: Path) -> CorpusInfo:
    """Read the manifest of ``folder`` and check that the files have the sizes it lists.

    Raises:
        UserError: there is no corpus, it is of another version, or a file is missing or cut short.
    """
    path = folder / MANIFEST
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder}: holds no prepared corpus (no {MANIFEST} of megabit)")
    if manifest.get("version") != VERSION:
        raise UserError(
            f"{path}: has version {manifest.get('version')!r} but this megabit reads version "
            f"{VERSION}; prepare the corpus again"
        )
    try:
        corpus = _from_manifest(folder, manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is damaged ({error!r}); prepare the corpus again") from error
    for name, expected in corpus.files.items():
        file = folder / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}; prepare the corpus again") from error
        if size != expected.bytes:
            raise UserError(
                f"{file}: has {size} bytes but {MANIFEST} demands {expected.bytes}; "
                "prepare the corpus again"
            )
    return corpus


def check_vocab(corpus: CorpusInfo, vocab_size: int) -> None:
    """Refuse a model whose embedding is too small for the ids of ``corpus``."""
    if vocab_size < corpus.vocab_size:
        raise UserError(
            f"model.vocab_size: {vocab_size} is smaller than the {corpus.vocab_size} tokens of the "
            f"corpus in {corpus.dir}; use at least {corpus.vocab_size}, or prepare another corpus"
        )


def read_manifest(folder: Path, kind: str = FORMAT) -> dict[str, Any] | None:
    """The manifest of ``folder``, or None if it has none that megabit wrote (of any version).

    Args:
        kind: what must be its ``format``.

    Raises:
        UserError: it is there and cannot be read.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror})") from error
    ours = isinstance(manifest, dict) and manifest.get("format") == kind
    return manifest if ours else None


def write_manifest(corpus: CorpusInfo, made_from: Mapping[str, Any]) -> None:
    """Write the manifest into ``corpus.dir``; ``made_from`` is for people to read."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": corpus.fingerprint,
        "made_from": made_from,
        "vocab_size": corpus.vocab_size,
        "end_of_text": corpus.end_of_text,
        TRAIN: asdict(corpus.train),
        HELD_OUT: asdict(corpus.held_out),
        "held_out_names": corpus.held_out_names,
        "files": {name: asdict(info) for name, info in corpus.files.items()},
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    # A document may be named after a file whose name is not Unicode; "\udc80" is JSON for that.
    (corpus.dir / MANIFEST).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def _open(prefix: Path, split: SplitInfo, load: Load | None = None) -> IndexedDataset:
    dataset = IndexedDataset(prefix, load)
    if (len(dataset), dataset.num_tokens) != (split.documents, split.tokens):
        raise UserError(
            f"{prefix}.idx: has {len(dataset)} documents and {dataset.num_tokens} tokens but "
            f"{MANIFEST} lists {split.documents} and {split.tokens}; prepare the corpus again"
        )
    return dataset


def _from_manifest(folder: Path, manifest: dict[str, Any]) -> CorpusInfo:
    """Raises KeyError, TypeError or AttributeError where the manifest is not as written."""
    files = manifest["files"]
    return CorpusInfo(
        dir=folder,
        fingerprint=_typed(manifest, "fingerprint", str),
        vocab_size=_typed(manifest, "vocab_size", int),
        train=_split(manifest[TRAIN]),
        held_out=_split(manifest[HELD_OUT]),
        held_out_names=tuple(map(str, _typed(manifest, "held_out_names", list))),
        end_of_text=str(manifest.get("end_of_text", END_OF_TEXT)),
        files={
            name: FileInfo(_typed(files[name], "bytes", int), _typed(files[name], "sha256", str))
            for name in DATA_FILES
        },
    )


def _split(entry: dict[str, Any]) -> SplitInfo:
    return SplitInfo(*(_typed(entry, key, int) for key in ("documents", "tokens", "bytes")))


def _typed(entry: dict[str, Any], key: str, kind: type[T]) -> T:
    value = entry[key]
    if not isinstance(value, kind):
        raise TypeError(f"{key}={value!r}")
    return value
