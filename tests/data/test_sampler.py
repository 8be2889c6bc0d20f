"""The order of samples, and held-out windows that count every token once."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megabit.data.indexed import IndexedDataset, IndexedDatasetWriter
from megabit.data.sampler import HeldOutWindows, TrainingSampler
from megabit.errors import UserError

END = 60_000
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def make_dataset(folder: Path, lengths: list[int]) -> IndexedDataset:
    """Tokens 0, 1, 2 … over all documents, so that a token says where it comes from."""
    token = 0
    with IndexedDatasetWriter(folder / "train", np.uint16) as writer:
        for length in lengths:
            writer.add_document(list(range(token, token + length)))
            token += length
    return IndexedDataset(folder / "train")


def joined_in_epoch_order(sampler: TrainingSampler, epoch: int) -> list[int]:
    order = sampler._shuffle(epoch).documents
    return [int(token) for i in order for token in sampler.dataset.document(int(i))]


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(LENGTHS, st.integers(1, 7), st.integers(0, 5))
def test_each_epoch_covers_every_window_once(
    tmp_path: Path, lengths: list[int], seq_length: int, seed: int
) -> None:
    dataset = make_dataset(tmp_path, lengths)
    if sum(lengths) < seq_length + 1:
        with pytest.raises(UserError, match=rf"seq_length: .* has {sum(lengths)}; use a smaller"):
            TrainingSampler(dataset, seq_length, seed)
        return
    sampler = TrainingSampler(dataset, seq_length, seed)
    per_epoch = sampler.samples_per_epoch
    for epoch in range(3):
        stream = joined_in_epoch_order(sampler, epoch)
        assert sorted(stream) == list(range(dataset.num_tokens))
        windows = [
            tuple(stream[start : start + seq_length + 1])
            for start in range(0, len(stream) - seq_length, seq_length)
        ]
        samples = [tuple(sampler.sample(epoch * per_epoch + i).tolist()) for i in range(per_epoch)]
        assert sorted(samples) == sorted(windows)


def test_a_sample_depends_on_seed_and_number_only(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [30, 50, 20, 7])
    forward = [TrainingSampler(dataset, 5, 3).sample(n).tolist() for n in range(60)]
    sampler = TrainingSampler(dataset, 5, 3)
    assert [sampler.sample(n).tolist() for n in reversed(range(60))] == forward[::-1]
    assert [TrainingSampler(dataset, 5, 4).sample(n).tolist() for n in range(60)] != forward
    assert sampler.sample(0).dtype == np.int64


def test_epochs_differ(tmp_path: Path) -> None:
    sampler = TrainingSampler(make_dataset(tmp_path, [10] * 20), 9, 0)
    per_epoch = sampler.samples_per_epoch
    first, second = (
        [sampler.sample(epoch * per_epoch + i).tolist() for i in range(per_epoch)]
        for epoch in (0, 1)
    )
    assert sorted(first) != sorted(second)  # the documents join elsewhere
    assert first != sorted(first)


def test_the_order_never_changes_between_versions(tmp_path: Path) -> None:
    """A run that goes on with a newer numpy or megabit must see the same samples."""
    sampler = TrainingSampler(make_dataset(tmp_path, [4, 3, 5]), 2, 1234)
    assert [sampler.sample(n).tolist() for n in range(7)] == [
        [6, 7, 8],
        [4, 5, 6],
        [10, 11, 0],
        [0, 1, 2],
        [8, 9, 10],
        [0, 1, 2],  # the second epoch
        [4, 5, 6],
    ]


def test_refuses_a_negative_number(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        TrainingSampler(make_dataset(tmp_path, [10]), 3, 0).sample(-1)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(LENGTHS, st.integers(1, 7))
def test_held_out_windows_predict_each_token_once(
    tmp_path: Path, lengths: list[int], seq_length: int
) -> None:
    dataset = make_dataset(tmp_path, lengths)
    windows = HeldOutWindows(dataset, seq_length, END)
    predicted: list[int] = []
    for i in range(len(windows)):
        tokens, mask = windows.window(i)
        assert (tokens.shape, tokens.dtype) == ((seq_length + 1,), np.dtype(np.int64))
        assert (mask.shape, mask.dtype) == ((seq_length,), np.dtype(np.bool_))
        targets = tokens[1:][mask].tolist()
        inputs = tokens[:-1][mask].tolist()
        assert inputs == [target - 1 if target else END for target in targets]
        assert (tokens[1:][~mask] == END).all()
        predicted += targets
    assert predicted == list(range(dataset.num_tokens))
    for index in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows.window(index)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(LENGTHS, st.integers(1, 7), st.lists(st.integers(0, 40), max_size=9))
def test_many_samples_at_once(
    tmp_path: Path, lengths: list[int], seq_length: int, numbers: list[int]
) -> None:
    """In any order, of several epochs, over documents of no length."""
    if sum(lengths) < seq_length + 1:
        return
    dataset = make_dataset(tmp_path, lengths)
    together = TrainingSampler(dataset, seq_length, 1).samples(numbers)
    assert together.shape == (len(numbers), seq_length + 1)
    one = TrainingSampler(dataset, seq_length, 1)
    per_epoch = one.samples_per_epoch
    for number, sample in zip(numbers, together.tolist(), strict=True):
        epoch, position = divmod(number, per_epoch)
        start = int(one._shuffle(epoch).windows[position]) * seq_length
        assert sample == joined_in_epoch_order(one, epoch)[start : start + seq_length + 1]
