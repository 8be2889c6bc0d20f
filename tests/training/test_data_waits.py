"""Time that a run waits for its data, and text that it keeps in memory."""

import threading
import time
from pathlib import Path

import pytest

from megabit.data import memory
from megabit.data.batches import Batch, BatchSource, Prefetcher
from megabit.data.corpus import CorpusInfo
from megabit.launch import run_ranks
from megabit.telemetry.metrics import read_metrics
from megabit.training import trainer
from tests.patience import PATIENCE_S
from tests.training.runs import (
    assert_same_tensors,
    checkpoint,
    config_of,
    refused,
    train,
    train_here,
)
from tests.training.tiny import tiny_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


ASKED = threading.Event()
"""A step wants its batch."""


class SlowDisk(BatchSource):
    """Reads as a disk does that is far slower than the steps, however slow these are: it begins
    when a step waits for it."""

    def batch(self, step: int) -> Batch:
        if self.dp_rank == 1:
            ASKED.wait(PATIENCE_S)
            ASKED.clear()
            time.sleep(0.5)  # a step takes a few hundredths; of ten seconds it is 5 %
        return super().batch(step)


class Asking(Prefetcher):
    """Tells the disk."""

    def next(self) -> Batch:
        ASKED.set()
        return super().next()

    def close(self) -> None:
        ASKED.set()  # what is being read then is read to its end
        super().close()


@pytest.mark.slow
def test_waiting_for_data_is_measured_and_told(corpus: CorpusInfo, tmp_path: Path) -> None:
    """Of the rank that waits longest; the other one waits for that rank, not for data."""
    config = config_of(corpus, tmp_path / "run", "data.prefetch=1", "train.steps=5")

    def run() -> str:
        trainer.BatchSource = SlowDisk  # type: ignore[misc]  # of this fork only
        trainer.Prefetcher = Asking  # type: ignore[misc]
        return train_here(config)[1]

    said = run_ranks(run, 2)[0]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    shares = [row["data_share"] for row in rows if "loss" in row]
    # What was read before the first steps is there at once.
    assert all(0.01 < share < 1 for share in shares[2:]), shares
    (alert,) = [row for row in rows if row.get("event", {}).get("name") == "waits for data"]
    assert alert["step"] in (3, 4, 5)
    assert "ALERT waits for data: data_share is " in said


def test_text_in_memory_gives_the_same_run(corpus: CorpusInfo, tmp_path: Path) -> None:
    for cache in ("none", "ram"):
        finished, _ = train(config_of(corpus, tmp_path / cache, f"data.cache={cache}"), 2)
        assert finished
    assert_same_tensors(*(checkpoint(tmp_path / cache, 6) for cache in ("none", "ram")))


def test_text_that_does_not_fit_is_refused_on_all_ranks(
    corpus: CorpusInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1)
    problem = refused(config_of(corpus, tmp_path / "run", "data.cache=ram"), 2)
    assert problem.startswith("data.cache: ram needs 2 × ")
    assert not (tmp_path / "run").exists()
