"""A run's folder belongs to one run at a time, and to nobody once its process is gone."""

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from megabit.errors import UserError
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.training.lock import RunLock
from tests.training.tiny import make_mesh, tiny


def take(folder: Path, mesh: ParallelMesh) -> RunLock:
    return RunLock(folder, mesh, pytest.fail)


def test_a_second_run_is_refused_on_all_its_ranks(tmp_path: Path) -> None:
    """Before it reads anything, where a run has been; else before it writes."""

    def second() -> str:
        mesh = make_mesh(tiny("parallel.tp=2"))
        with pytest.raises(UserError) as caught, take(tmp_path / "run", mesh):
            pytest.fail("both are at work")
        return str(caught.value)

    with take(tmp_path / "run", ParallelMesh()) as first:
        with take(tmp_path / "run", ParallelMesh()) as at_once:
            assert not (tmp_path / "run").exists()
            first.make_folder()
            with pytest.raises(UserError, match=r"run\.dir: another run is at work"):
                at_once.make_folder()
        messages = run_ranks(second, 2)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"run.dir: another run is at work in {tmp_path / 'run'}")
    with take(tmp_path / "run", ParallelMesh()):
        pass


def test_a_run_that_was_killed_leaves_the_folder_free(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with take(tmp_path, ParallelMesh()) as lock:
            lock.make_folder()
            os.write(write, b"x")
            signal.pause()
    os.read(read, 1)
    with pytest.raises(UserError), take(tmp_path, ParallelMesh()):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with take(tmp_path, ParallelMesh()):
        pass


def test_a_file_system_without_locks_is_an_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    alerts: list[str] = []
    with RunLock(tmp_path, ParallelMesh(), alerts.append) as lock:
        lock.make_folder()
    assert [alert.startswith(f"{tmp_path / 'lock'} cannot be locked") for alert in alerts] == [True]
