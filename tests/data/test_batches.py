"""Dealing samples to ranks: no layout changes what a step trains on; and reading ahead."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megabit.data.batches import Batch, BatchSource, Prefetcher, held_out_batches
from megabit.data.indexed import IndexedDataset, IndexedDatasetWriter
from megabit.data.sampler import HeldOutWindows, TrainingSampler
from megabit.data.step_plan import SampleWindows, StepPlan
from tests.patience import PATIENCE_S

S = 4
END = 60_000


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    with IndexedDatasetWriter(tmp_path / "train", np.uint16) as writer:
        for start in range(0, 300, 30):
            writer.add_document(list(range(start, start + 30)))
    return IndexedDataset(tmp_path / "train")


@pytest.fixture
def sampler(dataset: IndexedDataset) -> TrainingSampler:
    return TrainingSampler(dataset, S, seed=5)


def source_of(
    sampler: TrainingSampler,
    size: int,
    micro: int,
    rank: int = 0,
    dp: int = 1,
    ramp: tuple[int, ...] = (),
    left_out: SampleWindows | None = None,
) -> BatchSource:
    plan = StepPlan(ramp, size, S, steps=1000)
    return BatchSource(sampler, plan, micro, rank, dp, left_out or SampleWindows())


def step(
    sampler: TrainingSampler,
    number: int,
    micro: int,
    dp: int,
    ramp: tuple[int, ...] = (),
    left_out: SampleWindows | None = None,
) -> list[list[int]]:
    """The samples of a step of 24, in the order of the ranks."""
    sources = [source_of(sampler, 24, micro, rank, dp, ramp, left_out) for rank in range(dp)]
    batches = [source.batch(number) for source in sources]
    inputs = torch.cat([batch.inputs.reshape(-1, S) for batch in batches])
    targets = torch.cat([batch.targets.reshape(-1, S) for batch in batches])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    return torch.cat([inputs, targets[:, -1:]], dim=1).tolist()


def test_shapes_and_dtypes(sampler: TrainingSampler) -> None:
    batch = source_of(sampler, 24, 3, rank=1, dp=2).batch(0)
    for tensor, dtype in (
        (batch.inputs, torch.int64),
        (batch.targets, torch.int64),
        (batch.mask, torch.bool),
    ):
        assert tensor.shape == (4, 3, S)
        assert tensor.dtype == dtype
    assert batch.mask.all()


@pytest.mark.parametrize(("micro", "dp"), [(24, 1), (1, 1), (3, 4), (2, 3), (1, 24), (4, 2)])
def test_no_layout_changes_the_samples_of_a_step(
    sampler: TrainingSampler, micro: int, dp: int
) -> None:
    for number in (0, 1, 3, 40):  # the last ones lie in later epochs
        expected = [sampler.sample(24 * number + i).tolist() for i in range(24)]
        assert step(sampler, number, micro, dp) == expected


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_ramp_takes_the_samples_in_the_same_order(sampler: TrainingSampler, dp: int) -> None:
    seen = []
    for number in range(4):
        seen += step(sampler, number, 2, dp, ramp=(8, 8, 16))
    assert seen == [sampler.sample(n).tolist() for n in range(8 + 8 + 16 + 24)]


@pytest.mark.parametrize("dp", [1, 2])
def test_what_is_left_out_is_not_seen_and_the_rest_moves_up(
    sampler: TrainingSampler, dp: int
) -> None:
    left_out = SampleWindows.of([10, 13, 30, 60])
    seen = []
    for number in range(3):
        seen += step(sampler, number, 2, dp, left_out=left_out)
    numbers = [n for n in range(200) if n not in (10, 11, 12) and not 30 <= n < 60]
    assert seen == [sampler.sample(n).tolist() for n in numbers[:72]]


def test_another_dp_at_a_resume_loses_and_repeats_nothing(sampler: TrainingSampler) -> None:
    seen = []
    for number, dp in enumerate((2, 2, 4, 1, 3)):
        seen += step(sampler, number, 1, dp)
    assert seen == [sampler.sample(n).tolist() for n in range(24 * 5)]


@pytest.mark.parametrize(("micro", "rank", "dp"), [(5, 0, 1), (4, 0, 4), (4, 2, 2), (4, -1, 2)])
def test_refuses_an_impossible_deal(
    sampler: TrainingSampler, micro: int, rank: int, dp: int
) -> None:
    with pytest.raises(ValueError, match="cannot deal 24 samples"):
        source_of(sampler, 24, micro, rank, dp)


@pytest.mark.parametrize("dp", [1, 2, 3, 7])
@pytest.mark.parametrize(("m", "micro"), [(1, 1), (2, 3), (1, 100)])
def test_held_out_tokens_are_predicted_once_over_all_ranks(
    dataset: IndexedDataset, m: int, micro: int, dp: int
) -> None:
    windows = HeldOutWindows(dataset, 7, END)
    ranks = [list(held_out_batches(windows, m, micro, rank, dp)) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    predicted = []
    for batches in ranks:
        for batch in batches:
            assert batch.inputs.shape == batch.targets.shape == batch.mask.shape == (m, micro, 7)
            predicted += batch.targets[batch.mask].tolist()
    assert sorted(predicted) == list(range(300))


def test_a_limit_takes_windows_from_the_whole_split(dataset: IndexedDataset) -> None:
    windows = HeldOutWindows(dataset, 10, END)
    (batch,) = held_out_batches(windows, 1, 3, 0, 1, limit=3)
    assert batch.targets[0, :, 0].tolist() == [0, 100, 200]
    assert sum(b.mask.any(-1).sum().item() for b in held_out_batches(windows, 1, 4, 0, 1, 99)) == 30


class FakeSource(BatchSource):
    """Batches that say which they are; optionally breaks, or waits to be released."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.breaks_at = breaks_at
        self.reads: list[int] = []

    def batch(self, step: int) -> Batch:
        self.reads.append(step)
        if step == self.breaks_at:
            raise FloatingPointError("broken")
        number = torch.tensor(step)
        return Batch(number, number, number)


def wait_until_it_has_read(source: FakeSource, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(source.reads) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_prefetcher_keeps_the_order(sampler: TrainingSampler) -> None:
    prefetcher = Prefetcher(source_of(sampler, 8, 2), 2, depth=3)
    for number in range(2, 22):
        expected = source_of(sampler, 8, 2).batch(number)
        assert torch.equal(prefetcher.next().inputs, expected.inputs)
    prefetcher.close()


def test_prefetcher_reads_no_further_than_its_depth() -> None:
    source = FakeSource()
    prefetcher = Prefetcher(source, 0, depth=2)
    wait_until_it_has_read(source, 3)  # two ready, one in hand
    time.sleep(0.05)
    assert source.reads == [0, 1, 2]
    assert int(prefetcher.next().inputs) == 0
    wait_until_it_has_read(source, 4)
    prefetcher.close()


def test_prefetcher_closes_when_full_and_twice() -> None:
    source = FakeSource()
    before = threading.active_count()
    prefetcher = Prefetcher(source, 0, depth=1)
    wait_until_it_has_read(source, 2)
    prefetcher.close()
    prefetcher.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.next()


def test_prefetcher_raises_where_the_source_broke() -> None:
    prefetcher = Prefetcher(FakeSource(breaks_at=2), 0, depth=4)
    assert [int(prefetcher.next().inputs) for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="broken"):
            prefetcher.next()
    prefetcher.close()
