"""Save and load a run's checkpoints, all ranks together.

``save`` copies this rank's tensors and returns; a thread writes the copy, hashes and syncs it. Once
all ranks have agreed that theirs are on disk (``poll``, between two steps), a thread of the main
rank writes the manifest, renames the folder and moves ``latest``. Threads send nothing: every
collective is the training thread's. What fails in passing is tried again where it is read or
written (``retry``); a save that fails is told, and changes nothing else.

The parts that ranks write are disjoint and make up every logical tensor, so that any other layout
can read them (``reader``). Nothing is unpickled.
"""

import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from megabit.checkpoint.assets import copy_assets
from megabit.checkpoint.folder import CheckpointFolder, Retention
from megabit.checkpoint.manifest import DamagedCheckpoint, Manifest
from megabit.checkpoint.tensor_file import LazyTensor, write_tensors
from megabit.checkpoint.together import Checkpoint, on_all_ranks, verified
from megabit.errors import UserError
from megabit.files import FileInfo
from megabit.mesh import ParallelMesh
from megabit.reduce import all_gather, any_rank, broadcast, first_problem
from megabit.retry import Retry


@dataclass(frozen=True)
class Part:
    """A rank's part of a logical tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the logical tensor."""
    offset: tuple[int, ...]
    """Where the part begins in it."""
    values: Tensor


@dataclass(frozen=True)
class Saved:
    """How a save ended."""

    step: int
    path: Path
    problem: str | None
    """Why it is not there; the previous one stands."""
    bytes: int
    """Of all ranks."""
    blocked_s: float
    """That the training thread has spent on it."""
    total_s: float
    """Until it was durable."""


@dataclass
class _Save:
    """A save that was begun and not yet finished, on all ranks alike but for ``publishing``."""

    manifest: Manifest
    draft: Path
    assets: Mapping[str, Path]
    started: float
    writing: Future[FileInfo]
    blocked_s: float
    bytes: int = 0
    has_been_written: bool = False
    """On all ranks, or one has failed to."""
    publishing: Future[Path] | None = None
    """On the main rank, once all have written."""
    problem: str | None = None
    is_told: bool = False
    """Whether ``poll`` has said how it ended."""

    @property
    def is_over(self) -> bool:
        """As far as this rank knows."""
        has_been_published = self.publishing is not None and self.publishing.done()
        return self.has_been_written and (self.problem is not None or has_been_published)


class CheckpointStore:
    """The checkpoints of one run. On several hosts, ``folder`` must be one they share.

    Every method but ``close`` is collective over the whole mesh.

    Args:
        retry: how reads and writes are tried again.
    """

    def __init__(
        self,
        folder: Path,
        mesh: ParallelMesh,
        retention: Retention | None = None,
        retry: Retry | None = None,
    ) -> None:
        self.folder = CheckpointFolder(folder)
        self.mesh = mesh
        self.durable_step = -1
        """Of the newest checkpoint that this store has finished to save or has found."""
        self.retry = retry or Retry()
        self._retention = retention or Retention()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._save: _Save | None = None
        run = torch.tensor(secrets.randbits(32), device=mesh.device)
        self._run = f"{int(broadcast(run, 0, mesh.world)):08x}"
        self._attempts = count()

    def save(
        self, manifest: Manifest, parts: Sequence[Part], assets: Mapping[str, Path]
    ) -> Saved | None:
        """Begin to save; ``parts`` may change as soon as this returns.

        Waits for a save that is still under way, and returns how that one ended.

        Args:
            manifest: without ``files``.
            parts: this rank's, at most one of each tensor.
            assets: small files that travel with the model, by name; the main rank copies them.
        """
        before = self.finish()
        started = time.perf_counter()
        # A name of its own: the draft of a save that failed may still be in removal.
        draft = self.folder.draft(manifest.step, f"{self._run}-{next(self._attempts)}")
        own_file = draft / rank_file(self.mesh.world.rank)
        writing: Future[FileInfo] = Future()
        try:
            copied = [_copied(part) for part in parts]
            writing = self._thread.submit(
                self.retry, partial(_write, own_file, copied), f"writing {own_file}"
            )
        except Exception as error:  # no memory for the copy: told like a full disk
            writing.set_exception(error)
        self._save = _Save(
            manifest,
            draft,
            assets,
            started,
            writing,
            blocked_s=time.perf_counter() - started,
        )
        return before

    def poll(self) -> Saved | None:
        """Go on with what is under way, without waiting for the disk.

        Returns how a save has ended, once. That it is durable only the main rank learns here.
        """
        save = self._save
        if save is None or save.is_told:
            return None
        if not save.has_been_written:
            if any_rank(not save.writing.done(), self.mesh.world, self.mesh.device):
                return None
            self._end_writing(save)
        return self._tell(save) if save.is_over else None

    def finish(self) -> Saved | None:
        """Wait until nothing is under way; returns how it ended unless ``poll`` has told it."""
        save, self._save = self._save, None
        if save is None:
            return None
        started = time.perf_counter()
        if not save.has_been_written:
            self._end_writing(save)
        if save.publishing is not None:
            save.publishing.exception()  # waits
        ended = None if save.is_told else self._tell(save)
        save.problem = first_problem(save.problem, self.mesh.world, self.mesh.device)
        if save.problem is None:
            self.durable_step = save.manifest.step
        if ended is None:
            return None
        blocked_s = ended.blocked_s + time.perf_counter() - started
        return replace(ended, problem=save.problem, blocked_s=blocked_s)

    def find(self, falls_back: bool, alert: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint, after a check of all of it; None if there is none.

        Args:
            falls_back: take the one before if it is damaged, and so on.
            alert: told what is damaged, then.

        Raises:
            DamagedCheckpoint: it is not what was saved, or none is.
            UserError: it is of another version, or hosts do not see the same one.
        """
        step = self._agree_on_step(partial(self._newest_step, falls_back, alert))
        while step >= 0:
            try:
                checkpoint = verified(self.folder.of_step(step), self.mesh, step, self.retry)
            except DamagedCheckpoint as error:
                if not falls_back:
                    raise DamagedCheckpoint(
                        *error.problems[:-1],
                        f"{error.problems[-1]}; --auto-fallback goes on from the checkpoint before",
                    ) from error
                for problem in error.problems:
                    alert(problem)
                step = self._agree_on_step(partial(self._newest_before, step))
                if step < 0:
                    raise DamagedCheckpoint(
                        f"{self.folder.path}: no checkpoint is in order; use another run.dir"
                    ) from error
            else:
                self.durable_step = step
                return checkpoint
        return None

    def clean(self) -> None:
        """Remove what runs that died have left in the folder."""
        if self.mesh.is_main:
            self.folder.remove_drafts()
        any_rank(False, self.mesh.world, self.mesh.device)  # no rank saves meanwhile

    def close(self) -> None:
        """Wait for this rank's thread; a save that is not finished may be lost."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _end_writing(self, save: _Save) -> None:
        """Learn how all ranks' writing ended, and let the main rank publish."""
        problem = None
        try:
            own = save.writing.result()
        except Exception as error:  # whatever it is, it must not stop a run
            own = FileInfo(0, "")
            problem = f"{save.draft / rank_file(self.mesh.world.rank)}: cannot write it ({error})"
        save.problem = first_problem(problem, self.mesh.world, self.mesh.device)
        save.has_been_written = True
        if save.problem is None:
            files = self._gather(own)
            save.bytes = sum(file.bytes for file in files.values())
            if self.mesh.is_main:
                save.publishing = self._thread.submit(self._publish, save, files)
        elif self.mesh.is_main:
            self._thread.submit(shutil.rmtree, save.draft, ignore_errors=True)

    def _publish(self, save: _Save, files: Mapping[str, FileInfo]) -> Path:
        """On the main rank's thread."""

        def complete() -> None:
            for name, info in files.items():
                path = save.draft / name
                if not path.is_file() or path.stat().st_size != info.bytes:
                    raise OSError(f"{path} is not here; run.dir must be on disks that hosts share")
            copied = copy_assets(save.assets, save.draft)
            replace(save.manifest, files={**files, **copied}).write(save.draft)

        def publish() -> Path:
            return self.folder.publish(save.draft, save.manifest.step, self._retention)

        try:
            self.retry(complete, f"writing {save.draft}")
            return self.retry(publish, f"publishing {self.folder.of_step(save.manifest.step)}")
        except BaseException:
            shutil.rmtree(save.draft, ignore_errors=True)
            raise

    def _tell(self, save: _Save) -> Saved:
        """How ``save``, which is over, ended."""
        save.is_told = True
        path = self.folder.of_step(save.manifest.step)
        error = None if save.publishing is None else save.publishing.exception()
        if error is not None:
            save.problem = f"{path}: cannot complete it ({error})"
        total_s = time.perf_counter() - save.started
        return Saved(save.manifest.step, path, save.problem, save.bytes, save.blocked_s, total_s)

    def _gather(self, own: FileInfo) -> dict[str, FileInfo]:
        """The files of all ranks."""
        size = torch.tensor([[own.bytes]], device=self.mesh.device)
        digest = torch.frombuffer(bytearray.fromhex(own.sha256), dtype=torch.uint8).unsqueeze(0)
        sizes = all_gather(size, self.mesh.world).flatten().tolist()
        digests = all_gather(digest.to(self.mesh.device), self.mesh.world).tolist()
        infos = [FileInfo(b, bytes(d).hex()) for b, d in zip(sizes, digests, strict=True)]
        return {rank_file(rank): info for rank, info in enumerate(infos)}

    def _newest_step(self, falls_back: bool, alert: Callable[[str], None]) -> int:
        """The step to load, or -1. A ``latest`` that cannot be read is passed over if the run may
        fall back."""
        try:
            newest = self.folder.newest()
        except UserError as error:
            if not falls_back:
                raise
            alert(str(error))
            return next(iter(self.folder.steps()), -1)
        return -1 if newest is None else int(newest.name.removeprefix("step_"))

    def _newest_before(self, step: int) -> int:
        return next((older for older in self.folder.steps() if older < step), -1)

    def _agree_on_step(self, look: Callable[[], int]) -> int:
        """The step that ``look`` finds on this host, if it is the same on all."""
        step = on_all_ranks(look, self.mesh)
        steps = all_gather(torch.tensor([step], device=self.mesh.device), self.mesh.world)
        if (steps != steps[0]).any():
            raise UserError(
                f"run.dir: hosts see different checkpoints in {self.folder.path}; "
                "it must be a folder that all of them share"
            )
        return step


def rank_file(rank: int) -> str:
    """Name of the file with a rank's parts."""
    return f"rank_{rank:05d}.safetensors"


def _copied(part: Part) -> LazyTensor:
    """With values that training does not change."""
    values = part.values.detach().to("cpu", copy=True).contiguous()
    return LazyTensor.of(part.name, values, part.offset)


def _write(path: Path, tensors: Sequence[LazyTensor]) -> FileInfo:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a try that failed
    return write_tensors(path, tensors)
