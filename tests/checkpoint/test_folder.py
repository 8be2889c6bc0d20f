"""The order of checkpoints, which of them stay, and ``latest``, which is right at every instant."""

import shutil
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest

from megabit.checkpoint import CheckpointFolder, Retention
from megabit.errors import UserError
from megabit.files import write_text
from tests.checkpoint.stored import (
    contents,
    dies_before,
    names_in,
    tensors_of,
    write_checkpoint,
)

SMALL = dict(list(tensors_of(0).items())[:1])


def publish(folder: CheckpointFolder, step: int, retention: Retention | None = None) -> Path:
    """A checkpoint of little, complete as far as the folder looks."""
    draft = write_checkpoint(folder.draft(step, "x"), step, tensors=SMALL)
    return folder.publish(draft, step, retention or Retention())


def steps_named(folder: CheckpointFolder) -> list[int]:
    """By their names on disk, of whatever is there."""
    return sorted(int(p.name.removeprefix("step_")) for p in folder.path.glob("step_*"))


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def test_nothing_is_there(folder: CheckpointFolder) -> None:
    for _ in range(2):
        assert folder.steps() == []
        assert folder.latest() is None
        folder.remove_drafts()
        folder.path.mkdir(exist_ok=True)
    folder.path.rmdir()
    folder.path.write_text("a file")
    assert folder.steps() == []
    assert folder.latest() is None


def test_checkpoints_are_published_in_order(folder: CheckpointFolder) -> None:
    for step in (1, 2, 10):
        path = publish(folder, step)
        assert path == folder.path / f"step_{step:08d}"
        assert folder.latest() == path
    assert folder.steps() == [10, 2, 1]
    assert names_in(folder.path) == {"latest", "step_00000001", "step_00000002", "step_00000010"}
    assert (folder.path / "latest").read_text() == "step_00000010\n"


def test_steps_of_nine_digits(folder: CheckpointFolder) -> None:
    """Are not in the order of their names."""
    for step in (AFTER, BEFORE, AFTER):
        publish(folder, step)
        assert folder.latest() == folder.of_step(step)
    assert folder.steps() == [AFTER, BEFORE]


def test_what_is_no_checkpoint(folder: CheckpointFolder) -> None:
    publish(folder, 1)
    for name in (
        "step_00000002",
        "step_3",
        "step_00000004.x.tmp",
        "step_x",
        "note",
        "step_" + "9" * 19,
    ):
        (folder.path / name).mkdir()
    (folder.path / "step_00000005").write_text("a file")
    for name in ("step_3", "step_00000004.x.tmp", "step_x", "step_" + "9" * 19):
        (folder.path / name / "manifest.json").write_text("{}")
    assert folder.steps() == [1]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n", b"step_1\n", b"../step_00000001", b"step_00000001/..", b"step_00000001.tmp"),
        *(b"\xff\xfe", b"step_" + b"9" * 30, b"step_00000001\nstep_00000002\n"),
    ],
)
def test_latest_that_is_no_name(content: bytes, folder: CheckpointFolder) -> None:
    publish(folder, 1)
    (folder.path / "latest").write_bytes(content)
    with pytest.raises(UserError) as caught:
        folder.latest()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{folder.path / 'latest'}: ")
    assert problem.isprintable()


def test_latest_that_is_a_folder(folder: CheckpointFolder) -> None:
    (folder.path / "latest").mkdir(parents=True)
    with pytest.raises(UserError, match="latest: cannot read it"):
        folder.latest()


def test_latest_as_people_write_it(folder: CheckpointFolder) -> None:
    publish(folder, 1)
    publish(folder, 2)
    (folder.path / "latest").write_text("  step_00000001\r\n")
    assert folder.latest() == folder.of_step(1)


def test_drafts_are_removed(folder: CheckpointFolder) -> None:
    publish(folder, 1)
    write_checkpoint(folder.draft(2, "a"), 2)
    (folder.draft(3, "b") / "assets").mkdir(parents=True)
    (folder.path / "step_00000001.old.tmp").mkdir()
    (folder.path / "other.tmp").mkdir()
    folder.remove_drafts()
    assert names_in(folder.path) == {"latest", "step_00000001", "other.tmp"}


def kept_of(steps: list[int], retention: Retention, folder: CheckpointFolder) -> list[int]:
    for step in steps:
        publish(folder, step, retention)
        assert folder.latest() == folder.of_step(step)
    return steps_named(folder)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [*range(1, 8)]),
        (Retention(every=3), [*range(1, 8)]),
        (Retention(1), [7]),
        (Retention(2), [6, 7]),
        (Retention(9), [*range(1, 8)]),
        (Retention(2, 3), [3, 6, 7]),
        (Retention(1, 3), [3, 6, 7]),
        (Retention(1, 7), [7]),
        (Retention(3, 1), [*range(1, 8)]),
    ],
)
def test_what_is_kept(retention: Retention, kept: list[int], folder: CheckpointFolder) -> None:
    assert kept_of([*range(1, 8)], retention, folder) == kept


def test_marked_ones_do_not_count_as_the_last(folder: CheckpointFolder) -> None:
    """The newest two are kept, marked or not, and older ones that are marked."""
    assert kept_of([10, 15, 20, 25, 30, 35], Retention(2, 10), folder) == [10, 20, 30, 35]


def test_newer_ones_are_not_judged(folder: CheckpointFolder) -> None:
    """Those of another run, in the same folder, which went further; it goes on from where this one
    is, and saves its own steps again."""
    for step in (1, 2, 3, 8, 9):
        publish(folder, step)
    publish(folder, 4, Retention(2))
    assert steps_named(folder) == [3, 4, 8, 9]
    assert folder.latest() == folder.of_step(4)
    for step in (8, 9):
        publish(folder, step, Retention(2))
    assert steps_named(folder) == [8, 9]


def test_what_has_no_manifest_is_not_removed(folder: CheckpointFolder) -> None:
    """It is not megabit's to judge what it is."""
    (folder.path / "step_00000001").mkdir(parents=True)
    assert kept_of([2, 3], Retention(1), folder) == [1, 3]


def test_a_step_is_saved_again(folder: CheckpointFolder) -> None:
    """In place of what is there, whether ``latest`` names it or another one."""
    for step in (1, 2, 3):
        publish(folder, step)
    for step in (3, 2, 1):
        (folder.of_step(step) / "old").touch()
        publish(folder, step)
        assert names_in(folder.of_step(step)) == {"manifest.json", "rank_00000.safetensors"}
        assert folder.latest() == folder.of_step(step)
        assert steps_named(folder) == [1, 2, 3]


def test_what_stands_in_the_way_is_an_error(folder: CheckpointFolder) -> None:
    """``latest`` stays where it is."""
    publish(folder, 1)
    draft = write_checkpoint(folder.draft(2, "x"), 2)
    shutil.rmtree(draft)
    with pytest.raises(FileNotFoundError):
        folder.publish(draft, 2, Retention(1))
    assert folder.latest() == folder.of_step(1)
    assert folder.steps() == [1]


BEFORE, AFTER = 99_999_999, 100_000_000
KILLED = {
    "first": ([], 1, [None, "1 new"]),
    "next": ([1, 2], 3, ["2 old", "3 new"]),
    # Numbers that are not in the order of their names.
    "latest again": ([BEFORE, AFTER], AFTER, [f"{AFTER} old", f"{BEFORE} old", f"{AFTER} new"]),
    "only one again": ([2], 2, ["2 old", None, "2 new"]),
    "behind newer ones": ([1, 2, 8], 4, ["8 old", "4 new"]),
}
"""Steps that are there, the last of them as ``latest``; the step that is published; and what
``latest`` names meanwhile, which is one after the other."""


@pytest.mark.parametrize(("there", "step", "named"), KILLED.values(), ids=KILLED.keys())
def test_latest_is_right_at_every_instant(
    there: list[int], step: int, named: list[str | None], tmp_path: Path
) -> None:
    """Killed before each change of the disk, ``latest`` names a complete checkpoint, and whatever
    looks like one is one. Then the draft is removed, and the step can be published."""
    template = CheckpointFolder(tmp_path / "template")
    template.path.mkdir()
    draft = write_checkpoint(template.draft(step, "x"), step, tensors=SMALL)
    complete = {f"{step} new": contents(draft)}
    for old in there:
        path = write_checkpoint(template.of_step(old), old, tensors=SMALL)
        (path / "before").touch()  # tells it from a new one of the same step
        complete[f"{old} old"] = contents(path)
        write_text(template.path / "latest", path.name)
    retention = Retention(1 if step == 3 else 0)  # so that two are removed
    seen: list[str | None] = []
    while True:
        folder = CheckpointFolder(tmp_path / f"{len(seen)}")
        shutil.copytree(template.path, folder.path)
        move = partial(folder.publish, folder.path / draft.name, step, retention)
        if not dies_before(len(seen) + 1, move):
            break
        all_found = {
            path: [name for name, files in complete.items() if files == contents(path)]
            for path in map(folder.of_step, folder.steps())
        }
        assert all(all_found.values()), len(seen)
        latest = folder.latest()
        seen.append(None if latest is None else all_found[latest][0])
        folder.remove_drafts()
        assert not [*folder.path.glob("step_*.tmp")]
        if len(seen) % 10 == 0:
            publish(folder, step)
            assert folder.latest() == folder.of_step(step)
            assert not [*folder.path.glob("*.tmp")]
    assert folder.latest() == folder.of_step(step)
    assert contents(folder.of_step(step)) == complete[f"{step} new"]
    assert steps_named(folder) == ([3] if step == 3 else sorted({*there, step}))
    assert [name for name, _ in groupby(seen)] == named
