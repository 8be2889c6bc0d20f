"""Which documents are held out: whole ones, chosen by content."""

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megabit.data.sources import Document, read_documents
from megabit.errors import UserError

PIECES = 50
"""What a single text is cut into, so that parts of it can be held out."""

_PARAGRAPH_END = re.compile(r"\n(?:[ \t\r]*\n)+")
_LINE_END = re.compile(r"\n+")


def corpus_documents(path: Path, text_field: str) -> Iterator[Document]:
    """``read_documents``, but a source of one document is cut into about ``PIECES``.

    Raises:
        UserError: as ``read_documents``, and if the only document is a single line.
    """
    documents = read_documents(path, text_field)
    first = next(documents)  # there is one, or it raises
    second = next(documents, None)
    if second is not None:
        yield first
        yield second
        yield from documents
        return
    pieces = cut(first)
    if len(pieces) < 2:
        raise UserError(
            f"{path}: is one document of one line, so none can be held out; "
            "give several documents, or a text of several lines"
        )
    yield from pieces


def cut(document: Document, pieces: int = PIECES) -> list[Document]:
    """Cut a text into at most ``pieces`` of similar length that add up to it.

    Cuts lie between paragraphs, or between lines where there are few paragraphs. A blank piece
    joins the one before it.
    """
    parts = _cut_after(_PARAGRAPH_END, document.text, pieces)
    if len(parts) < pieces / 2:
        parts = _cut_after(_LINE_END, document.text, pieces)
    return [Document(f"{document.name}#{i}", part) for i, part in enumerate(parts, start=1)]


def hash_key(document: Document, seed: int) -> int:
    """64 bits that depend on the seed and the text, not on where the document lies.

    Copies of a text share their key, so they stay together (but for one group, at the boundary).
    """
    digest = hashlib.sha256(f"{seed}\n".encode())
    digest.update(document.text.encode())
    return int.from_bytes(digest.digest()[:8], "little")


def held_out_mask(keys: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Mark the documents with the smallest keys, ``fraction`` of all but at least one.

    Args:
        keys: ``hash_key`` of each document, shape [n], n ≥ 2; one is always left to train on.

    Returns:
        bool [n], true where held out.
    """
    count = min(keys.size - 1, max(1, round(fraction * keys.size)))
    mask = np.zeros(keys.size, dtype=np.bool_)
    mask[np.argsort(keys, kind="stable")[:count]] = True
    return mask


def _cut_after(boundary: re.Pattern[str], text: str, pieces: int) -> list[str]:
    smallest = math.ceil(len(text) / pieces)
    parts: list[str] = []
    start = 0
    for match in boundary.finditer(text):
        end = match.end()
        if end - start >= smallest and not text[start:end].isspace():
            parts.append(text[start:end])
            start = end
    rest = text[start:]
    if rest and not rest.isspace():
        parts.append(rest)
    elif parts:
        parts[-1] += rest
    return parts
