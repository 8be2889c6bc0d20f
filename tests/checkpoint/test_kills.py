"""A run that is killed while it saves: the checkpoint before stands, or the new one is whole."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megabit.checkpoint import CheckpointFolder, Retention
from megabit.launch import RankError, run_ranks
from tests.checkpoint.stored import (
    assert_holds,
    contents,
    dies_before,
    killed_before,
    make_store,
    names_in,
    save,
)

KEPT = Retention(1)
"""So that each save removes what is older."""
NEVER = 0


def saved_by(folder: Path, size: int, *steps: int) -> None:
    """By a run of ``size`` ranks that keeps all."""

    def run() -> None:
        checkpoints = make_store(folder)
        for step in steps:
            assert save(checkpoints, step) is None

    run_ranks(run, size)


def go_on(folder: Path, before: int, after: int) -> None:
    """A run begins in ``folder``, finds the checkpoint of step ``before``, and saves ``after``."""
    checkpoints = make_store(folder, KEPT)
    found = checkpoints.find(falls_back=False, alert=pytest.fail)
    assert found is not None
    assert found.manifest.step == checkpoints.durable_step == before
    left = [*folder.glob("step_*.tmp")]
    checkpoints.clean()
    assert [path for path in left if path.exists()] == []
    assert save(checkpoints, after) is None
    assert CheckpointFolder(folder).latest() == found.path.with_name(f"step_{after:08d}")
    checkpoints.close()


def test_killed_at_every_instant_of_a_save(tmp_path: Path) -> None:
    """Before each change of the disk, from the first byte to the removal of older checkpoints."""
    template, given = tmp_path / "template", tmp_path / "tokenizer.json"
    given.write_text("{}")
    saved_by(template, 1, 1, 2)
    old = contents(template / "step_00000002")
    new: dict[str, bytes] = {}
    folders: list[Path] = []
    assert save(make_store(tmp_path / "straight"), 3, {"tokenizer.json": given}) is None
    new = contents(tmp_path / "straight" / "step_00000003")
    named: list[int] = []
    while True:
        folder = tmp_path / f"{len(folders)}"
        shutil.copytree(template, folder)
        checkpoints = make_store(folder, KEPT)
        if not dies_before(
            len(folders) + 1, lambda c=checkpoints: save(c, 3, {"tokenizer.json": given})
        ):
            break
        folders.append(folder)
        latest = CheckpointFolder(folder).latest()
        assert latest is not None
        named.append(int(latest.name.removeprefix("step_")))
        assert contents(latest) == {2: old, 3: new}[named[-1]], len(folders)
    assert names_in(folder) == {"latest", "step_00000003"}
    assert named == sorted(named)
    assert {*named} == {2, 3}
    assert named.index(3) > 60  # among others, one for each tensor
    for folder, before in [*zip(folders, named, strict=True)][::8]:
        go_on(folder, before, 3)
        assert_holds(folder / "step_00000003", 3)


@dataclass(frozen=True)
class Kill:
    """Of a rank, before the n-th call of a function; and what is on disk then."""

    rank: int
    number: int
    function: str
    latest: int
    is_there: Callable[[Path], bool]

    def save(self, folder: Path) -> None:
        """On each rank."""
        checkpoints = make_store(folder, KEPT)
        world = checkpoints.mesh.world
        is_here = world.rank == min(self.rank, world.size - 1)
        with killed_before(self.number if is_here else NEVER, self.function):
            save(checkpoints, 3)


def draft_of(folder: Path) -> Path:
    (draft,) = folder.glob("step_00000003.*.tmp")
    return draft


def has_half_a_file(folder: Path) -> bool:
    whole = folder.parent / "template" / "step_00000002"
    paths = draft_of(folder).glob("*.safetensors")
    return any(0 < path.stat().st_size < (whole / path.name).stat().st_size for path in paths)


KILLS = {
    "before": Kill(
        0, 1, "mkdir", 2, lambda p: not [*p.glob("step_00000003.*.tmp/rank_00000.safetensors")]
    ),
    "during shards": Kill(1, 20, "write", 2, has_half_a_file),
    "before rename": Kill(0, 1, "rename", 2, lambda p: "manifest.json" in names_in(draft_of(p))),
    # The first replacement is the manifest's.
    "before latest": Kill(
        0, 2, "replace", 2, lambda p: (p / "step_00000003/manifest.json").is_file()
    ),
    # Two drafts of files are removed, which are not there, then the files of the checkpoint.
    "during retention": Kill(0, 4, "unlink", 3, lambda p: bool([*p.glob("step_*.old.tmp/*")])),
}


@pytest.mark.parametrize("size", [1, 2])
def test_killed_at_five_points(size: int, tmp_path: Path) -> None:
    template = tmp_path / "template"
    saved_by(template, size, 1, 2)
    folders = {name: tmp_path / name for name in KILLS}
    for name, kill in KILLS.items():
        shutil.copytree(template, folders[name])
        with pytest.raises(RankError, match="died without a word"):
            run_ranks(lambda kill=kill, name=name: kill.save(folders[name]), size)
        assert kill.is_there(folders[name]), name
        assert_holds(folders[name] / f"step_{kill.latest:08d}", kill.latest)

    def run() -> None:
        for name, kill in KILLS.items():
            go_on(folders[name], kill.latest, 3)

    run_ranks(run, size)
    for folder in folders.values():
        assert_holds(folder / "step_00000003", 3)
        assert names_in(folder) == {"latest", "step_00000003"}
