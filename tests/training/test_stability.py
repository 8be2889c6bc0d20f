"""Planted faults: each measure of the guard is taken once, on all ranks, and does what it says.

A rollback leaves a run in the bits of one that never saw the bad data.
"""

import io
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megabit.checkpoint import Manifest
from megabit.config import Config
from megabit.data.corpus import CorpusInfo
from megabit.data.sampler import TrainingSampler
from megabit.launch import run_ranks
from megabit.training import sampler, trainer
from megabit.training.measures import Measures, Stopped
from megabit.training.step import StepReport
from tests.training.runs import (
    assert_same_tensors,
    checkpoint,
    config_of,
    rows,
    train_here,
)
from tests.training.tiny import tiny_corpus

SPIKE = "{watch: loss_spike, above: 3, window: 6, action: rollback, times: 2}"
LAYOUTS = [
    pytest.param((), 2, id="dp2"),
    pytest.param(("parallel.tp=2", "parallel.pp=2"), 4, id="tp2-pp2"),
    pytest.param(
        ("optim.name=muon", "optim.zero_stage=2", "train.hidden_dropout=0.1"), 2, id="muon-zero2"
    ),
    pytest.param(
        ("precision.compute=bfloat16", "precision.ternary_backward=int8", "optim.zero_stage=0"),
        2,
        id="int8-zero0",
    ),
]
LEARNS = ("optim.lr=[1e-2,5e-3]", "train.steps=16", "checkpoint.save_interval=4")
"""Loss falls from 5.7 to 3.8 in eleven steps; step 11 (0-based) takes samples 88 to 95. There it is
5.3, four times as far from the median as six falling losses are."""
BAD = range(88, 96)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


class CorruptedSampler(TrainingSampler):
    """Samples in ``BAD`` are one rare token, over and over."""

    def samples(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        tokens = super().samples(numbers)
        tokens[[number in BAD for number in numbers]] = 1
        return tokens


def events(folder: Path) -> list[dict[str, Any]]:
    return [row["event"] | {"step": row["step"]} for row in rows(folder) if "event" in row]


def run(
    config: Config, world_size: int, file: Callable[[], io.StringIO] = io.StringIO
) -> tuple[list[bool], list[list[tuple[int, list[str]]]]]:
    """Train; whether each rank finished, and the actions that it saw, with their steps."""

    def of_rank() -> tuple[bool, list[tuple[int, list[str]]]]:
        seen: list[tuple[int, list[str]]] = []

        class Watched(Measures):
            def take(self, report: StepReport, step: int) -> bool:
                if report.verdicts:
                    seen.append((step, [verdict.action for verdict in report.verdicts]))
                return super().take(report, step)

        trainer.Measures = Watched  # type: ignore[misc]  # of this fork only
        try:
            finished, _ = train_here(config, file)
        except Stopped:
            finished = False
        return finished, seen

    finished, seen = zip(*run_ranks(of_rank, world_size), strict=True)
    return list(finished), list(seen)


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_a_rollback_ends_in_the_bits_of_a_run_that_never_saw_the_window(
    corpus: CorpusInfo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: tuple[str, ...],
    world_size: int,
) -> None:
    settings = (*LEARNS, f"guard.rules=[{SPIKE}]", *layout)
    monkeypatch.setattr(sampler, "TrainingSampler", CorruptedSampler)
    finished, seen = run(config_of(corpus, tmp_path / "back", *settings), world_size)
    assert finished == [True] * world_size
    assert seen == [[(11, ["rollback"])]] * world_size

    # From the checkpoint of step 8 to the end of step 11: 64 up to 96.
    without = config_of(corpus, tmp_path / "without", *settings, "data.skip_samples=[64,96]")
    finished, seen = run(without, world_size)
    assert finished == [True] * world_size
    assert seen == [[]] * world_size
    for step in (8, 12, 16):
        back, never = (checkpoint(tmp_path / run, step) for run in ("back", "without"))
        assert back.keys() == never.keys()
        assert all(torch.equal(back[name], never[name]) for name in back)
    kept = [row for row in rows(tmp_path / "back") if "event" not in row]
    assert kept == rows(tmp_path / "without")
    (event,) = events(tmp_path / "back")
    assert (event["step"], event["kind"], event["action"]) == (12, "guard", "rollback")
    assert event["evidence"]["z"] > 3
    assert event["text"].endswith(": rollback to step 8; samples 64 to 95 are left out")
    measures = json.loads((tmp_path / "back" / "measures.json").read_text())
    assert measures["left_out"] == [64, 96]


class KilledAfterRollback(io.StringIO):
    """A console's file that kills the process once it says that the run went back."""

    def write(self, text: str) -> int:
        if ": rollback to step" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_rollback_to_the_start_forgets_all_moments(
    corpus: CorpusInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings = (*LEARNS[:2], "checkpoint.save_interval=16", f"optim.name={name}")
    settings += (f"guard.rules=[{SPIKE}]",)
    monkeypatch.setattr(sampler, "TrainingSampler", CorruptedSampler)
    _, seen = run(config_of(corpus, tmp_path / "back", *settings), 1)
    assert seen == [[(11, ["rollback"])]]
    run(config_of(corpus, tmp_path / "without", *settings, "data.skip_samples=[0,96]"), 1)
    back, without = (checkpoint(tmp_path / run, 16) for run in ("back", "without"))
    assert back.keys() == without.keys()
    assert all(torch.equal(back[name], without[name]) for name in back)


def test_a_run_that_is_stopped_right_after_a_rollback_knows_of_it(
    corpus: CorpusInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*LEARNS, f"guard.rules=[{SPIKE}]")
    monkeypatch.setattr(sampler, "TrainingSampler", CorruptedSampler)
    stopped = config_of(corpus, tmp_path / "stopped", *settings)
    assert run(stopped, 2, KilledAfterRollback)[0] == [False, False]
    finished, seen = run(stopped, 2)
    assert finished == [True, True]
    assert seen == [[], []]
    without = config_of(corpus, tmp_path / "without", *settings, "data.skip_samples=[64,96]")
    run(without, 2)
    assert_same_tensors(checkpoint(tmp_path / "stopped", 16), checkpoint(tmp_path / "without", 16))


def test_a_rollback_takes_its_samples_from_the_stream(
    corpus: CorpusInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which some are left out already: what touches those becomes one window with them."""
    rule = SPIKE.replace("above: 3", "above: 2")  # a step earlier, losses lie further apart
    settings = (*LEARNS, f"guard.rules=[{rule}]", "data.skip_samples=[40,48,96,104]")
    monkeypatch.setattr(sampler, "TrainingSampler", CorruptedSampler)
    _, seen = run(config_of(corpus, tmp_path, *settings), 1)
    # The bad samples, 88 to 95, are in step 10 now; that of step 8 begins with sample 72.
    assert seen == [[(10, ["rollback"])]]
    measures = json.loads((tmp_path / "measures.json").read_text())
    assert measures["left_out"] == [40, 48, 72, 104]


def test_rollbacks_end(corpus: CorpusInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that fires whatever data it sees goes back ``times`` times, and stops."""
    rule = "{watch: grad_norm, above: 1e-6, action: rollback, times: 2}"
    config = config_of(corpus, tmp_path, *LEARNS, f"guard.rules=[{rule}]")
    finished, seen = run(config, 2)
    assert finished == [False, False]
    assert seen == [[(0, ["rollback"]), (0, ["rollback"]), (0, ["stop"])]] * 2
    measures = json.loads((tmp_path / "measures.json").read_text())
    assert measures["left_out"] == [0, 16]


def test_a_plateau_lowers_the_rate_and_for_good(corpus: CorpusInfo, tmp_path: Path) -> None:
    """Rates so low that nothing is learned: a loss that hardly moves."""
    rule = "{watch: plateau, above: 0.5, window: 2, action: lower_lr, factor: 0.25}"
    settings = (
        *("optim.schedule=constant", "optim.lr=[1e-7]", "optim.weight_decay=[0.0]"),
        *("optim.warmup_steps=0", "train.steps=10"),
        f"guard.rules=[{rule}]",
    )
    config = config_of(corpus, tmp_path, *settings)
    finished, seen = run(config, 2)
    assert finished == [True, True]
    assert seen == [[(3, ["lower_lr"]), (7, ["lower_lr"])]] * 2
    rates = [row["lr"] for row in rows(tmp_path) if "lr" in row]
    assert rates == [1e-7] * 4 + [1e-7 / 4] * 4 + [1e-7 / 16] * 2
    event, _ = events(tmp_path)
    assert event["evidence"]["mean_loss"] == pytest.approx(
        event["evidence"]["mean_loss_before"], abs=0.5
    )


def test_full_precision_activations_are_taken_up_and_kept(
    corpus: CorpusInfo, tmp_path: Path
) -> None:
    rule = "{watch: grad_norm, above: 1e-6, action: a16, times: 1, then: alert}"
    config = config_of(corpus, tmp_path, "train.steps=4", f"guard.rules=[{rule}]")
    finished, seen = run(config, 2)
    assert finished == [True, True]
    assert seen == [[(0, ["a16"]), *((step, ["alert"]) for step in (1, 2, 3))]] * 2
    losses = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    measures = json.loads((tmp_path / "measures.json").read_text())
    assert measures["full_precision_activations"] is True

    # What is saved is a model with such activations, for whoever opens it, and goes on with them.
    assert Manifest.read(tmp_path / "checkpoints" / "step_00000004").model.activations == "full"
    longer = config_of(corpus, tmp_path, "train.steps=5", f"guard.rules=[{rule}]")
    assert run(longer, 2) == ([True, True], [[(4, ["alert"])]] * 2)

    never = config_of(corpus, tmp_path / "never", "train.steps=4")
    run(never, 2)
    int8 = [row["loss"] for row in rows(tmp_path / "never") if "loss" in row]
    assert losses[:1] == int8[:1]
    assert losses[1] != int8[1]
    # Saturation is counted of int8 activations, of which there are none any more.
    saturated = [row["saturation"] for row in rows(tmp_path) if "saturation" in row]
    assert saturated[0] is not None
    assert saturated[1:] == [None] * 4


def test_stop_leaves_a_checkpoint_of_what_was_good(corpus: CorpusInfo, tmp_path: Path) -> None:
    rule = "{watch: grad_norm, above: 1e-6, action: stop}"
    config = config_of(corpus, tmp_path, f"guard.rules=[{rule}]")
    finished, seen = run(config, 2)
    assert finished == [False, False]
    assert seen == [[(0, ["stop"])]] * 2
    saved = checkpoint(tmp_path, 0)
    assert not any(name.startswith("exp_avg/") for name in saved)
    assert all(torch.isfinite(value).all() for value in saved.values())


@pytest.mark.parametrize("action", ["checkpoint", "stop"])
def test_an_alert_saves_or_stops_on_all_ranks(
    corpus: CorpusInfo, tmp_path: Path, action: str
) -> None:
    rule = f"{{name: there is a loss, when: loss > 0, intervals: 2, action: {action}}}"
    config = config_of(corpus, tmp_path, f"telemetry.alerts=[{rule}]", "train.steps=4")
    finished, _ = run(config, 2)
    assert finished == [action == "checkpoint"] * 2
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert saved == ["step_00000002", "step_00000004"][: 1 + (action == "checkpoint")]
