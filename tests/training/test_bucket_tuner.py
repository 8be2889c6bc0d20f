"""The size of buckets is found once, and training does not notice."""

from pathlib import Path

import pytest
import torch

from megabit.telemetry.metrics import read_metrics
from megabit.training import bucket_tuner
from megabit.training.bucket_tuner import Trial, next_size
from tests.training.runs import checkpoint, config_of, train
from tests.training.tiny import tiny_corpus


@pytest.mark.parametrize(
    ("trials", "following"),
    [
        ([Trial(16, 1.0, 0.1)], None),  # a tenth is not too much
        ([Trial(16, 1.0, 0.2)], 4),
        ([Trial(16, 1.0, 0.2), Trial(4, 0.9, 0.1)], 64),
        ([Trial(16, 1.0, 0.2), Trial(4, 0.9, 0.1), Trial(64, 1.2, 0.4)], 1),
        ([Trial(16, 1.0, 0.2), Trial(4, 1.1, 0.1), Trial(64, 0.8, 0.4)], 256),
        ([Trial(16, 1.0, 0.2), Trial(4, 1.1, 0.1), Trial(64, 1.2, 0.4)], None),
        ([Trial(0.5, 1.0, 0.2)], 2),  # a quarter would be too small
        ([Trial(16, 1.0, 0.2), *(Trial(4.0**-i, 1.0, 0.2) for i in range(-1, 3))], None),
    ],
)
def test_what_is_tried_next(trials: list[Trial], following: float | None) -> None:
    assert next_size(trials) == following


@pytest.mark.slow
def test_a_run_that_tunes_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little ranks wait for each other here, it counts as too much."""
    monkeypatch.setattr(bucket_tuner, "EXPOSED_SHARE", -1.0)
    corpus = tiny_corpus(tmp_path)
    common = ("train.steps=14", "parallel.bucket_mb=1", "checkpoint.save_interval=10")
    tuning = ("communication.tune_buckets=true", "communication.tune_steps=1")
    plain = config_of(corpus, tmp_path / "plain", *common)
    tuned = config_of(corpus, tmp_path / "tuned", *common, *tuning)
    train(plain, 2)
    train(tuned, 2)
    for step in (10, 14):
        one, other = (
            checkpoint(folder, step) for folder in (tmp_path / "plain", tmp_path / "tuned")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)
    events = [
        row["event"] for row in read_metrics(tmp_path / "tuned" / "metrics.jsonl") if "event" in row
    ]
    (event,) = [event for event in events if event["kind"] == "tuning"]
    assert {"1", "0.25", "4"} <= event["evidence"].keys()
    assert event["action"] in event["evidence"]
    # A run that goes on has the size that was found, and finds nothing out again.
    longer = config_of(corpus, tmp_path / "tuned", "train.steps=16", *common[1:], *tuning)
    train(longer, 2)
    events = [
        row["event"] for row in read_metrics(tmp_path / "tuned" / "metrics.jsonl") if "event" in row
    ]
    assert [event["kind"] for event in events].count("tuning") == 1
