"""Tokens in memory: the same as mapped ones, or a refusal before anything is read."""

from pathlib import Path

import numpy as np
import pytest

from megabit.data import memory
from megabit.data.indexed import IndexedDataset, IndexedDatasetWriter
from megabit.data.memory import MemoryCache, available_bytes
from megabit.data.sampler import TrainingSampler
from megabit.errors import UserError


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "train", np.dtype("<u2")) as writer:
        for length in (50, 0, 7, 300, 1, 42):
            writer.add_document(generator.integers(0, 60_000, length))
    return tmp_path / "train"


def test_samples_are_the_same_bits(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a read gives less than was asked for."""
    monkeypatch.setattr(memory, "CHUNK_BYTES", 100)
    mapped, cached = IndexedDataset(prefix), IndexedDataset(prefix, MemoryCache(1, print))
    assert np.array_equal(mapped.tokens(0, 400), cached.tokens(0, 400))
    samples = [TrainingSampler(d, 16, 3).samples(range(60)) for d in (mapped, cached)]
    assert np.array_equal(*samples)
    for dataset in (mapped, cached):
        with pytest.raises(ValueError, match="read-only"):
            dataset.tokens(0, 1)[0] = 1


def test_a_file_that_goes_away_does_not_matter_then(prefix: Path) -> None:
    cached = IndexedDataset(prefix, MemoryCache(1, print))
    expected = cached.tokens(0, 400).copy()
    prefix.with_suffix(".bin").write_bytes(b"")
    assert np.array_equal(cached.tokens(0, 400), expected)


def test_what_does_not_fit_is_refused(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting a copy for each rank of the host."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * 800)
    IndexedDataset(prefix, MemoryCache(2, print))
    with pytest.raises(UserError) as caught:
        IndexedDataset(prefix, MemoryCache(3, print))
    (problem,) = caught.value.problems
    assert problem == (
        f"data.cache: ram needs 3 × 0.0 GB for {prefix}.bin, but 0.0 GB are available on this "
        "host; use none"
    )


def test_a_long_read_says_how_far_it_is(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK_BYTES", 400)
    monkeypatch.setattr(memory, "REPORT_S", -1.0)
    said: list[str] = []
    IndexedDataset(prefix, MemoryCache(1, said.append))
    assert said == [f"{prefix}.bin: 0.0 of 0.0 GB in memory"] * 2


def test_a_cut_file_is_refused(prefix: Path) -> None:
    path = prefix.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"has 798 bytes but its \.idx demands 800"):
        IndexedDataset(prefix, MemoryCache(1, print))


def test_available_memory(tmp_path: Path) -> None:
    """Of the host, or of the container if that has less."""
    meminfo = tmp_path / "meminfo"
    assert available_bytes(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal: 100 kB\nMemFree: 5 kB\nMemAvailable: 50 kB\n")
    assert available_bytes(meminfo, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("30000\n")
    (tmp_path / "memory.current").write_text("10000\n")
    assert available_bytes(meminfo, tmp_path) == 20_000
    own = available_bytes()
    assert own is None or own > 2**20
