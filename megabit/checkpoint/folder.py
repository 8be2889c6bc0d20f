"""The checkpoints of a run on disk, as one process sees them: names, order, ``latest``.

    checkpoints/latest          the name of the newest checkpoint that is complete
    checkpoints/step_00000100/
    checkpoints/step_00000200.x.tmp/    under way, or left by a run that died; never read

A checkpoint is written under another name, synced and renamed; then ``latest`` is replaced, and
only then are older ones removed. So whenever the run dies, ``latest`` names a complete checkpoint.
"""

import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megabit.checkpoint.manifest import MANIFEST
from megabit.errors import UserError
from megabit.files import sync, write_text

CHECKPOINTS, SNAPSHOTS = "checkpoints", "snapshots"
"""Where a run's folder has its training and its ternary checkpoints."""

_STEP = re.compile(r"step_(\d{8,18})")  # what int64 holds: ranks tell each other
_DRAFT = ".tmp"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept."""

    last: int = 0
    """So many of the newest; 0: all."""
    every: int = 0
    """Of the older ones those whose step is a multiple of this; 0: none."""

    def keeps(self, step: int, newer: int) -> bool:
        """Whether to keep the checkpoint of ``step``, of which there are ``newer`` ones."""
        is_marked = self.every > 0 and step % self.every == 0
        return self.last == 0 or newer < self.last or is_marked


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints."""

    path: Path

    def of_step(self, step: int) -> Path:
        """Where a complete checkpoint of ``step`` is."""
        return self.path / f"step_{step:08d}"

    def draft(self, step: int, attempt: str) -> Path:
        """Where one is written. ``attempt`` tells this run's files from those of one that died."""
        return self.path / f"step_{step:08d}.{attempt}{_DRAFT}"

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, newest first."""
        if not self.path.is_dir():
            return []
        found = [
            int(match[1])
            for entry in self.path.iterdir()
            if (match := _STEP.fullmatch(entry.name)) and (entry / MANIFEST).is_file()
        ]
        return sorted(found, reverse=True)

    def latest(self) -> Path | None:
        """The checkpoint that ``latest`` names, whether or not it is in order; None if there is
        no ``latest``.

        Raises:
            UserError: ``latest`` cannot be read or is not a name.
        """
        pointer = self.path / "latest"
        try:
            name = pointer.read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{pointer}: cannot read it ({error})") from error
        if not _STEP.fullmatch(name):
            raise UserError(f"{pointer}: must hold the name of a checkpoint, such as step_00000100")
        return self.path / name

    def newest(self) -> Path | None:
        """What ``latest`` names. Without it, as after the death of a run that had just saved for
        the first time, the newest complete checkpoint; None if there is none."""
        latest = self.latest()
        if latest is None and (steps := self.steps()):
            return self.of_step(steps[0])
        return latest

    def publish(self, draft: Path, step: int, retention: Retention) -> Path:
        """Make a complete ``draft`` the latest checkpoint; returns its place. May be tried again:
        a draft that is not there any more was renamed by the try before.

        Raises:
            OSError: it could not be done; ``latest`` is right all the same.
        """
        final = self.of_step(step)
        if draft.exists() and final.exists():
            self._set_aside(final, step)
        if not final.exists():
            draft.rename(final)
        sync(self.path)
        sync(self.path.parent)  # the folder itself may be new
        self._point_to(final.name)
        self._remove_old(step, retention)
        return final

    def remove_drafts(self) -> None:
        """Remove what runs that died left behind; what cannot be removed stays."""
        for entry in self.path.glob(f"step_*{_DRAFT}"):
            shutil.rmtree(entry, ignore_errors=True)
        for entry in self.path.glob(f".latest.*{_DRAFT}"):
            entry.unlink(missing_ok=True)

    def _set_aside(self, final: Path, step: int) -> None:
        """Make room: this step was saved before, by a run that then went on from earlier, or whose
        checkpoint is damaged."""
        if self.latest() == final:
            older = [older for older in self.steps() if older < step]
            if older:
                self._point_to(self.of_step(older[0]).name)
            else:
                (self.path / "latest").unlink()
                sync(self.path)
        self._remove(final)

    def _remove_old(self, step: int, retention: Retention) -> None:
        """Newer ones than ``step`` are another run's, which is not to be judged by this one. What
        cannot be removed stays: the new one is complete all the same."""
        for newer, old in enumerate(s for s in self.steps() if s <= step):
            if not retention.keeps(old, newer):
                with suppress(OSError):
                    self._remove(self.of_step(old))

    def _remove(self, path: Path) -> None:
        """Rename, then delete: what is half deleted must not look like a checkpoint."""
        trash = path.with_name(f"{path.name}.old{_DRAFT}")
        shutil.rmtree(trash, ignore_errors=True)
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _point_to(self, name: str) -> None:
        write_text(self.path / "latest", name + "\n", durable=True)


def find_checkpoint(path: Path) -> Path:
    """The folder of the checkpoint that ``path`` stands for.

    Args:
        path: a checkpoint, a folder of checkpoints, or a run's folder, whose training checkpoints
            come before its snapshots.

    Raises:
        UserError: there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    for folder in checkpoint_folders(path):
        newest = folder.newest()
        if newest is not None:
            return newest
    if not path.exists():
        raise UserError(f"{path}: does not exist; give a checkpoint or a run's folder")
    raise UserError(
        f"{path}: holds no checkpoint; give one (a folder with {MANIFEST}), a folder of "
        "checkpoints, or a run's folder"
    )


def checkpoint_folders(path: Path) -> list[CheckpointFolder]:
    """Where checkpoints may be if ``path`` is a folder of checkpoints or of a run."""
    return [CheckpointFolder(path / name) for name in ("", CHECKPOINTS, SNAPSHOTS)]
