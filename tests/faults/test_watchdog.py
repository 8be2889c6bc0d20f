"""The watchdog in real processes: who hangs is ended in time, who dies is named by others."""

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megabit.config import FaultsConfig
from megabit.errors import RunError
from megabit.faults import HUNG
from megabit.faults.parent import end_with_parent
from megabit.faults.watchdog import RankLost, Watchdog, lost_reason
from megabit.mesh import ParallelMesh, process_group
from megabit.pipeline.mailbox import PeerLost
from megabit.reduce import any_rank
from tests.faults.runs import is_alive, state_of
from tests.patience import PATIENCE_S, eventually

CPU = torch.device("cpu")
HANG = FaultsConfig(heartbeat_s=0.25, hang_s=2.0)
PATIENT = FaultsConfig(heartbeat_s=0.25, hang_s=4.0)
"""Where nothing is to happen: a busy machine must not take so long for a moment."""


def ended(body: Callable[[], None], timeout_s: float = PATIENCE_S) -> tuple[int | None, float]:
    """Exit code of a fork that runs ``body``, and after how many seconds."""

    def run() -> None:
        faulthandler.disable()  # pytest's
        body()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    started = time.monotonic()
    process.start()
    process.join(timeout_s)
    took_s = time.monotonic() - started
    if process.is_alive():
        process.kill()
    return process.exitcode, took_s


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def test_a_rank_that_sleeps_is_ended_and_its_stacks_are_there(tmp_path: Path) -> None:
    said = tmp_path / "said"

    def hang() -> None:
        with (
            said.open("w") as file,
            contextlib.redirect_stderr(file),
            Watchdog(ParallelMesh(), HANG, tmp_path / "faults") as watchdog,
        ):
            watchdog.begin_step(4)
            sleep_for_ever()

    code, took_s = ended(hang)
    assert code == HUNG
    assert took_s >= HANG.hang_s
    line = said.read_text()
    assert line.startswith("error: nothing has moved for ")
    assert " s in step 5: " in line
    stacks = (tmp_path / "faults" / "rank_0_stacks.txt").read_text()
    found = re.search(r"rank 0 \(.*\): nothing has moved for (\d+\.\d) s in step 5", stacks)
    assert found is not None
    assert float(found[1]) >= HANG.hang_s
    assert "in sleep_for_ever" in stacks
    assert "in _watch" in stacks


def test_a_rank_that_holds_the_interpreter_is_ended_too(tmp_path: Path) -> None:
    """Python code cannot run then: the C library's timer strikes."""

    def hold() -> None:
        with Watchdog(ParallelMesh(), HANG, tmp_path) as watchdog:
            watchdog.begin_step(0)
            time.sleep(1)  # the timer is set by now
            re.match(r"(a*)*b", "a" * 40)  # exponential, and holds the lock all the time

    code, _ = ended(hold)
    assert code == 1
    assert "Timeout" in (tmp_path / "rank_0_stacks.txt").read_text()


def test_who_gets_on_or_rests_is_left_alone(tmp_path: Path) -> None:
    def work() -> None:
        with Watchdog(ParallelMesh(), PATIENT, tmp_path / "faults") as watchdog:
            with watchdog.resting("loading"):
                time.sleep(1.1 * PATIENT.hang_s)
            for step in range(2):  # each too short, both together too long
                watchdog.begin_step(step)
                time.sleep(0.55 * PATIENT.hang_s)

    code, _ = ended(work)
    assert code == 0
    assert [*(tmp_path / "faults").iterdir()] == []  # no stacks of nobody


def test_collectives_are_progress_within_a_step(tmp_path: Path) -> None:
    def work() -> None:
        mesh = ParallelMesh()
        with Watchdog(mesh, PATIENT, tmp_path) as watchdog:
            watchdog.begin_step(0)
            for _ in range(2):
                time.sleep(0.55 * PATIENT.hang_s)
                with mesh.tp.waiting():
                    pass

    assert ended(work)[0] == 0


@pytest.mark.parametrize("faults", [FaultsConfig(heartbeat_s=0, hang_s=0), FaultsConfig(hang_s=0)])
def test_it_can_be_turned_off(tmp_path: Path, faults: FaultsConfig) -> None:
    with Watchdog(ParallelMesh(), faults, tmp_path / "faults") as watchdog:
        watchdog.begin_step(0)
        time.sleep(0.3)
    assert not (tmp_path / "faults").exists()


# Ranks that talk.


def ranks(body: Callable[[ParallelMesh], None], folder: Path) -> list[tuple[int | None, str]]:
    """``body`` in step 3 of three ranks with watchdogs; exit code of each and what it said, with
    the message of ``RankLost``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run(rank: int) -> None:
        faulthandler.disable()
        code = 0
        with (folder / f"{rank}").open("w") as said, contextlib.redirect_stderr(said):
            try:
                meeting = f"tcp://127.0.0.1:{port}"
                with process_group(rank, 3, CPU, meeting, timedelta(seconds=60)) as store:
                    mesh = ParallelMesh.create(1, 1, CPU, store=store)
                    with Watchdog(mesh, HANG, folder / "faults") as watchdog:
                        for step in range(3):
                            watchdog.begin_step(step)
                            any_rank(False, mesh.world, CPU)
                        body(mesh)
                        any_rank(False, mesh.world, CPU)
            except (RankLost, ValueError) as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                code = 1
            said.flush()
            os._exit(code)

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run, args=(rank,)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        eventually(lambda process=process: not process.is_alive() or state_of(process.pid) == "T")
    for process in processes:
        process.kill()
        process.join()
    return [
        (process.exitcode, (folder / f"{rank}").read_text())
        for rank, process in enumerate(processes)
    ]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_is_named_by_the_others(tmp_path: Path, who: int) -> None:
    """Rank 0 has the store with it, which says as much."""

    def body(mesh: ParallelMesh) -> None:
        if mesh.world.rank == who:
            time.sleep(2 * HANG.heartbeat_s)  # it has given signs
            os.kill(os.getpid(), signal.SIGKILL)

    ended = ranks(body, tmp_path)
    assert [code for code, _ in ended] == [-9 if rank == who else 1 for rank in range(3)]
    for rank in {0, 1, 2} - {who}:
        _, said = ended[rank]
        assert re.match(
            r"RankLost: rank 1 \(\S+, pid \d+\) (has given no sign of life for|was last heard) \d"
            if who
            else r"RankLost: rank 0( \(\S+, pid \d+\))? or its launcher, or their host, is gone",
            said,
        )
        assert f"rank {rank} lost its connection in step 3: " in said


def test_an_error_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    def body(mesh: ParallelMesh) -> None:
        if mesh.world.rank == 2:
            raise ValueError("a bug")

    ended = ranks(body, tmp_path)
    assert [code for code, _ in ended] == [1, 1, 1]
    assert ended[2][1] == "ValueError: a bug\n"
    for rank in (0, 1):
        assert re.match(
            r"RankLost: rank 2 \(\S+, pid \d+\) has failed: ValueError: a bug; rank \d lost",
            ended[rank][1],
        )


@pytest.mark.parametrize("fault", ["sleeps", "is stopped"])
def test_ranks_that_wait_for_one_name_it(tmp_path: Path, fault: str) -> None:
    def body(mesh: ParallelMesh) -> None:
        if mesh.world.rank == 1:
            if fault == "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            sleep_for_ever()

    ended = ranks(body, tmp_path)
    assert [code for code, _ in ended[::2]] == [HUNG, HUNG]
    assert ended[1][0] == (HUNG if fault == "sleeps" else -9)  # by this test
    named = r"error: nothing has moved for \d+ s in step 3: rank 1 \(\S+, pid \d+\) "
    seen = "waits for nobody, at step 3" if fault == "sleeps" else r"(has given no sign|was last)"
    assert re.match(named + seen, ended[0][1])
    assert ended[2][1] == ""  # one rank of a host tells


# What is a lost rank, and what is not.


def test_which_errors_are_of_lost_ranks() -> None:
    gloo = RuntimeError(
        "[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is "
        "typically caused by a remote worker crashing."
    )
    assert lost_reason(gloo) == "Connection closed by peer [127.0.0.1]:1"
    peer = PeerLost("pipeline rank 0")
    peer.__cause__ = gloo
    assert lost_reason(peer) == "Connection closed by peer [127.0.0.1]:1"
    for other in (RuntimeError("CUDA out of memory"), ValueError("x"), RunError("y"), OSError()):
        assert lost_reason(other) is None


# The launcher's end.


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    fork = multiprocessing.get_context("fork")

    def child(parent: int) -> None:
        end_with_parent(parent)
        pid_file.with_suffix(".draft").write_text(str(os.getpid()))
        pid_file.with_suffix(".draft").rename(pid_file)
        sleep_for_ever()

    def parent() -> None:
        fork.Process(target=child, args=(os.getpid(),)).start()
        sleep_for_ever()

    process = fork.Process(target=parent)
    process.start()
    eventually(pid_file.exists)
    pid = int(pid_file.read_text())
    process.kill()
    process.join()
    eventually(lambda: not is_alive(pid))
