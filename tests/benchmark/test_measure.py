"""What is measured: everyone's steps in turns, what ranks wait for and send, where time goes."""

import os
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megabit.benchmark import run as benchmark
from megabit.benchmark.breakdown import BACKWARD, FORWARD, PARTS, QUANTIZE, UPDATE
from megabit.benchmark.contestants import MEGABIT, PLAIN, Outcome, make_contestant
from megabit.benchmark.measure import WARMUP, measure_in_turns, random_batch
from megabit.benchmark.tables import compute_share, limit
from megabit.data.batches import Batch
from megabit.errors import UserError
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from tests.training.tiny import tiny

NAMES = [MEGABIT, *PLAIN]


def ignore(step: int, steps: int) -> None:
    pass


class Sleeper:
    """A contestant that writes down when it ran."""

    def __init__(self, log: Path) -> None:
        self.mesh = ParallelMesh()
        self.module = torch.nn.Linear(1, 1)
        self.log = log

    def step(self, batch: Batch, step: int) -> Outcome:
        started = time.monotonic()
        time.sleep(0.01)
        with self.log.open("a") as file:
            file.write(f"{step} {started} {time.monotonic()} {os.getpid()}\n")
        return Outcome(1.0)


def test_contestants_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(
        "megabit.benchmark.measure.make_contestant", lambda name, config: Sleeper(log)
    )
    measure = partial(measure_in_turns, ["a", "b", "c"], tiny(), 2, False, ignore)
    records = run_ranks(measure, 3)
    assert all(len(record.seconds) == 2 for record in records)
    assert all(second >= 0.01 for record in records for second in record.seconds)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [int(line[0]) for line in lines] == [step for step in range(WARMUP + 2) for _ in "abc"]
    assert [line[3] for line in lines] == [line[3] for line in lines[:3]] * (WARMUP + 2)
    spans = [(float(line[1]), float(line[2])) for line in lines]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_one_process_beside_the_baselines() -> None:
    result = benchmark.run(tiny(), 1, steps=2, breakdown=True, progress=ignore)
    assert list(result.all_seconds) == list(result.tokens_per_s) == NAMES
    assert all(len(seconds) == 2 for seconds in result.all_seconds.values())
    assert all(rate > 0 for rate in result.tokens_per_s.values())
    # All train the same model on the same tokens.
    losses = [record.losses for record in [*result.ranks, *result.baselines.values()]]
    assert [len(one) for one in losses] == [WARMUP + 2] * 5
    assert [one[0] for one in losses] == pytest.approx([losses[0][0]] * 5, rel=0.01)
    (rank,) = result.ranks
    assert compute_share(rank) == 1
    assert set(rank.sent_bytes.values()) == {0}
    assert rank.peak_bytes > 50e6  # torch alone takes more
    for record in [rank, *result.baselines.values()]:
        assert record.parts is not None
        assert list(record.parts) == list(PARTS)
        assert all(record.parts[part] > 0 for part in (FORWARD, BACKWARD, UPDATE))
        assert min(record.parts.values()) >= 0
    quantizing = {name for name, r in result.baselines.items() if r.parts and r.parts[QUANTIZE]}
    assert quantizing == {"fake fp32", "fake bf16"}
    assert limit(result).startswith("Limited by compute: 100%")


def test_ranks_tell_what_they_waited_for_and_sent() -> None:
    config = tiny("parallel.tp=2", "model.linear=dense")
    result = benchmark.run(config, 2, steps=1, breakdown=False, progress=ignore)
    assert len(result.ranks) == 2
    assert list(result.baselines) == ["dense fp32", "dense bf16"]
    for record in result.ranks:
        assert record.sent_bytes["tp"] > 0
        assert record.sent_bytes["dp"] == 0
        assert record.waited_s["tp"] > 0
        assert 0 < compute_share(record) < 1
        assert record.parts is None


def test_a_batch_does_not_depend_on_the_layout() -> None:
    config = tiny()
    whole = random_batch(config, ParallelMesh(), 3)
    assert whole.inputs.shape == (4, 2, 16)
    torch.testing.assert_close(whole.inputs[..., 1:], whole.targets[..., :-1])
    parts = [random_batch(config, ParallelMesh(dp=Axis("dp", 2, rank)), 3) for rank in range(2)]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert not torch.equal(random_batch(config, ParallelMesh(), 4).inputs, whole.inputs)


def test_a_model_that_does_not_fit_is_refused() -> None:
    config = tiny("model.hidden_size=131072", "model.intermediate_size=131072")
    with pytest.raises(UserError, match=r"model: 5 of them at a time, .* GB are free"):
        benchmark.run(config, 1, steps=1, breakdown=False, progress=ignore)


def test_every_contestant_has_a_name() -> None:
    for name in NAMES:
        contestant = make_contestant(name, tiny())
        assert contestant.mesh.world.size == 1
