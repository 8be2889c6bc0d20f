"""A rank that is slow is named, with its host, and the run goes on."""

import os
from pathlib import Path

import pytest

from megabit.data.corpus import CorpusInfo
from megabit.telemetry.metrics import read_metrics
from megabit.training.interval import straggler
from tests.training.runs import config_of, train
from tests.training.tiny import tiny_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("busy_s", "stages", "expected"),
    [
        ((1.0,), (0,), None),
        ((1.0, 2.0), (0, 1), None),
        ((1.0, 2.0), (0, 0), (2.0, 1)),
        ((1.0, 1.0), (0, 0), (1.0, 0)),
        ((3.0, 1.0, 2.0), (0, 0, 0), (2.0, 0)),
        # Stage 1 has more work than stage 0, on all of its ranks.
        ((1.0, 1.0, 5.0, 5.0), (0, 0, 1, 1), (1.0, 0)),
        ((1.0, 1.5, 5.0, 6.0), (0, 0, 1, 1), (1.5, 1)),
        ((1.0, 1.0, 5.0, 8.0), (0, 0, 1, 1), (1.6, 3)),
        ((0.0, 0.0), (0, 0), None),
    ],
)
def test_the_slowest_of_its_stage(
    busy_s: tuple[float, ...], stages: tuple[float, ...], expected: tuple[float, int] | None
) -> None:
    assert straggler(busy_s, stages) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "world_size", "slow"),
    [((), 2, 1), (("parallel.pp=2",), 4, 3)],
    ids=["dp2", "pp2-dp2"],
)
def test_a_slow_rank_is_named(
    corpus: CorpusInfo, tmp_path: Path, settings: tuple[str, ...], world_size: int, slow: int
) -> None:
    """It sleeps for longer than a step takes here, so the ratio is far above the alert's 1.3."""
    drill = f"faults.drills=[{{fault: slow, rank: {slow}, step: 0, seconds: 1.0}}]"
    config = config_of(corpus, tmp_path / "run", drill, "train.log_interval=2", *settings)
    finished, said = train(config, world_size)
    assert finished
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    intervals = [row for row in rows if "loss" in row]
    assert [row["straggler_rank"] for row in intervals] == [slow] * 3
    assert all(row["straggler_ratio"] > 1.3 for row in intervals)
    (alert,) = [row for row in rows if row.get("event", {}).get("name") == "straggler"]
    assert alert["step"] == 4  # the second interval
    assert alert["event"]["action"] == "alert"
    who = f"rank {slow} on {os.uname().nodename}"
    assert alert["event"]["evidence"]["where"] == who
    assert f"straggler_ratio is {alert['event']['evidence']['straggler_ratio']:.6g}, {who}" in said
