"""Prepare a corpus once: read the text, hold some of it out, learn a tokenizer, store the tokens.

The source is read four times (digest, split, vocabulary, tokens) so that it never has to fit in
memory. The result is built in a hidden folder beside ``data.dir`` and then renamed, so that
``data.dir`` always holds a whole corpus, also when several processes prepare it at once.
"""

import hashlib
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from megabit.config.schema import DataConfig
from megabit.data import corpus as files
from megabit.data.corpus import CorpusInfo, SplitInfo, check_vocab, load_corpus
from megabit.data.indexed import IndexedDatasetWriter, token_dtype
from megabit.data.sources import Document, source_digest
from megabit.data.split import corpus_documents, hash_key, held_out_mask
from megabit.data.swap import swap
from megabit.data.tokenizer import (
    END_OF_TEXT,
    encode_documents,
    load_tokenizer,
    num_ids,
    train_tokenizer,
)
from megabit.data.validation import find_sources, foreign_files, prepare_validation
from megabit.errors import UserError
from megabit.files import describe_file

__all__ = ["CorpusInfo", "SplitInfo", "check_vocab", "load_corpus", "prepare_corpus"]


def prepare_corpus(
    data: DataConfig, vocab_size: int, seed: int, report: Callable[[str], None]
) -> CorpusInfo:
    """Make sure that ``data.dir`` holds the corpus that the settings describe, and its validation
    sets.

    A corpus made from the same text and settings is kept; another one is replaced as a whole.
    Without ``data.text`` whatever corpus is there is used.

    Args:
        vocab_size: ids that the tokenizer may have (``model.vocab_size``).
        seed: chooses the held-out documents (``train.seed``).
        report: gets one line per stage.

    Raises:
        UserError: a text cannot be read, or ``data.dir`` holds something else than a corpus.
    """
    validation = find_sources(data.validation)  # what cannot be read is told before all else
    if data.text is None:
        corpus = _existing(Path(data.dir), vocab_size)
    else:
        corpus = _prepare(data, Path(data.text), vocab_size, seed, report)
    prepare_validation(corpus, validation, data.text_field, report)
    return corpus


def _prepare(
    data: DataConfig, source: Path, vocab_size: int, seed: int, report: Callable[[str], None]
) -> CorpusInfo:
    folder = Path(data.dir)
    _refuse_user_files(folder)
    tokenizer = None
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(Path(data.tokenizer), data.end_of_text)
        _check_size(tokenizer, vocab_size, data.tokenizer)
    made_from = {
        "version": files.VERSION,
        "source_sha256": source_digest(source),
        "text_field": data.text_field,
        "held_out_fraction": data.held_out_fraction,
        "vocab_size": vocab_size,
        "seed": seed,
        **_foreign(tokenizer, data.end_of_text),
    }
    fingerprint = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
    current = _intact(folder, fingerprint)
    if current is not None:
        report(f"corpus is up to date: {folder}")
        return current
    _refuse_other_source(folder, source)
    real = Path(os.path.realpath(folder))  # a link stays a link: what it points to is replaced
    draft = real.with_name(f".{real.name}.{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True)
        corpus = _build(source, data, tokenizer, vocab_size, seed, fingerprint, draft, report)
        files.write_manifest(corpus, {"source": str(source), **made_from})
        # Two processes may be here at once; whoever finds the other's equal corpus keeps that.
        swap(
            draft,
            real,
            is_wanted=lambda: _intact(real, fingerprint) is not None,
            refuse=lambda: _refuse_user_files(real),  # they may have come since this began
        )
    except OSError as error:
        raise UserError(f"data.dir: cannot write {folder} ({error.strerror})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    report(f"corpus is ready: {folder}")
    return replace(corpus, dir=folder)


def _foreign(tokenizer: Tokenizer | None, end_of_text: str) -> dict[str, str]:
    """What a tokenizer that is not learned from the text adds to what a corpus is made from."""
    if tokenizer is None:
        return {}
    digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    return {"tokenizer_sha256": digest, "end_of_text": end_of_text}


def _check_size(tokenizer: Tokenizer, vocab_size: int, path: str) -> None:
    size = num_ids(tokenizer)
    if size > vocab_size:
        raise UserError(
            f"data.tokenizer: {path} has {size} tokens, but model.vocab_size={vocab_size}; "
            f"use at least {size}"
        )


def _existing(folder: Path, vocab_size: int) -> CorpusInfo:
    if not (folder / files.MANIFEST).exists():
        raise UserError(
            f"data.text: is not set and data.dir={folder} holds no corpus; "
            "set data.text to a text, or data.dir to the folder of a prepared corpus"
        )
    corpus = load_corpus(folder)
    check_vocab(corpus, vocab_size)
    corpus.verify()
    return corpus


def _refuse_user_files(folder: Path) -> None:
    """Let nothing be replaced but a corpus: the folder may hold files that a user cares about."""
    try:
        foreign = _foreign_files(folder)
    except OSError as error:
        raise UserError(f"data.dir: {folder} is not a folder ({error.strerror})") from error
    if foreign:
        raise UserError(
            f"data.dir: {folder} holds files that are not part of a megabit corpus "
            f"(such as {min(foreign)}); give an empty or new folder"
        )


def _refuse_other_source(folder: Path, source: Path) -> None:
    """Let a corpus be replaced by one of the same text only: another takes a folder of its own."""
    manifest = files.read_manifest(folder)
    made_from = manifest.get("made_from") if manifest is not None else None
    other = made_from.get("source") if isinstance(made_from, dict) else None
    if isinstance(other, str) and os.path.realpath(other) != os.path.realpath(source):
        raise UserError(
            f"data.dir: {folder} holds the corpus of another text, {other}; "
            f"give the one of {source} another folder"
        )


def _foreign_files(folder: Path) -> set[str]:
    """What ``folder`` holds beside a corpus; without a manifest nothing in it counts as one."""
    while True:
        try:
            identity = folder.stat().st_ino
            names = {entry.name for entry in folder.iterdir()}
            if files.read_manifest(folder) is not None:
                names -= {*files.DATA_FILES, files.MANIFEST, files.VALIDATION}
                names |= foreign_files(folder)
            if folder.stat().st_ino == identity:
                return names
        except FileNotFoundError:
            return set()
        # Another process has swapped the folder in between: look again.


def _intact(folder: Path, fingerprint: str) -> CorpusInfo | None:
    """The corpus in ``folder`` if it is the wanted one and no byte of it is damaged."""
    try:
        corpus = load_corpus(folder)
        if corpus.fingerprint != fingerprint:
            return None
        corpus.verify()
    except UserError:
        return None
    return corpus


@dataclass(frozen=True)
class _Survey:
    """What the splitting needs to know of each document, shape [documents]."""

    held_out: npt.NDArray[np.bool_]
    text_bytes: npt.NDArray[np.int64]


def _build(
    source: Path,
    data: DataConfig,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    seed: int,
    fingerprint: str,
    folder: Path,
    report: Callable[[str], None],
) -> CorpusInfo:
    """Write all files but the manifest into ``folder``."""

    report(f"reading {source}")
    survey = _survey(corpus_documents(source, data.text_field), data.held_out_fraction, seed)
    held_out: list[bool] = survey.held_out.tolist()

    def documents() -> Iterator[tuple[Document, bool]]:
        """Each document, and whether it is held out."""
        try:
            yield from zip(corpus_documents(source, data.text_field), held_out, strict=True)
        except ValueError as error:
            raise UserError(f"{source}: changed while it was read; prepare it again") from error

    is_learned = tokenizer is None
    end_of_text = END_OF_TEXT if is_learned else data.end_of_text
    if tokenizer is None:
        report(f"training a tokenizer on {held_out.count(False)} of {len(held_out)} documents")
        tokenizer = train_tokenizer(
            (document.text for document, out in documents() if not out), vocab_size
        )
    tokenizer.save(str(folder / files.TOKENIZER))

    report(f"tokenizing with {tokenizer.get_vocab_size()} tokens")
    held_out_names: list[str] = []

    def texts() -> Iterator[str]:
        for document, out in documents():
            if out:
                held_out_names.append(document.name)
            yield document.text

    tokens = {False: 0, True: 0}
    with ExitStack() as stack:
        dtype = token_dtype(num_ids(tokenizer))
        writers = {
            out: stack.enter_context(IndexedDatasetWriter(folder / name, dtype))
            for out, name in ((False, files.TRAIN), (True, files.HELD_OUT))
        }
        encoded = encode_documents(tokenizer, texts(), end_of_text, in_segments=is_learned)
        for out, ids in zip(held_out, encoded, strict=True):
            writers[out].add_document(ids)
            tokens[out] += ids.size

    def split(out: bool) -> SplitInfo:
        text_bytes = int(survey.text_bytes[survey.held_out == out].sum())
        return SplitInfo(held_out.count(out), tokens[out], text_bytes)

    return CorpusInfo(
        dir=folder,
        fingerprint=fingerprint,
        vocab_size=num_ids(tokenizer),
        train=split(False),
        held_out=split(True),
        held_out_names=tuple(held_out_names),
        files={name: describe_file(folder / name) for name in files.DATA_FILES},
        end_of_text=end_of_text,
    )


def _survey(documents: Iterator[Document], fraction: float, seed: int) -> _Survey:
    keys, text_bytes = array("Q"), array("q")  # 16 bytes a document, however many there are
    for document in documents:
        keys.append(hash_key(document, seed))
        text_bytes.append(len(document.text.encode()))
    return _Survey(
        held_out=held_out_mask(np.array(keys, dtype=np.uint64), fraction),
        text_bytes=np.array(text_bytes, dtype=np.int64),
    )
