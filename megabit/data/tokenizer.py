"""Byte-level BPE (GPT-2's pre-tokenizer), trained and run by the ``tokenizers`` library.

All 256 bytes are in the vocabulary, so there is no unknown token and any text round-trips exactly.
Text is handed to the library in segments of about a MiB, because it keeps some hundred bytes per
token of whatever it is given at once.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megabit.errors import UserError

END_OF_TEXT = "<|endoftext|>"
"""Ends every document; id 0. Text that spells it out is encoded as ordinary characters."""

SMALLEST_VOCAB = 257
"""The 256 bytes and ``END_OF_TEXT``."""

_SEGMENT_CHARS = 1 << 20
_BATCH_CHARS = 4 << 20

# No token of the pre-tokenizer spans such a place, so cutting there changes no token.
_CUT = re.compile(r"(?<=\S)(?=[ \n])")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of at most ``vocab_size``; the same texts always give the same one.

    Short texts hold too few pairs and give fewer tokens.

    Raises:
        UserError: ``vocab_size`` does not hold the 256 bytes and ``END_OF_TEXT``.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise UserError(
            f"model.vocab_size: must be at least {SMALLEST_VOCAB} "
            f"(256 bytes and {END_OF_TEXT}), not {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (segment for text in texts for segment in _segments(text)), trainer
    )
    return _spell_out_special_tokens(tokenizer)


def read_tokenizer(path: Path) -> Tokenizer:
    """Any ``tokenizer.json``, as it is.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: not a tokenizer ({error})") from error


def load_tokenizer(path: Path, end_of_text: str = END_OF_TEXT) -> Tokenizer:
    """Read a ``tokenizer.json`` that ``Tokenizer.save`` wrote.

    Raises:
        UserError: it is missing, is not a tokenizer, or has no token ``end_of_text``.
    """
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror}); prepare the corpus") from error
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: not a tokenizer ({error}); prepare the corpus again") from error
    if tokenizer.token_to_id(end_of_text) is None:
        raise UserError(
            f"{path}: has no token {end_of_text} to end documents with; "
            "name the one that it has for that in data.end_of_text"
        )
    return _spell_out_special_tokens(tokenizer)


def num_ids(tokenizer: Tokenizer) -> int:
    """What an embedding needs; those of a tokenizer of others may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def encode_documents(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    end_of_text: str = END_OF_TEXT,
    in_segments: bool = True,
) -> Iterator[npt.NDArray[np.int32]]:
    """The ids of each text and of ``end_of_text``, in order: int32 [its tokens + 1].

    Runs on all cores; a text's ids are the only thing that grows with its length.

    Args:
        in_segments: hand texts over in parts, which give the ids of the whole where the tokenizer
            is one that ``train_tokenizer`` made.
    """
    end = np.array([tokenizer.token_to_id(end_of_text)], dtype=np.int32)
    parts: list[npt.NDArray[np.int32]] = []
    for batch in _batches(texts, _SEGMENT_CHARS if in_segments else None):
        encodings = tokenizer.encode_batch_fast(
            [segment for segment, _ in batch], add_special_tokens=False
        )
        for (_, ends_text), encoding in zip(batch, encodings, strict=True):
            parts.append(np.array(encoding.ids, dtype=np.int32))
            if ends_text:
                document = np.concatenate((*parts, end))
                parts = []
                yield document


def _spell_out_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Let no text forge an end of document. The setting is not saved in ``tokenizer.json``."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def _batches(texts: Iterable[str], segment_chars: int | None) -> Iterator[list[tuple[str, bool]]]:
    """Segments of all texts, some MiB at a time, each with whether it ends its text."""
    batch: list[tuple[str, bool]] = []
    chars = 0
    for text in texts:
        left = len(text)
        for segment in _segments(text, segment_chars or max(1, len(text))):
            left -= len(segment)
            chars += len(segment)
            batch.append((segment, left == 0))
            if chars >= _BATCH_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def _segments(text: str, chars: int = _SEGMENT_CHARS) -> Iterator[str]:
    """Cut ``text`` into parts of ``chars`` or a little more that tokenize as the whole does.

    The parts add up to ``text``; the empty text is one empty part. ``chars`` is at least 1.
    """
    start = 0
    while len(text) - start > chars:
        cut = _CUT.search(text, start + chars)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]
