"""Saves that fail: every rank is told why, the checkpoint before stands, and the next one works."""

import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megabit.checkpoint import CheckpointFolder, CheckpointStore, Part, store
from megabit.checkpoint.tensor_file import LazyTensor
from megabit.errors import UserError
from megabit.files import FileInfo
from megabit.launch import run_ranks
from tests.checkpoint.stored import (
    assert_holds,
    begin_save,
    found_step,
    make_mesh,
    make_store,
    manifest,
    names_in,
    poll_until_told,
    save,
)


@contextmanager
def full_disk(is_here: bool = True, limit: int = 4096) -> Iterator[None]:
    """Meanwhile this process cannot write files beyond a size."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if is_here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    def run() -> tuple[list[str | None], str | None]:
        checkpoints = make_store(tmp_path)
        rank = checkpoints.mesh.world.rank
        assert save(checkpoints, 1) is None
        pointer = (tmp_path / "latest").stat()
        problems = []
        for step, failing in ((2, 0), (3, 1)):
            with full_disk(rank == failing):
                problems.append(save(checkpoints, step))
            assert checkpoints.durable_step == 1
            assert (tmp_path / "latest").stat() == pointer
            assert found_step(checkpoints) == 1
        with full_disk(rank == 1):  # told by poll on all of them
            begin_save(checkpoints, 4)
            saved = None
            while saved is None:
                saved = checkpoints.poll()
        assert checkpoints.poll() is None
        problems.append(saved.problem)
        last = save(checkpoints, 4)  # the same step, as at the end of a run
        assert checkpoints.durable_step == 4
        assert found_step(checkpoints) == 4
        checkpoints.close()
        return problems, last

    for problems, last in run_ranks(run, 2):
        for problem, failing in zip(problems, (0, 1, 1), strict=True):
            assert problem is not None
            assert f"rank_{failing:05d}.safetensors: cannot write it" in problem
            assert "File too large" in problem
        assert last is None
    assert_holds(tmp_path / "step_00000004", 4)
    assert names_in(tmp_path) == {"latest", "step_00000001", "step_00000004"}


def test_a_full_disk_when_the_main_rank_completes_it(tmp_path: Path) -> None:
    """For the manifest, and for ``latest``, with the folder in its place already."""

    def run() -> list[str | None]:
        checkpoints = make_store(tmp_path)
        write, publish = store.write_tensors, CheckpointFolder.publish
        assert save(checkpoints, 1) is None
        problems = []

        def write_and_fill(path: Path, tensors: Sequence[LazyTensor]) -> FileInfo:
            info = write(path, tensors)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            return info

        with full_disk(False):
            store.write_tensors = write_and_fill if checkpoints.mesh.is_main else write
            problems.append(save(checkpoints, 2))
        store.write_tensors = write
        assert (checkpoints.durable_step, found_step(checkpoints)) == (1, 1)
        assert checkpoints.folder.steps() == [1]

        def fill_and_publish(*arguments: Any) -> Path:
            with full_disk(limit=0):
                return publish(*arguments)

        CheckpointFolder.publish = fill_and_publish
        problems.append(save(checkpoints, 3))
        CheckpointFolder.publish = publish
        assert (checkpoints.durable_step, found_step(checkpoints)) == (1, 1)
        problems.append(save(checkpoints, 3))
        assert (checkpoints.durable_step, found_step(checkpoints)) == (3, 3)
        checkpoints.close()
        return problems

    for problems in run_ranks(run, 2):
        assert problems[2] is None
        for problem, step in zip(problems[:2], (2, 3), strict=True):
            assert problem is not None
            assert problem.startswith(f"{tmp_path}/step_{step:08d}: cannot complete it (")
            assert "File too large" in problem
    assert_holds(tmp_path / "step_00000003", 3)
    assert names_in(tmp_path) == {"latest", "step_00000001", "step_00000003"}


def test_a_draft_in_removal_is_in_no_ones_way(tmp_path: Path) -> None:
    """The main rank removes what a failed save left while others write the same step again."""

    def run() -> list[str | None]:
        checkpoints = make_store(tmp_path)
        remove = shutil.rmtree

        def slowly(path: Path, **how: Any) -> None:
            time.sleep(0.3)
            remove(path, **how)

        shutil.rmtree = slowly
        with full_disk(checkpoints.mesh.world.rank == 0):
            first = save(checkpoints, 1)
        second = save(checkpoints, 1)
        checkpoints.close()
        return [first, second]

    for first, second in run_ranks(run, 2):
        assert first is not None
        assert second is None
    assert_holds(tmp_path / "step_00000001", 1)
    assert names_in(tmp_path) == {"latest", "step_00000001"}


def test_an_asset_that_is_gone_fails_the_save(tmp_path: Path) -> None:
    assets = {"tokenizer.json": tmp_path / "given"}
    assets["tokenizer.json"].touch()
    folder = tmp_path / "checkpoints"
    checkpoints = make_store(folder)
    assert save(checkpoints, 1, assets) is None
    assets["tokenizer.json"].unlink()
    begin_save(checkpoints, 2, assets)
    saved = poll_until_told(checkpoints)
    assert saved.problem is not None
    assert "step_00000002: cannot complete it" in saved.problem
    assert str(assets["tokenizer.json"]) in saved.problem
    assert checkpoints.finish() is None
    assert checkpoints.durable_step == 1
    assert names_in(folder) == {"latest", "step_00000001"}


def test_a_tensor_given_twice_fails_the_save(tmp_path: Path) -> None:
    checkpoints = make_store(tmp_path)
    checkpoints.save(manifest(1), [Part("x", (2,), (0,), torch.ones(2))] * 2, {})
    saved = checkpoints.finish()
    assert saved is not None
    assert saved.problem is not None
    assert "x is given twice" in saved.problem


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    problem = save(make_store(tmp_path / "file" / "checkpoints"), 1)
    assert problem is not None
    assert "rank_00000.safetensors: cannot write it (" in problem


# Several hosts.


def test_hosts_that_share_no_disk(tmp_path: Path) -> None:
    """Each rank stands for a host that has a disk of its own; one has an old checkpoint."""
    assert save(make_store(tmp_path / "host_1"), 1) is None

    def run() -> tuple[str | None, str]:
        mesh = make_mesh()
        own = CheckpointStore(tmp_path / f"host_{mesh.world.rank}", mesh)
        problem = save(own, 2)
        assert own.durable_step == -1
        with pytest.raises(UserError) as caught:
            own.find(falls_back=True, alert=pytest.fail)
        return problem, str(caught.value)

    for problem, message in run_ranks(run, 2):
        assert problem is not None
        assert "rank_00001.safetensors is not here; run.dir must be on disks that" in problem
        assert "run.dir: hosts see different checkpoints in" in message
