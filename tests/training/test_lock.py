"""A run's folder belongs to one run at a time, and to nobody once its process is gone."""

import os
import signal
from pathlib import Path

import pytest

from megabit.errors import UserError
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.training.lock import exclusive
from tests.training.tiny import make_mesh, tiny


def test_a_second_run_is_refused_on_all_its_ranks(tmp_path: Path) -> None:
    def second() -> str:
        mesh = make_mesh(tiny("parallel.tp=2"))
        with pytest.raises(UserError) as caught, exclusive(tmp_path / "run", mesh):
            pytest.fail("both are at work")
        return str(caught.value)

    with exclusive(tmp_path / "run", ParallelMesh()):
        messages = run_ranks(second, 2)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"run.dir: another run is at work in {tmp_path / 'run'}")
    with exclusive(tmp_path / "run", ParallelMesh()):
        pass


def test_a_run_that_was_killed_leaves_the_folder_free(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with exclusive(tmp_path, ParallelMesh()):
            os.write(write, b"x")
            signal.pause()
    os.read(read, 1)
    with pytest.raises(UserError), exclusive(tmp_path, ParallelMesh()):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with exclusive(tmp_path, ParallelMesh()):
        pass
