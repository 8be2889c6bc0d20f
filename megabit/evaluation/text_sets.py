"""Texts to evaluate on, as windows of tokens: the held-out split, validation sets, any text."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from megabit.config import Config
from megabit.data.corpus import HELD_OUT, CorpusInfo, SplitInfo
from megabit.data.indexed import IndexedDataset
from megabit.data.sampler import HeldOutWindows
from megabit.data.validation import encode_text, load_validation, set_names
from megabit.errors import UserError
from megabit.mesh import ParallelMesh
from megabit.reduce import is_same


@dataclass(frozen=True)
class TextSet:
    """A text in windows, and how much text it is."""

    windows: HeldOutWindows
    split: SplitInfo


def held_out_set(corpus: CorpusInfo, seq_length: int) -> TextSet:
    """All text of ``corpus`` that is never trained on."""
    end = end_of_text_id(corpus.load_tokenizer(), corpus.end_of_text)
    return TextSet(HeldOutWindows(corpus.open_held_out(), seq_length, end), corpus.held_out)


def open_sets(config: Config, corpus: CorpusInfo, mesh: ParallelMesh) -> dict[str, TextSet]:
    """``held_out`` and each of ``data.validation`` by its name, in that order; collective over the
    mesh. They must be prepared.

    Raises:
        UserError: one is missing or damaged, or it is not the same text on all hosts.
    """
    sets = {HELD_OUT: held_out_set(corpus, config.data.seq_length)}
    end = end_of_text_id(corpus.load_tokenizer(), corpus.end_of_text)
    fingerprints = []
    for name in set_names(config.data.validation):
        found = load_validation(corpus, name)
        fingerprints.append(found.fingerprint)
        windows = HeldOutWindows(found.open(), config.data.seq_length, end)
        sets[name] = TextSet(windows, found.split)
    digest = hashlib.sha256(" ".join(fingerprints).encode()).digest()
    if not is_same(digest, mesh.world, mesh.device):
        raise UserError("data.validation: is not the same text on all hosts")
    return sets


@contextmanager
def encoded_texts(
    paths: Sequence[str], text_field: str, tokenizer: Tokenizer, end_of_text: str, seq_length: int
) -> Iterator[Mapping[str, TextSet]]:
    """Any texts by name, encoded into a temporary folder for the length of the block.

    Raises:
        UserError: one cannot be read, or two have the same name.
    """
    end = end_of_text_id(tokenizer, end_of_text)
    with TemporaryDirectory() as folder:
        sets = {}
        for name, path in set_names(paths, "--text").items():
            prefix = Path(folder) / name
            split = encode_text(path, text_field, tokenizer, end_of_text, prefix)
            sets[name] = TextSet(HeldOutWindows(IndexedDataset(prefix), seq_length, end), split)
        yield sets


def end_of_text_id(tokenizer: Tokenizer, end_of_text: str) -> int:
    """The id that precedes a text and pads its end."""
    end = tokenizer.token_to_id(end_of_text)
    assert end is not None, "load_tokenizer has checked it"
    return end
