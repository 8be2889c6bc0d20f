"""Which tokens make up a sample: a function of the seed and the sample's number, nothing else.

The layout and the number of ranks do not enter, and there is no state to save: a run that has
consumed n samples goes on with sample n.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megabit.data.indexed import IndexedDataset, bin_path
from megabit.errors import UserError


class TrainingSampler:
    """An endless order of samples over the training split.

    In each epoch the documents are shuffled and joined, the result is cut into windows of S + 1
    tokens that overlap by one (so S predictions each; the tail that fills no window is left out,
    another one each epoch), and the windows are shuffled.

    Args:
        dataset: the training split.
        seq_length: S.
        seed: of the order; 0 or more.

    Raises:
        UserError: the split has fewer than S + 1 tokens.
    """

    def __init__(self, dataset: IndexedDataset, seq_length: int, seed: int) -> None:
        if dataset.num_tokens < seq_length + 1:
            raise UserError(
                f"data.seq_length: {seq_length} needs {seq_length + 1} tokens but "
                f"{bin_path(dataset.prefix)} has {dataset.num_tokens}; "
                "use a smaller length or more text"
            )
        self.dataset = dataset
        self.seq_length = seq_length
        self.seed = seed
        self.samples_per_epoch = (dataset.num_tokens - 1) // seq_length
        self._lengths = dataset.document_lengths
        self._epoch: _Epoch | None = None

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """Sample ``number`` (0 or more) of the run: int64 [S + 1]."""
        return self.samples([number])[0]

    def samples(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """Samples of the run by their numbers (0 or more): int64 [n, S + 1].

        Python works once for each run of tokens that come from one document, not for each sample.
        """
        if min(numbers, default=0) < 0:
            raise IndexError(f"sample {min(numbers)}")
        epochs, positions = np.divmod(np.array(numbers, dtype=np.int64), self.samples_per_epoch)
        tokens = np.empty((len(numbers), self.seq_length + 1), dtype=np.int64)
        for number in dict.fromkeys(epochs.tolist()):
            if self._epoch is None or self._epoch.number != number:
                self._epoch = self._shuffle(number)
            rows = np.flatnonzero(epochs == number)
            starts = self._epoch.windows[positions[rows]] * self.seq_length
            tokens[rows] = self._joined_tokens(self._epoch, starts)
        return tokens

    def _shuffle(self, epoch: int) -> "_Epoch":
        documents = _permutation(len(self.dataset), (self.seed, epoch, 0))
        return _Epoch(
            number=epoch,
            documents=documents,
            ends=np.cumsum(self._lengths[documents]),
            windows=_permutation(self.samples_per_epoch, (self.seed, epoch, 1)),
        )

    def _joined_tokens(
        self, epoch: "_Epoch", starts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """S + 1 tokens from each of ``starts [n]`` on, in the epoch's documents joined in its
        order: [n, S + 1]."""
        length = self.seq_length + 1
        first = np.searchsorted(epoch.ends, starts, side="right")
        last = np.searchsorted(epoch.ends, starts + length - 1, side="right")
        # One entry for each document of each window.
        counts = last - first + 1
        window = np.repeat(np.arange(len(starts)), counts)
        place = np.arange(len(window)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        document = epoch.documents[place]
        document_start = epoch.ends[place] - self._lengths[document]
        begin = np.maximum(document_start, starts[window])
        end = np.minimum(epoch.ends[place], starts[window] + length)
        in_file = self.dataset.document_bounds[document] + (begin - document_start)
        in_sample = window * length + (begin - starts[window])
        tokens = np.empty(len(starts) * length, dtype=np.int64)
        parts = zip(in_file.tolist(), in_sample.tolist(), (end - begin).tolist(), strict=True)
        for source, target, size in parts:
            tokens[target : target + size] = self.dataset.tokens(source, source + size)
        return tokens.reshape(-1, length)


class HeldOutWindows:
    """The held-out split in windows such that every token is predicted exactly once.

    The stream is one ``end_of_text`` (so that the first token is predicted too) and all documents;
    window i predicts the S tokens from i·S on, and the last one is padded.

    Args:
        dataset: the held-out split.
        seq_length: S.
        end_of_text: id that precedes the stream and pads its end.
    """

    def __init__(self, dataset: IndexedDataset, seq_length: int, end_of_text: int) -> None:
        self.dataset = dataset
        self.seq_length = seq_length
        self.end_of_text = end_of_text

    def __len__(self) -> int:
        return -(-self.dataset.num_tokens // self.seq_length)

    def window(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Window ``index``: tokens, int64 [S + 1], and which predictions count, bool [S]."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        tokens, mask = self.padding()
        start = index * self.seq_length
        predicted = self.dataset.tokens(
            start, min(start + self.seq_length, self.dataset.num_tokens)
        )
        if start:
            tokens[0] = self.dataset.tokens(start - 1, start)[0]
        tokens[1 : 1 + predicted.size] = predicted
        mask[: predicted.size] = True
        return tokens, mask

    def padding(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """A window of ``end_of_text`` in which no prediction counts."""
        tokens = np.full(self.seq_length + 1, self.end_of_text, dtype=np.int64)
        return tokens, np.zeros(self.seq_length, dtype=np.bool_)


@dataclass(frozen=True)
class _Epoch:
    number: int
    documents: npt.NDArray[np.int64]
    """Documents in the order of this epoch."""
    ends: npt.NDArray[np.int64]
    """Where each of them ends in the joined stream, in tokens."""
    windows: npt.NDArray[np.int64]
    """Window that each sample of the epoch takes."""


def _permutation(size: int, seed: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """A permutation of ``size`` that every version of numpy computes alike.

    numpy promises that of its raw bits only, not of ``Generator.permutation``.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)
