"""Drills strike the rank and the step that they name, once, and each is the fault that it says."""

import faulthandler
import math
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megabit.config import Drill, find_problems
from megabit.data.corpus import CorpusInfo
from megabit.errors import UserError
from megabit.faults.drills import DrillError, Drills
from megabit.faults.members import Member, gather_members, read_members, write_members
from megabit.launch import RankError, run_ranks
from megabit.mesh import Axis
from megabit.telemetry.metrics import read_metrics
from tests.faults.runs import state_of
from tests.patience import PATIENCE_S, eventually
from tests.training.runs import assert_same_tensors, checkpoint, config_of, rows, train
from tests.training.tiny import make_mesh, tiny, tiny_corpus

SAVES = ("checkpoint.save_interval=2", "checkpoint.asynchronous=false", "faults.retry_pause_s=0.01")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def drills_of(folder: Path, *drills: Drill, rank: int = 0) -> Drills:
    """As one rank of two meets them; only ``rank`` counts of it."""
    world = Axis("world", 2, rank)
    cpu = torch.device("cpu")
    return Drills(
        drills, folder, nn.Identity(), world, cpu, lambda drill: None, lambda around: None
    )


def drill(fault: str, rank: int = 0, step: int = 2, **more: Any) -> str:
    """As a setting."""
    entries = {"fault": fault, "rank": rank, "step": step, **more}
    return "faults.drills=[{" + ", ".join(f"{k}: {v}" for k, v in entries.items()) + "}]"


def struck(folder: Path, fault: str) -> multiprocessing.Process:
    """A process that meets ``fault`` before step 3; it ends with 0 if nothing happens."""

    def meet() -> None:
        faulthandler.disable()  # pytest's, which would print stacks
        drills = drills_of(folder, Drill(fault, rank=0, step=3))  # type: ignore[arg-type]
        for step in range(5):
            drills.before_step(step)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=meet)
    process.start()
    return process


@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [
        ("kill", -signal.SIGKILL),
        ("term", -signal.SIGTERM),
        ("segfault", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
        ("exit", 1),
    ],
)
def test_a_process_ends_as_the_drill_says(tmp_path: Path, fault: str, exit_code: int) -> None:
    """Once: the next process of the run, which finds the marker, is not struck again."""
    process = struck(tmp_path / "faults", fault)
    process.join(PATIENCE_S)
    assert process.exitcode == exit_code
    again = struck(tmp_path / "faults", fault)
    again.join(PATIENCE_S)
    assert again.exitcode == 0


def test_a_process_stops(tmp_path: Path) -> None:
    process = struck(tmp_path / "faults", "stop")
    eventually(lambda: state_of(process.pid) == "T")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    process.join(PATIENCE_S)
    assert process.exitcode == 0


@pytest.mark.parametrize("fault", ["hang", "hold_gil"])
def test_a_process_hangs(tmp_path: Path, fault: str) -> None:
    """Until it is killed; the marker is there first."""
    process = struck(tmp_path / "faults", fault)
    eventually(lambda: any((tmp_path / "faults").glob("drill_0_*.done")))
    time.sleep(0.1)
    assert process.is_alive()
    process.kill()
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL


def test_only_who_is_named_is_struck_and_only_then(tmp_path: Path) -> None:
    planned = Drill("exception", rank=1, step=3)
    other, named = (drills_of(tmp_path, planned, rank=rank) for rank in (0, 1))
    for step in range(6):
        other.before_step(step)
    assert not any(tmp_path.iterdir())
    for step in (0, 1, 2, 4):
        named.before_step(step)
    with pytest.raises(DrillError, match="exception on rank 1, before step 4"):
        named.before_step(3)
    named.before_step(3)  # as after a rollback
    drills_of(tmp_path, planned, rank=1).before_step(3)  # as after a restart


def test_the_same_drill_twice_strikes_twice(tmp_path: Path) -> None:
    """Such as a fault while a run recovers."""
    twice = [Drill("exception", step=1), Drill("exception", step=1)]
    for _ in range(2):
        with pytest.raises(DrillError):
            drills_of(tmp_path, *twice).before_step(1)
    drills_of(tmp_path, *twice).before_step(1)


def test_it_says_so_before_it_strikes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    struck(tmp_path, "kill").join(PATIENCE_S)
    assert capfd.readouterr().err == "DRILL kill on rank 0, before step 4\n"


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [((), 2), (("parallel.pp=2",), 2), (("parallel.tp=2",), 2)],
    ids=["dp2", "pp2", "tp2"],
)
def test_a_nan_makes_all_ranks_skip_one_step(
    corpus: CorpusInfo, tmp_path: Path, settings: tuple[str, ...], world_size: int
) -> None:
    """It is in the gradient, not in the loss, and only once."""
    config = config_of(corpus, tmp_path / "run", drill("nan", rank=1), *settings)
    finished, said = train(config, world_size)
    assert finished
    assert re.search(r"nonfinite: loss 5\.\d+, grad_norm inf, time 1: skip", said)
    intervals = [row for row in rows(tmp_path / "run") if "loss" in row]
    assert [row["skipped"] for row in intervals] == [0, 0, 1, 0, 0, 0]
    events = [
        row["event"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "event" in row
    ]
    (event,) = [event for event in events if event["kind"] == "fault"]
    assert event["text"] == "drill: nan on rank 1, before step 3"
    assert event["evidence"] == {"rank": 1}


@pytest.mark.parametrize("fault", ["storage_error", "disk_full"])
def test_the_next_save_meets_a_fault_of_the_disk(
    corpus: CorpusInfo, tmp_path: Path, fault: str
) -> None:
    """What passes is tried again; a full disk costs one checkpoint, and an alert."""
    folder = tmp_path / "run"
    finished, said = train(config_of(corpus, folder, drill(fault, step=1), *SAVES), 2)
    assert finished
    alerts = [line for line in said.splitlines() if line.startswith("ALERT")]
    saved = [path.name for path in (folder / "checkpoints").iterdir()]
    if fault == "storage_error":
        assert len(alerts) == 1
        assert "failed (Input/output error); retry 1 of 3 in 0.01 s" in alerts[0]
        assert "step_00000002" in saved
    else:
        assert "step 2 is not saved: " in alerts[-1]
        assert "File too large" in alerts[-1]
        assert "step_00000002" not in saved
    assert {"step_00000004", "step_00000006", "latest"} <= {*saved}
    plain = tmp_path / "plain"
    train(config_of(corpus, plain, *SAVES), 2)
    assert_same_tensors(checkpoint(folder, 6), checkpoint(plain, 6))


def test_each_rank_says_itself_what_it_tries_again(
    corpus: CorpusInfo, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(corpus, tmp_path / "run", drill("storage_error", rank=1, step=1), *SAVES)
    train(config, 2)
    alerts = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ALERT")]
    assert len(alerts) == 1
    assert alerts[0].startswith("ALERT rank 1: writing ")
    assert alerts[0].endswith("failed (Input/output error); retry 1 of 3 in 0.01 s")


def test_an_exception_ends_the_run(corpus: CorpusInfo, tmp_path: Path) -> None:
    config = config_of(corpus, tmp_path / "run", drill("exception", rank=1))
    with pytest.raises(RankError, match="DrillError: exception on rank 1, before step 3"):
        train(config, 2)


def test_a_signal_is_what_the_run_makes_of_it(corpus: CorpusInfo, tmp_path: Path) -> None:
    """SIGTERM on one rank: all save and stop, and the run goes on later without the drill."""
    config = config_of(corpus, tmp_path / "run", drill("term", rank=1))
    finished, said = train(config, 2)
    assert not finished
    assert "Stopped after step 3" in said
    finished, _ = train(config, 2)
    assert finished
    assert math.isfinite([row for row in rows(tmp_path / "run") if "loss" in row][-1]["loss"])


def test_members_are_known_to_all(tmp_path: Path) -> None:
    def run() -> list[Member]:
        mesh = make_mesh(tiny())
        members = gather_members(mesh.world, mesh.device)
        assert members[mesh.world.rank].pid == os.getpid()
        if mesh.is_main:
            write_members(tmp_path / "faults" / "ranks.json", members)
        return members

    ranks = run_ranks(run, 2)
    assert ranks[0] == ranks[1] == read_members(tmp_path / "faults" / "ranks.json")
    assert [member.rank for member in ranks[0]] == [0, 1]
    assert {member.host for member in ranks[0]} == {os.uname().nodename}


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '[{"rank": 0, "host": "a", "pid": -1}]', '[{"rank": 0, "pid": 5}]']
)
def test_a_damaged_list_of_members_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ranks.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is damaged; a run writes it when it begins"):
        read_members(path)


def test_drills_that_cannot_be_are_refused() -> None:
    assert find_problems(tiny(drill("kill", rank=2)), 2) == []  # an elastic job may have it later
    with pytest.raises(UserError, match=r"faults.drills\[0\].rank: must be 0 or more, not -1"):
        tiny(drill("kill", rank=-1))
