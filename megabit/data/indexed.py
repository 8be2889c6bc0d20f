"""Token sequences on disk, byte-compatible with Megatron-LM's indexed dataset.

``PREFIX.bin`` is the token ids of all sequences, one after the other. ``PREFIX.idx``, all
little-endian, is

    magic "MMIDIDX\\0\\0" · uint64 version · uint8 dtype code · uint64 n · uint64 d
    int32 lengths[n] (tokens) · int64 pointers[n] (bytes) · int64 document_indices[d]

where document i is the sequences ``document_indices[i]`` up to ``document_indices[i + 1]``. megabit
writes one sequence per document and reads any number.
"""

import os
import secrets
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megabit.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
HEADER = struct.Struct("<9sQBQQ")

Tokens = npt.NDArray[np.integer[Any]]
Load = Callable[[Path, np.dtype[Any], int], Tokens]
"""From the path of a ``.bin``, its dtype and the number of its tokens to these."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron-LM stores ids of such a vocabulary in: uint16, or int32 if large."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


class IndexedDatasetWriter:
    """Streams documents to ``PREFIX.bin`` and ``PREFIX.idx``; use it as a ``with`` block.

    Both files appear when the block ends, and only if it ends without an exception.

    Args:
        prefix: path without ``.bin`` / ``.idx``; its folder must exist.
        dtype: an integer type that ``DTYPE_CODES`` lists.
    """

    def __init__(self, prefix: Path, dtype: npt.DTypeLike) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPE_CODES.items() if known == self.dtype]
        if not codes or self.dtype.kind not in "ui":
            raise ValueError(f"no indexed dataset holds tokens of type {self.dtype}")
        self._dtype_code = codes[0]
        self._lengths = array("i")
        unique = secrets.token_hex(4)
        self._bin_draft = prefix.with_name(f".{prefix.name}.{unique}.bin")
        self._idx_draft = prefix.with_name(f".{prefix.name}.{unique}.idx")

    def __enter__(self) -> Self:
        self._bin = self._bin_draft.open("xb")
        return self

    def add_document(self, tokens: Sequence[int] | Tokens) -> None:
        """Append one document.

        Args:
            tokens: ids, shape [length].

        Raises:
            UserError: an id does not fit the dtype.
        """
        ids = np.asarray(tokens) if len(tokens) else np.empty(0, dtype=self.dtype)
        if ids.ndim != 1 or ids.dtype.kind not in "ui":
            raise TypeError(f"a document is a list of integers, not {ids.dtype} of {ids.shape}")
        limits = np.iinfo(self.dtype)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) > limits.max):
            bad = int(ids.max()) if int(ids.max()) > limits.max else int(ids.min())
            raise UserError(
                f"{bin_path(self.prefix)}: token {bad} does not fit {self.dtype} "
                f"(0 to {limits.max}); the vocabulary is larger than the dtype"
            )
        if ids.size > np.iinfo(np.int32).max:
            raise UserError(
                f"{bin_path(self.prefix)}: a document of {ids.size} tokens is longer than the "
                f"format can index; cut it into documents of at most {np.iinfo(np.int32).max}"
            )
        self._bin.write(ids.astype(self.dtype, copy=False).tobytes())
        self._lengths.append(ids.size)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._bin.close()
            if error is None:
                self._write_index()
                # Without its .idx a .bin is no dataset: an old .idx never meets the new .bin.
                idx_path(self.prefix).unlink(missing_ok=True)
                os.replace(self._bin_draft, bin_path(self.prefix))
                os.replace(self._idx_draft, idx_path(self.prefix))
        finally:
            self._bin_draft.unlink(missing_ok=True)
            self._idx_draft.unlink(missing_ok=True)

    def _write_index(self) -> None:
        lengths = np.array(self._lengths, dtype="<i4")
        count = lengths.size
        with self._idx_draft.open("xb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._dtype_code, count, count + 1))
            file.write(lengths.tobytes())
            file.write((_starts(lengths)[:-1] * self.dtype.itemsize).astype("<i8").tobytes())
            file.write(np.arange(count + 1, dtype="<i8").tobytes())


class IndexedDataset:
    """The documents of ``PREFIX.bin``, memory-mapped: opening reads the ``.idx`` only.

    Args:
        prefix: path without ``.bin`` / ``.idx``.
        load: from path, dtype and number to the tokens; else than by default, ``memory`` has one.

    Raises:
        UserError: a file is missing, damaged, or the two do not belong together.
    """

    def __init__(self, prefix: Path, load: Load | None = None) -> None:
        self.prefix = prefix
        self.dtype, self._bounds = _read_index(idx_path(prefix))
        self._tokens = (load or _map_tokens)(bin_path(prefix), self.dtype, self.num_tokens)

    def __len__(self) -> int:
        """Number of documents."""
        return self._bounds.size - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents together."""
        return int(self._bounds[-1])

    @property
    def document_bounds(self) -> npt.NDArray[np.int64]:
        """Where each document begins in the file, and where the last one ends, in tokens: shape
        [len(self) + 1]."""
        return self._bounds

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens in each document, shape [len(self)]."""
        return np.diff(self._bounds)

    def document(self, index: int) -> Tokens:
        """Document ``index`` (0 up to ``len(self)``): a read-only view, shape [its length]."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self._tokens[self._bounds[index] : self._bounds[index + 1]]

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens ``start`` up to ``stop`` of all documents in file order: a read-only view."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start}:{stop} of {self.num_tokens}")
        return self._tokens[start:stop]


def _starts(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Where each sequence starts, and where the last one ends: shape [n + 1], in tokens."""
    starts = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _read_index(path: Path) -> tuple[np.dtype[Any], npt.NDArray[np.int64]]:
    """The dtype of the tokens and the token bounds of the documents, shape [documents + 1]."""

    def damaged(reason: str) -> UserError:
        return UserError(f"{path}: {reason}; prepare the corpus again")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or not header.startswith(MAGIC):
                raise damaged("is not an indexed dataset (its magic bytes are not MMIDIDX)")
            _, version, code, sequences, boundaries = HEADER.unpack(header)
            if version != VERSION:
                raise damaged(f"has version {version}; megabit reads version {VERSION}")
            if code not in DTYPE_CODES or DTYPE_CODES[code].kind not in "ui":
                raise damaged(f"has dtype code {code}; tokens have code 1, 2, 3, 4, 5 or 8")
            # Checked before anything is allocated: a damaged count may be as large as 2^64.
            expected = HEADER.size + sequences * (4 + 8) + boundaries * 8
            if size != expected:
                raise damaged(f"has {size} bytes but its counts demand {expected}")
            lengths = np.frombuffer(file.read(4 * sequences), dtype="<i4")
            pointers = np.frombuffer(file.read(8 * sequences), dtype="<i8")
            documents = np.frombuffer(file.read(8 * boundaries), dtype="<i8")
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror}); prepare the corpus") from error
    if lengths.size and lengths.min() < 0:
        raise damaged("holds a negative sequence length")
    starts = _starts(lengths)
    dtype = DTYPE_CODES[code]
    if not np.array_equal(pointers, starts[:-1] * dtype.itemsize):
        raise damaged("its pointers are not contiguous, so it belongs to another .bin")
    if (
        not documents.size
        or documents[0] != 0
        or documents[-1] != sequences
        or np.any(documents[:-1] > documents[1:])
    ):
        raise damaged(f"its document indices do not rise from 0 to its {sequences} sequences")
    return dtype, starts[documents]


def check_size(path: Path, dtype: np.dtype[Any], count: int) -> None:
    """Refuse a ``.bin`` that has not so many tokens, with a UserError."""
    expected = count * dtype.itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror}); prepare the corpus") from error
    if size != expected:
        raise UserError(
            f"{path}: has {size} bytes but its .idx demands {expected}; it is truncated or of "
            "another dataset; prepare the corpus again"
        )


def _map_tokens(path: Path, dtype: np.dtype[Any], count: int) -> Tokens:
    check_size(path, dtype, count)
    if not count:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    try:
        # As a plain array: each slice of a memmap is a memmap, which takes ten times as long.
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,)).view(np.ndarray)
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror}); prepare the corpus") from error
