"""Saving and finding checkpoints, all ranks together, while training goes on."""

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megabit.checkpoint import CheckpointFolder, Part, Retention, Saved, store
from megabit.checkpoint.tensor_file import LazyTensor
from megabit.files import FileInfo
from megabit.launch import run_ranks
from megabit.reduce import any_rank
from tests.checkpoint.stored import (
    PATIENCE_S,
    assert_holds,
    begin_save,
    contents,
    found_step,
    make_store,
    manifest,
    names_in,
    own_parts,
    parts_of,
    poll_until_told,
    save,
    tensors_of,
)


class Gate:
    """Control of time: stands for a function and calls it when the gate is open."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.reached, self.opened, self.passed = (threading.Event() for _ in range(3))

    def __call__(self, *arguments: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)
        result = self.function(*arguments)
        self.passed.set()
        return result

    def open(self) -> None:
        """Until what waited has been done."""
        self.opened.set()
        assert self.passed.wait(PATIENCE_S)


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Of the writing of this process' file; closed."""
    gate = Gate(store.write_tensors)
    monkeypatch.setattr(store, "write_tensors", gate)
    return gate


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Of the move of a draft to its place; closed."""
    gate = Gate(CheckpointFolder.publish)
    monkeypatch.setattr(CheckpointFolder, "publish", lambda *arguments: gate(*arguments))
    return gate


@pytest.fixture
def assets(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "given").write_text('{"γ": 1}')
    (tmp_path / "empty").touch()
    return {"tokenizer.json": tmp_path / "given", "chat_template.jinja": tmp_path / "empty"}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_was_saved_is_found_at_any_number_of_ranks(
    size: int, tmp_path: Path, assets: dict[str, Path]
) -> None:
    folder = tmp_path / "run" / "checkpoints"

    def run() -> list[Saved]:
        checkpoints = make_store(folder)
        assert checkpoints.find(falls_back=False, alert=pytest.fail) is None
        assert checkpoints.durable_step == -1
        told = []
        for step in (3, 5):
            begin_save(checkpoints, step, assets)
            saved = checkpoints.finish()
            assert saved is not None
            told.append(saved)
            assert checkpoints.durable_step == step
        assert checkpoints.finish() is None
        assert checkpoints.poll() is None
        assert found_step(checkpoints) == 5
        checkpoints.close()
        return told

    ranks = run_ranks(run, size)
    rank_files = {f"rank_{rank:05d}.safetensors" for rank in range(size)}
    given = {f"assets/{name}": path.read_bytes() for name, path in assets.items()}
    for step, told in zip((3, 5), zip(*ranks, strict=True), strict=True):
        path = folder / f"step_{step:08d}"
        assert_holds(path, step)
        files = contents(path)
        assert files.keys() == {"manifest.json"} | rank_files | given.keys()
        assert given.items() <= files.items()
        for saved in told:
            assert (saved.step, saved.path, saved.problem) == (step, path, None)
            assert saved.bytes == sum(len(files[name]) for name in rank_files)
            assert saved.blocked_s > 0
    assert names_in(folder) == {"latest", "step_00000003", "step_00000005"}

    # By one process, whatever the number that wrote it.
    found = make_store(folder).find(falls_back=False, alert=pytest.fail)
    assert found is not None
    assert found.path == folder / "step_00000005"
    assert replace(found.manifest, files={}) == manifest(5)


def test_the_same_tensors_give_the_same_files(tmp_path: Path) -> None:
    """In another run, another folder, at the same layout."""

    def run(folder: Path) -> None:
        checkpoints = make_store(folder)
        for step in (1, 2):
            assert save(checkpoints, step) is None

    for name in "ab":
        run_ranks(lambda name=name: run(tmp_path / name), 2)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(contents(tmp_path / "a")) == 7


def test_older_ones_are_removed(tmp_path: Path) -> None:
    checkpoints = make_store(tmp_path, Retention(last=2, every=4))
    for step in range(1, 8):
        assert save(checkpoints, step) is None
    assert CheckpointFolder(tmp_path).steps() == [7, 6, 4]
    assert found_step(checkpoints) == 7


# What is saved is what was there when ``save`` was called.


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_may_change_as_soon_as_save_returns(size: int, tmp_path: Path) -> None:
    """They are views of larger ones, some not contiguous, as an optimizer has them."""

    def run() -> None:
        gate = Gate(store.write_tensors)
        store.write_tensors = gate  # in this fork only
        checkpoints = make_store(tmp_path)
        parts = own_parts(checkpoints, tensors_of(1))
        assert any(not part.values.is_contiguous() for part in parts) == (size > 1)
        assert checkpoints.save(manifest(1), parts, {}) is None
        for part in parts:
            part.values.fill_(-1)
        gate.open()
        checkpoints.finish()

    run_ranks(run, size)
    assert_holds(tmp_path / "step_00000001", 1)


def test_a_gradient_is_not_asked_for(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    checkpoints = make_store(tmp_path)
    checkpoints.save(manifest(1), [Part("x", (2, 2), (0, 0), parameter)], {})
    saved = checkpoints.finish()
    assert saved is not None
    assert saved.problem is None


# Nothing waits for the disk but ``finish``.


def test_save_and_poll_do_not_wait_for_the_disk(
    tmp_path: Path, writing: Gate, publishing: Gate
) -> None:
    checkpoints = make_store(tmp_path)
    begin_save(checkpoints, 1)
    assert [checkpoints.poll() for _ in range(3)] == [None] * 3
    assert not tmp_path.joinpath("latest").exists()
    writing.open()
    started = time.monotonic()
    while not publishing.reached.is_set():
        assert time.monotonic() < started + PATIENCE_S
        assert checkpoints.poll() is None
    assert [checkpoints.poll() for _ in range(3)] == [None] * 3
    (draft,) = names_in(tmp_path)
    assert names_in(tmp_path / draft) == {"rank_00000.safetensors", "manifest.json"}
    assert checkpoints.durable_step == -1
    publishing.open()
    saved = poll_until_told(checkpoints)
    assert (saved.step, saved.problem) == (1, None)
    assert_holds(saved.path, 1)
    # Told once, and known to be durable on all ranks when they next meet.
    assert checkpoints.poll() is None
    assert checkpoints.finish() is None
    assert checkpoints.durable_step == 1


def test_nothing_is_published_without_a_poll(tmp_path: Path, writing: Gate) -> None:
    """Threads talk to no one: that all ranks have written, only the training thread can learn."""
    checkpoints = make_store(tmp_path)
    begin_save(checkpoints, 1)
    writing.open()
    checkpoints.close()
    (draft,) = names_in(tmp_path)
    assert names_in(tmp_path / draft) == {"rank_00000.safetensors"}


def test_the_next_save_waits_for_the_one_before(
    tmp_path: Path, writing: Gate, publishing: Gate
) -> None:
    checkpoints = make_store(tmp_path)
    begin_save(checkpoints, 1)
    writing.opened.set()
    publishing.opened.set()
    before = checkpoints.save(manifest(2), parts_of(tensors_of(2)), {})
    assert before is not None
    assert (before.step, before.problem) == (1, None)
    assert_holds(before.path, 1)
    assert checkpoints.durable_step == 1
    assert before.blocked_s > 0
    saved = checkpoints.finish()
    assert saved is not None
    assert (saved.step, checkpoints.durable_step) == (2, 2)
    assert_holds(saved.path, 2)


def test_a_save_that_was_told_is_not_told_again(tmp_path: Path) -> None:
    checkpoints = make_store(tmp_path)
    begin_save(checkpoints, 1)
    poll_until_told(checkpoints)
    assert checkpoints.save(manifest(2), parts_of(tensors_of(2)), {}) is None
    assert checkpoints.durable_step == 1
    saved = checkpoints.finish()
    assert saved is not None
    assert saved.step == 2


def test_ranks_finish_in_any_order(tmp_path: Path) -> None:
    """``latest`` does not move before the last of them; then the main rank is told, and the others
    when they wait."""

    def run() -> tuple[Saved | None, Saved | None, int]:
        checkpoints = make_store(tmp_path)
        world, device = checkpoints.mesh.world, checkpoints.mesh.device
        assert save(checkpoints, 1) is None
        pointer = (tmp_path / "latest").stat()
        gate = Gate(store.write_tensors)
        store.write_tensors = gate
        begin_save(checkpoints, 2)
        for turn in (2, 0, 1):
            assert checkpoints.poll() is None
            if turn == world.rank:
                gate.open()
            any_rank(False, world, device)  # all wait for that one
            assert (tmp_path / "latest").stat() == pointer
            assert checkpoints.folder.steps() == [1]
        polled = None
        started = time.monotonic()
        while not any_rank(polled is not None, world, device):
            assert time.monotonic() < started + PATIENCE_S
            polled = checkpoints.poll()
        assert polled is None or found_here(tmp_path) == 2
        waited = checkpoints.finish()
        return polled, waited, checkpoints.durable_step

    ranks = run_ranks(run, 3)
    for rank, (polled, waited, durable_step) in enumerate(ranks):
        assert (polled is not None, waited is not None) == (rank == 0, rank != 0)
        saved = polled or waited
        assert saved is not None
        assert (saved.step, saved.problem, durable_step) == (2, None, 2)
    assert_holds(tmp_path / "step_00000002", 2)


def found_here(folder: Path) -> int:
    latest = CheckpointFolder(folder).latest()
    assert latest is not None
    return int(latest.name.removeprefix("step_"))


def test_two_stores_at_once(tmp_path: Path) -> None:
    """Snapshots are not held up by a checkpoint that takes long."""

    def run() -> None:
        gate, write = Gate(store.write_tensors), store.write_tensors

        def writer(path: Path, tensors: Sequence[LazyTensor]) -> FileInfo:
            return (gate if "checkpoints" in path.parts else write)(path, tensors)

        store.write_tensors = writer
        checkpoints, snapshots = (make_store(tmp_path / n) for n in ("checkpoints", "snapshots"))
        begin_save(checkpoints, 2)
        for step in (2, 4):
            parts = own_parts(snapshots, tensors_of(step, "ternary"))
            snapshots.save(manifest(step, "ternary"), parts, {})
            assert checkpoints.poll() is None
            snapshots.poll()
            snapshots.finish()
            assert (checkpoints.durable_step, snapshots.durable_step) == (-1, step)
        gate.open()
        saved = checkpoints.finish()
        assert saved is not None
        assert (saved.step, saved.problem) == (2, None)

    run_ranks(run, 2)
    assert_holds(tmp_path / "checkpoints" / "step_00000002", 2)
    for step in (2, 4):
        assert_holds(tmp_path / "snapshots" / f"step_{step:08d}", step, "ternary")


# What a run finds.


def test_what_others_left_is_cleaned_up(tmp_path: Path) -> None:
    assert save(make_store(tmp_path), 1) is None
    (tmp_path / "step_00000002.1234abcd-0.tmp").mkdir()
    (tmp_path / "step_00000002.1234abcd-0.tmp" / "rank_00001.safetensors").write_bytes(b"half of")

    def run() -> bool:
        checkpoints = make_store(tmp_path)
        assert found_step(checkpoints) == 1
        checkpoints.clean()
        # At once, and not only here, where the main rank waited for itself.
        return names_in(tmp_path) == {"latest", "step_00000001"}

    assert run_ranks(run, 2) == [True, True]


def test_checkpoints_that_latest_does_not_name(tmp_path: Path) -> None:
    """An older one is wanted: it is what ``latest`` says, and what is saved next is the newest."""
    checkpoints = make_store(tmp_path)
    for step in (1, 2):
        assert save(checkpoints, step) is None
    (tmp_path / "latest").write_text("step_00000001\n")
    assert found_step(checkpoints) == 1
    assert checkpoints.durable_step == 1
    assert save(checkpoints, 2) is None
    assert found_step(checkpoints) == 2


# On disk before it is said to be.


def test_nothing_is_named_before_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assets: dict[str, Path]
) -> None:
    """Every file and folder of a checkpoint before the rename that makes it one, the rename before
    ``latest`` names it, and ``latest`` before an older one is removed."""
    folder = tmp_path / "checkpoints"
    checkpoints = make_store(folder, Retention(1))
    assert save(checkpoints, 1) is None
    done: list[tuple[str, str]] = []
    fsync, rename, replace_ = os.fsync, os.rename, os.replace

    def name_of(path: Any) -> str:
        name = os.path.relpath(path, folder)
        name = re.sub(r"\.([^/]+)\.[0-9a-f]{8}\.tmp$", r"\1.tmp", name)  # ``files.replacing``
        return (
            "draft" + name[name.index(".tmp") + 4 :] if name.startswith("step_00000002.") else name
        )

    def record_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(("sync", name_of(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def record_rename(source: Path, target: Path) -> None:
        rename(source, target)
        done.append((name_of(source), name_of(target)))

    def record_replace(source: Path, target: Path) -> None:
        replace_(source, target)
        done.append((name_of(source), name_of(target)))

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "replace", record_replace)
    assert save(checkpoints, 2, assets) is None
    monkeypatch.undo()

    def place(*change: str) -> int:
        return done.index(change)  # type: ignore[arg-type]

    becomes = place("draft", "step_00000002")
    content = done[:becomes]
    for path in contents(folder / "step_00000002"):
        assert ("sync", f"draft/{path}") in content or ("sync", f"draft/{path}.tmp") in content, (
            path
        )
    assert ("sync", "draft/assets") in content
    assert place("sync", "draft/manifest.json.tmp") < place(
        "draft/manifest.json.tmp", "draft/manifest.json"
    )
    assert content[-1] == ("sync", "draft")  # with all names in it
    assert done[becomes + 1 :] == [
        ("sync", "."),
        ("sync", ".."),
        ("sync", "latest.tmp"),
        ("latest.tmp", "latest"),
        ("sync", "."),
        ("step_00000001", "step_00000001.old.tmp"),
    ]
