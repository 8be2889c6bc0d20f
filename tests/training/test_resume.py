"""Checkpoints: a run that was interrupted goes on to the same bits, or says why it cannot."""

import functools
import io
import re
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from megabit.checkpoint import store
from megabit.checkpoint.tensor_file import write_tensors
from megabit.config import Config
from megabit.data.corpus import CorpusInfo
from megabit.errors import RunError, UserError
from megabit.launch import RankError, run_ranks
from megabit.training import trainer
from tests.training.runs import (
    AtStep,
    assert_same_tensors,
    checkpoint,
    config_of,
    refused,
    rows,
    train,
    train_here,
)
from tests.training.tiny import make_mesh, tiny_corpus

TP2_PP2 = ("parallel.tp=2", "parallel.pp=2")
ONE_PROCESS, FOUR_RANKS = ((), 1), (TP2_PP2, 4)
FOUR_LAYERS = ("model.num_hidden_layers=4", "parallel.pp=2")
TWO_CHUNKS = (*FOUR_LAYERS, "parallel.vpp=2", "parallel.layers_per_stage=[1,1,1,1]")
V = (*TWO_CHUNKS, "parallel.schedule=zb-v")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def assert_same_run(folder: Path, other: Path, world_size: int) -> None:
    assert rows(folder) == rows(other)
    assert len(rows(folder)) == 7  # of 6 steps and an evaluation
    assert len([*(folder / "checkpoints" / "step_00000006").glob("rank_*")]) == world_size
    assert_same_tensors(checkpoint(folder, 6), checkpoint(other, 6))


@pytest.mark.parametrize(("settings", "world_size"), [ONE_PROCESS, FOUR_RANKS, (V, 2)])
def test_an_interrupted_run_ends_in_the_same_bits(
    corpus: CorpusInfo, tmp_path: Path, settings: tuple[str, ...], world_size: int
) -> None:
    straight, stopped, killed = (tmp_path / name for name in ("straight", "stopped", "killed"))
    finished, said = train(config_of(corpus, straight, *settings), world_size)
    assert finished
    assert "Resuming" not in said

    config = config_of(corpus, stopped, *settings)
    finished, said = train(config, world_size, lambda: AtStep(3, signal.SIGTERM))
    assert not finished
    assert "Stopped after step 3, saved in" in said
    assert not (stopped / "summary.json").exists()
    finished, said = train(config, world_size)
    assert finished
    assert "Resuming after step 3" in said
    assert_same_run(stopped, straight, world_size)

    saving = ("checkpoint.save_interval=2", "checkpoint.asynchronous=false")
    config = config_of(corpus, killed, *settings, *saving)
    with pytest.raises(RankError, match="rank 0 died"):
        train(config, world_size, lambda: AtStep(5, signal.SIGKILL))
    finished, said = train(config, world_size)
    assert "Resuming after step 4" in said
    assert_same_run(killed, straight, world_size)


@pytest.fixture(scope="module")
def used(corpus: CorpusInfo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of four ranks; tests change copies of it."""
    folder = tmp_path_factory.mktemp("used")
    train(config_of(corpus, folder, *TP2_PP2), 4)
    return folder


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        ((*TP2_PP2, "train.seed=5"), 4, "train.seed: .* has 1234, not 5; resume with the same"),
        ((*TP2_PP2, "model.hidden_act=silu"), 4, "model.hidden_act: .* has 'relu2', not 'silu'"),
        ((*TP2_PP2, "train.global_batch_size=4"), 4, "train.global_batch_size: .* has 8, not 4"),
        ((*TP2_PP2, "precision.compute=bfloat16"), 4, "precision.compute: .* has 'float32', not"),
        ((*TP2_PP2, "data.seq_length=8"), 4, "data.seq_length: .* has 16, not 8"),
        ((*TP2_PP2, "parallel.exact=full"), 4, "parallel.exact: .* has 'forward', not 'full'"),
        ((*TP2_PP2, "run.resume=false"), 4, "run.dir: .* holds a run already"),
    ],
    ids=["seed", "model", "batch", "compute", "length", "exact", "no-resume"],
)
def test_another_run_is_refused(
    corpus: CorpusInfo, used: Path, settings: tuple[str, ...], world_size: int, message: str
) -> None:
    before = {path: path.read_bytes() for path in used.rglob("*") if path.is_file()}
    assert re.search(message, refused(config_of(corpus, used, *settings), world_size))
    assert {path: path.read_bytes() for path in used.rglob("*") if path.is_file()} == before


def test_a_run_that_changes_its_layout_ends_in_the_same_bits(
    corpus: CorpusInfo, tmp_path: Path
) -> None:
    """Two steps at each of four layouts are eight steps of one process: data, weights and moments,
    dropout and learning rates go on where they were."""
    exact = ("parallel.exact=full", "train.hidden_dropout=0.1", "train.steps=8")
    straight, changing = tmp_path / "straight", tmp_path / "changing"
    train(config_of(corpus, straight, *exact), 1)
    layouts: list[tuple[tuple[str, ...], int]] = [
        (TP2_PP2, 4),
        (("parallel.tp=2", "parallel.sequence_parallel=true"), 4),
        (("parallel.pp=2", "parallel.schedule=zb-h1"), 2),
        (("parallel.tp=4", "optim.zero_stage=0"), 4),
    ]
    for (settings, world_size), last in zip(layouts, (2, 4, 6, None), strict=True):
        config = config_of(corpus, changing, *exact, *settings)
        file = io.StringIO if last is None else functools.partial(AtStep, last, signal.SIGTERM)
        finished, said = train(config, world_size, file)
        assert finished == (last is None)
    assert "Resuming after step 6" in said
    losses = [[row["loss"] for row in rows(f) if "loss" in row] for f in (straight, changing)]
    assert losses[0] == losses[1]
    assert_same_tensors(checkpoint(changing, 8), checkpoint(straight, 8))


def test_another_corpus_is_refused(used: Path, tmp_path: Path) -> None:
    other = tiny_corpus(tmp_path, seed=5)
    message = refused(config_of(other, used, *TP2_PP2), 4)
    assert re.search("data.dir: .* is not the corpus that .* was trained on", message)


def all_refused(config: Config, world_size: int) -> list[str]:
    """The lines with which all ranks refuse to start."""

    def run() -> list[str]:
        with pytest.raises(UserError) as caught:
            trainer.train(config, make_mesh(config), Console(quiet=True))
        return list(caught.value.problems)

    first, *others = run_ranks(run, world_size)
    assert others == [first] * len(others)
    return first


def test_all_differences_are_told_at_once(corpus: CorpusInfo, used: Path) -> None:
    config = config_of(corpus, used, *TP2_PP2, "train.seed=5", "model.hidden_act=silu")
    assert len(all_refused(config, 4)) == 2


def flip_last_bit(path: Path) -> None:
    """Changes one number and leaves the file well-formed."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_refused_or_the_one_before_is_taken(
    corpus: CorpusInfo, tmp_path: Path
) -> None:
    settings = (*TP2_PP2, "checkpoint.save_interval=2")
    straight, damaged = tmp_path / "straight", tmp_path / "damaged"
    train(config_of(corpus, straight, *settings), 4)
    shutil.copytree(straight, damaged)
    flip_last_bit(damaged / "checkpoints" / "step_00000006" / "rank_00002.safetensors")
    config = config_of(corpus, damaged, *settings)
    message = refused(config, 4)
    assert "rank_00002.safetensors: is not what was saved" in message
    assert "--auto-fallback" in message
    config = config_of(corpus, damaged, *settings, "checkpoint.auto_fallback=true")
    finished, said = train(config, 4)
    assert finished
    assert "ALERT" in said
    assert "rank_00002.safetensors: is not what was saved" in said
    assert "Resuming after step 4" in said
    assert_same_tensors(checkpoint(damaged, 6), checkpoint(straight, 6))


def test_checkpoints_are_kept_as_configured(corpus: CorpusInfo, tmp_path: Path) -> None:
    train(
        config_of(
            corpus,
            tmp_path,
            *("checkpoint.save_interval=1", "checkpoint.keep_last=2", "checkpoint.keep_every=3"),
        ),
        2,
    )
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["latest", *(f"step_{step:08d}" for step in (3, 5, 6))]


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_save_that_fails_does_not_stop_a_run(
    corpus: CorpusInfo, tmp_path: Path, asynchronous: str
) -> None:
    """A full disk from step 2 to step 4, on one rank: the run goes on and ends in the same bits."""
    settings = ("checkpoint.save_interval=1", f"checkpoint.asynchronous={asynchronous}")
    straight, full = tmp_path / "straight", tmp_path / "full"
    train(config_of(corpus, straight, *settings), 2)
    config = config_of(corpus, full, *settings)
    finished, said = run_ranks(lambda: train_here(config, FullDisk), 2)[0]
    assert finished
    alerts = [line for line in said.splitlines() if line.startswith("ALERT")]
    assert alerts
    assert all("rank_00000.safetensors: cannot write it" in line for line in alerts)
    assert len(re.findall(r"^step +6 +saved in", said, re.MULTILINE)) == 1
    assert_same_tensors(checkpoint(full, 6), checkpoint(straight, 6))


class Gate(io.StringIO):
    """A console's file that lets writing go on once step 5 is reported, and makes the steps after
    it last long enough for a save to end meanwhile, in ``latest``."""

    def __init__(self, latest: Path) -> None:
        super().__init__()
        self.opened, self.written = threading.Event(), threading.Event()
        self.latest = latest

    def write(self, text: str) -> int:
        match = re.search(r"^step +(\d+)  loss", text, re.MULTILINE)
        if match and int(match[1]) == 5:
            self.opened.set()
            assert self.written.wait(60)
            time.sleep(0.3)  # until the thread has said so; then it is published
        if match and int(match[1]) > 5:
            until = time.monotonic() + 10
            while not self.latest.exists() and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.1)
        return super().write(text)


def test_training_goes_on_while_a_save_is_written_and_says_so_when_it_is(
    corpus: CorpusInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of step 4's checkpoint is written before step 5 is done; it is told before step 8,
    after which the next one is due."""
    settings = ("train.steps=8", "checkpoint.save_interval=4")
    config = config_of(corpus, tmp_path, *settings)

    def run() -> str:
        gate = Gate(tmp_path / "checkpoints" / "latest")

        def write_later(*arguments: Any) -> Any:
            assert gate.opened.wait(60)
            info = write_tensors(*arguments)
            gate.written.set()
            return info

        monkeypatch.setattr(store, "write_tensors", write_later)
        finished, said = train_here(config, lambda: gate)
        assert finished
        return said

    (said,) = run_ranks(run, 1)
    told = re.findall(r"^step +(\d+)  (loss|saved)", said, re.MULTILINE)
    assert told.index(("4", "saved")) > told.index(("5", "loss"))
    assert told.index(("4", "saved")) < told.index(("8", "loss"))


class FullDisk(io.StringIO):
    """A console's file; from step 2 to step 4 the process that writes to it has a full disk."""

    def write(self, text: str) -> int:
        no_limit = resource.RLIM_INFINITY
        if re.search(r"^step +2  loss", text, re.MULTILINE):
            resource.setrlimit(resource.RLIMIT_FSIZE, (16384, no_limit))
        if re.search(r"^step +4  loss", text, re.MULTILINE):
            resource.setrlimit(resource.RLIMIT_FSIZE, (no_limit, no_limit))
        return super().write(text)


def test_a_run_whose_last_save_fails_says_so(corpus: CorpusInfo, tmp_path: Path) -> None:
    def run() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        with pytest.raises(RunError) as caught:
            train_here(config_of(corpus, tmp_path))
        return str(caught.value)

    assert "the weights after step 6 could not be saved" in run_ranks(run, 1)[0]
    assert (tmp_path / "summary.json").exists()


def test_fewer_steps_than_are_done_are_refused(corpus: CorpusInfo, used: Path) -> None:
    message = refused(config_of(corpus, used, *TP2_PP2, "train.steps=3"), 4)
    assert message.startswith("train.steps: 3 steps are fewer than the 6 that the run in")


def test_a_file_for_a_run_folder_is_refused(corpus: CorpusInfo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    message = refused(config_of(corpus, tmp_path / "file", "parallel.tp=2"), 2)
    assert message.startswith("run.dir: cannot write")
    assert (tmp_path / "file").read_text() == "mine"


def test_ranks_with_different_settings_are_refused(corpus: CorpusInfo, tmp_path: Path) -> None:
    def run() -> str:
        rate = 1e-3 * (1 + dist.get_rank())
        config = config_of(corpus, tmp_path / "run", f"optim.lr=[{rate},{rate}]")
        with pytest.raises(UserError) as caught:
            trainer.train(config, make_mesh(config), Console(quiet=True))
        return str(caught.value)

    assert all("give all hosts the same" in message for message in run_ranks(run, 2))
    assert not (tmp_path / "run").exists()


def test_a_run_begins_with_the_weights_of_another(corpus: CorpusInfo, tmp_path: Path) -> None:
    """At another layout: its masters, no moments, the first step. The tokenizer comes along."""
    first, second, snapshot = (tmp_path / name for name in ("first", "second", "snapshot"))
    settings = ("train.steps=2", "checkpoint.snapshot_interval=2")
    train(config_of(corpus, first, *settings, *TP2_PP2), 4)
    begin = (f"run.init_from={first}", "train.steps=1", "optim.lr=[0.0,0.0]", "optim.min_lr=0.0")
    finished, said = train(config_of(corpus, second, *begin, "optim.weight_decay=[0.0,0.0]"), 2)
    assert finished
    assert f"Beginning with the weights in {first}" in said
    before, after = checkpoint(first, 2), checkpoint(second, 1)
    masters = [name for name in before if name.startswith("master/")]
    assert masters
    assert all(torch.equal(before[name], after[name]) for name in masters)
    saved = second / "checkpoints" / "step_00000001"
    assert (saved / "assets" / "tokenizer.json").read_bytes() == corpus.tokenizer_path.read_bytes()

    other = config_of(corpus, tmp_path / "other", *begin, "model.hidden_act=silu")
    assert re.search("model.hidden_act: the model in .* has 'relu2', not 'silu'", refused(other, 1))
    damaged = tmp_path / "damaged"
    shutil.copytree(first, damaged)
    flip_last_bit(damaged / "checkpoints" / "step_00000002" / "rank_00003.safetensors")
    of_damaged = config_of(corpus, snapshot, f"run.init_from={damaged}")
    assert "rank_00003.safetensors: is not what was saved" in refused(of_damaged, 2)
    codes = f"run.init_from={first / 'snapshots'}"
    message = refused(config_of(corpus, snapshot, codes), 2)
    assert "holds codes and scales only, and no optimizer can go on from these" in message
    assert not snapshot.exists()


def test_more_samples_may_be_left_out_of_what_is_to_come(
    corpus: CorpusInfo, tmp_path: Path
) -> None:
    """Three steps of 8 samples are done: what was seen stays as it was."""
    constant = ("optim.schedule=constant", "optim.lr=[1e-3]", "optim.weight_decay=[0.1]")
    start = ("train.steps=3", "data.skip_samples=[4,8]")
    train(config_of(corpus, tmp_path, *constant, *start), 1)
    for skips in ("[]", "[4,8,10,12]", "[4,9]", "[4,8,27,30]"):
        problem = refused(config_of(corpus, tmp_path, f"data.skip_samples={skips}"), 1)
        assert problem.startswith("data.skip_samples: ")
        assert problem.endswith("keep what it had, and add samples from 28 on")
    more = (*constant, "data.skip_samples=[4,8,28,40]")
    finished, _ = train(config_of(corpus, tmp_path, *more), 1)
    assert finished
    other = tmp_path / "other"
    train(config_of(corpus, other, *more), 1)
    assert_same_tensors(checkpoint(tmp_path, 6), checkpoint(other, 6))


def test_a_model_does_not_become_less_ternary(corpus: CorpusInfo, tmp_path: Path) -> None:
    ramp = "train.quantization_ramp=0.5"
    train(config_of(corpus, tmp_path, "train.steps=6", ramp), 1)
    problem = refused(config_of(corpus, tmp_path, "train.steps=20", ramp), 1)
    assert problem.startswith("train.quantization_ramp: λ was 1.00 after step 6")
    assert "would be 0.60" in problem
    finished, _ = train(
        config_of(corpus, tmp_path, "train.steps=8", "train.quantization_ramp=0.3"), 1
    )
    assert finished
