"""Find out together: what one rank sees of a checkpoint is known to all, or refused by all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megabit.checkpoint.manifest import MANIFEST, DamagedCheckpoint, Manifest
from megabit.checkpoint.verify import check_file, check_names, check_tensors
from megabit.errors import RunError, UserError
from megabit.mesh import ParallelMesh
from megabit.reduce import any_rank, first_problem
from megabit.retry import Retry

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def assets(self) -> dict[str, Path]:
        """What travels with the model, by name."""
        return self.manifest.assets(self.path)


def verified(
    path: Path, mesh: ParallelMesh, step: int | None = None, retry: Retry | None = None
) -> Checkpoint:
    """The checkpoint in ``path``, after each of its files was hashed by one of the ranks;
    collective over the mesh.

    Args:
        step: of which it must be.
        retry: how reads are tried again.

    Raises:
        DamagedCheckpoint: it is not what was saved.
        UserError: it is of another version.
    """

    def check_files() -> Manifest:
        manifest = Manifest.read(path)
        if step is not None and manifest.step != step:
            raise DamagedCheckpoint(f"{path / MANIFEST}: is of step {manifest.step}")
        check_names(path, manifest)
        for name, expected in list(manifest.files.items())[mesh.world.rank :: mesh.world.size]:
            check_file(path, name, expected)
        return manifest

    retry = retry or Retry()
    manifest = on_all_ranks(lambda: retry(check_files, f"reading {path}"), mesh)
    # Then only: what is wrong with the tensors of a damaged file is not what went wrong.
    on_all_ranks(lambda: check_tensors(path, manifest) if mesh.is_main else None, mesh)
    return Checkpoint(path, manifest)


def on_all_ranks(look: Callable[[], T], mesh: ParallelMesh) -> T:
    """What ``look`` returns on this rank; if it refuses something on any, all refuse it.

    Raises:
        RunError: on the other ranks, where it failed on one in a way that is no refusal.
    """
    problem: Exception | None = None
    try:
        found = look()
    except Exception as error:
        problem = error
    is_refusal = isinstance(problem, UserError)
    has_failed = any_rank(problem is not None and not is_refusal, mesh.world, mesh.device)
    is_damaged = any_rank(isinstance(problem, DamagedCheckpoint), mesh.world, mesh.device)
    text = None if problem is None else str(problem) or repr(problem)
    text = first_problem(text, mesh.world, mesh.device)
    if text is None:
        return found
    if has_failed:
        if problem is not None and not is_refusal:
            raise problem
        raise RunError(f"another rank has failed: {text}")
    raise (DamagedCheckpoint if is_damaged else UserError)(*text.splitlines())
