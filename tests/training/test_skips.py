"""Runs some of whose steps are skipped: what they say, keep and save, and how they go on."""

import json
import re
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megabit.checkpoint import Manifest
from megabit.data.corpus import CorpusInfo
from megabit.launch import run_ranks
from megabit.training import trainer
from megabit.training.measures import Stopped
from megabit.training.step import StepReport, TrainingState, train_step
from tests.training.runs import (
    AtStep,
    assert_same_tensors,
    checkpoint,
    config_of,
    rows,
    train,
    train_here,
)
from tests.training.tiny import make_mesh, poisoned, tiny_corpus

MAX_SKIPS = 10
"""Bad steps in a row that end a run, as ``guard.rules`` are by default."""
VICTIM = "model.layers.0.mlp.down_proj.weight"
ZERO_STAGES = [f"optim.zero_stage={stage}" for stage in (0, 1, 2)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def bad_steps(steps: Collection[int], rank: int) -> Callable[..., StepReport]:
    """``train_step``, but one element of ``rank``'s gradient is not a number in ``steps``."""

    def step_of(state: TrainingState, batch: Any, step: int, is_probed: bool) -> StepReport:
        if step not in steps or state.mesh.world.rank != rank:
            return train_step(state, batch, step, is_probed)
        with poisoned(state, VICTIM):
            return train_step(state, batch, step, is_probed)

    return step_of


def test_a_run_goes_on_after_skips_and_says_so(
    corpus: CorpusInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One skip less than too many, twice."""
    bad = {*range(1, MAX_SKIPS), *range(MAX_SKIPS + 1, 2 * MAX_SKIPS)}
    config = config_of(corpus, tmp_path, f"train.steps={2 * MAX_SKIPS + 1}", "train.log_interval=3")
    monkeypatch.setattr(trainer, "train_step", bad_steps(bad, rank=1))
    finished, said = train(config, 2)
    assert finished
    line = r"^step +(\d+)  nonfinite: loss [\d.]+, grad_norm inf, time \d: skip$"
    lines = re.findall(line, said, re.MULTILINE)
    assert [int(step) - 1 for step in lines] == sorted(bad)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line, parse_constant=refuse) for line in text]
    intervals = [row for row in lines if "skipped" in row]
    for row in intervals:
        steps = range(row["step"] - 3, row["step"])
        assert row["skipped"] == len(bad & {*steps})
        is_empty = row["skipped"] == 3
        for key in ("loss", "bits_per_byte", "grad_norm"):
            assert (row[key] is None) == is_empty
        sent = row["sent_by_purpose_mb"]
        # What follows an update is sent in updates only.
        assert (sent.keys() & {"dp weights", "world scales"} == set()) == is_empty
        assert sent["dp weight gradients"] > 0
        for axis, total in row["sent_mb"].items():
            parts = [mb for name, mb in sent.items() if name.split()[0] == axis]
            assert total == pytest.approx(sum(parts), rel=1e-12)  # the same sum in another order
    assert [row["skipped"] for row in intervals] == [2, 3, 3, 2, 3, 3, 2]


def test_too_many_skips_end_a_run_with_one_line_and_a_checkpoint(
    corpus: CorpusInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = 5  # the last of those to be saved before the end is step 10
    settings = (f"train.steps={good + 2 * MAX_SKIPS}", f"checkpoint.save_interval={good}")
    config = config_of(corpus, tmp_path, *settings)
    last = good + MAX_SKIPS  # of the steps, from 1 on

    def run() -> tuple[str, ...]:
        with pytest.raises(Stopped) as caught:
            trainer.train(config, make_mesh(config), Console(quiet=True))
        return caught.value.args

    monkeypatch.setattr(trainer, "train_step", bad_steps(range(good, 1000), rank=1))
    for (message,) in run_ranks(run, 2):
        assert "\n" not in message
        assert message.startswith(f"step {last}: nonfinite: loss ")
        assert f"grad_norm inf, time {MAX_SKIPS}: stop; the weights stay those after" in message
        assert "optim.lr" in message  # what to do

    # The newest checkpoint has the weights and moments of the last update.
    newest = (tmp_path / "checkpoints" / "latest").read_text().strip()
    assert newest == f"step_{last - 1:08d}"
    assert_same_tensors(checkpoint(tmp_path, last - 1), checkpoint(tmp_path, good))

    monkeypatch.setattr(trainer, "train_step", train_step)
    finished, said = train(config, 2)
    assert finished
    assert f"Resuming after step {last - 1}" in said
    before, after = checkpoint(tmp_path, good), checkpoint(tmp_path, good + 2 * MAX_SKIPS)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_a_resumed_run_ends_in_the_same_bits_at_every_zero_stage(
    corpus: CorpusInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after a step that was skipped, with fewer updates than steps; one of the later
    steps is skipped as well."""

    def configs(name: str) -> list[Any]:
        return [
            config_of(corpus, tmp_path / setting[-1] / name, setting, "train.hidden_dropout=0.1")
            for setting in ZERO_STAGES
        ]

    def after_three() -> AtStep:
        return AtStep(3, signal.SIGTERM)

    def run() -> list[tuple[bool, str]]:
        results = [train_here(config) for config in configs("straight")]
        results += [train_here(config, after_three) for config in configs("stopped")]
        results += [train_here(config) for config in configs("stopped")]
        return results

    monkeypatch.setattr(trainer, "train_step", bad_steps({2, 4}, rank=1))
    results = run_ranks(run, 2)[0]
    assert [finished for finished, _ in results] == [True] * 3 + [False] * 3 + [True] * 3
    assert all("Resuming after step 3" in said for _, said in results[6:])
    for setting in ZERO_STAGES:
        straight, stopped = (tmp_path / setting[-1] / name for name in ("straight", "stopped"))
        assert rows(straight) == rows(stopped)
        skipped = [row["skipped"] for row in rows(straight) if "skipped" in row]
        assert skipped == [0, 0, 1, 0, 1, 0]
        assert_same_tensors(checkpoint(straight, 6), checkpoint(stopped, 6))
        manifest = Manifest.read(stopped / "checkpoints" / "step_00000003")
        assert (manifest.step, manifest.updates) == (3, 2)


def test_stages_0_and_1_are_the_same_run(corpus: CorpusInfo, tmp_path: Path) -> None:
    """Sharding changes who updates what, not a bit of it."""

    def run() -> None:
        for setting in ZERO_STAGES[:2]:
            train_here(config_of(corpus, tmp_path / setting[-1], setting))

    run_ranks(run, 2)
    same = [rows(tmp_path / stage) for stage in "01"]
    sent = ("sent_mb", "sent_by_purpose_mb")
    assert [{k: row[k] for k in row.keys() - {*sent}} for row in same[0]] == [
        {k: row[k] for k in row.keys() - {*sent}} for row in same[1]
    ]


@pytest.mark.parametrize(("saved", "wanted"), [(0, 1), (1, 2), (2, 0)])
def test_a_run_goes_on_at_another_zero_stage(
    corpus: CorpusInfo, tmp_path: Path, saved: int, wanted: int
) -> None:
    """Who keeps what changes; the masters and moments are the same bits."""
    straight, changing = tmp_path / "straight", tmp_path / "changing"
    # fp32 gradients of one microbatch on each rank: no stage adds up in another order.
    one = ("train.global_batch_size=4",)
    train(config_of(corpus, straight, ZERO_STAGES[saved], *one), 2)
    config = config_of(corpus, changing, ZERO_STAGES[saved], *one)
    finished, _ = train(config, 2, lambda: AtStep(3, signal.SIGTERM))
    assert not finished
    finished, said = train(config_of(corpus, changing, ZERO_STAGES[wanted], *one), 2)
    assert finished
    assert "Resuming after step 3" in said
    assert_same_tensors(checkpoint(changing, 6), checkpoint(straight, 6))
