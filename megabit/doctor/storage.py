"""Whether the folder of a run is the same one on all ranks, and does what checkpoints need.

The first rank makes a folder of its own in it, which is gone at the end, and writes a random token
there; every rank looks for it. Then each host writes and renames there, which the first rank reads;
and while the first rank holds a lock, each host tries to take it.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megabit.doctor.finding import Finding
from megabit.doctor.places import Cluster
from megabit.doctor.ranks import Ranks
from megabit.files import sync, write_text
from megabit.units import size_text, time_text

PATIENCE_S = 3.0
"""How long a rank looks for what another host has just written: network file systems remember for
a while that a file was not there."""
LATE_S = 1.0
TOKEN = "token"


@dataclass(frozen=True)
class Storage:
    """What ranks have seen of the folder, in the order of ranks."""

    folder: str
    """As the first rank has it."""
    problems: list[str | None]
    """Why a rank cannot use it."""
    free_bytes: int | None
    """On the first rank."""
    seen_after_s: list[float | None] = field(default_factory=list)
    """When a rank has found the token; None: it has not."""
    renames: dict[int, str] = field(default_factory=dict)
    """By the first rank of a host that could not replace a file there: why."""
    locks: dict[int, str] = field(default_factory=dict)
    """What a host got instead of "it is locked"."""


@contextmanager
def examined(ranks: Ranks, folder: Path) -> Iterator[tuple[Storage, Path | None]]:
    """What there is to say, and a folder for more files for the length of the block; None where
    this rank cannot use it. Collective."""
    problems = ranks.gather(_problem(folder))
    scratch = folder / f".doctor-{secrets.token_hex(8)}"
    token = secrets.token_hex(16)
    is_main = ranks.rank == 0
    try:
        if is_main and problems[0] is None:
            try:
                scratch.mkdir()
                write_text(scratch / TOKEN, token, durable=True)
            except OSError as error:
                problems[0] = f"{folder} cannot be written ({error.strerror})"
        # Those of the first rank count.
        shown, name, token, problems[0], free = ranks.gather(
            [str(folder), scratch.name, token, problems[0], _free_bytes(folder)]
        )[0]
        scratch = folder / name
        if problems[0] is not None:
            yield Storage(shown, problems, free), None
            return
        own = None if problems[ranks.rank] else _look_for(scratch / TOKEN, token)
        seen = ranks.gather(own)
        usable = own is not None
        renames = _renames(ranks, scratch, usable)
        locks = _locks(ranks, scratch, usable)
        yield (
            Storage(shown, problems, free, seen, renames, locks),
            scratch if usable else None,
        )
        ranks.wait()  # before what others may still use is taken away
    finally:
        if is_main:
            shutil.rmtree(scratch, ignore_errors=True)


def judge(
    storage: Storage, cluster: Cluster, checkpoint_bytes: float, copies: int = 2
) -> Iterator[Finding]:
    """What would break a run's checkpoints.

    Args:
        checkpoint_bytes: of the configured model.
        copies: that are on disk at once: a new one is written before an old one goes.
    """
    by_problem: dict[str, list[int]] = {}
    for rank, problem in enumerate(storage.problems):
        if problem is not None:
            by_problem.setdefault(problem, []).append(rank)
    for problem, found in by_problem.items():
        yield Finding(
            "wrong",
            "storage",
            f"{cluster.names(found)}: {problem}",
            "mount the same shared folder on every host, writable for the user of the job",
        )
    yield from _other_folder(storage, cluster)
    for rank, why in storage.renames.items():
        yield Finding(
            "wrong",
            "storage",
            f"{cluster.name(rank)}: a file in {storage.folder} cannot be replaced by another "
            f"one ({why})",
            "use a file system with POSIX renames; checkpoints rely on them",
        )
    for rank, why in storage.locks.items():
        yield Finding(
            "warning",
            "storage",
            f"{cluster.name(rank)}: locks in {storage.folder} do not work ({why}), so two runs in "
            "one folder would not notice each other",
            "mount it with locks (NFS: version 4, or without nolock; Lustre: -o flock)",
        )
    free = storage.free_bytes
    if free is not None and free < copies * checkpoint_bytes:
        holds = int(free / checkpoint_bytes)
        yield Finding(
            "warning" if holds else "wrong",
            "storage",
            f"{storage.folder}: {size_text(free)} are free, a checkpoint takes "
            f"{size_text(checkpoint_bytes)}, and {copies} of them are there at a time",
            "make room, or name another run.dir",
        )


def _other_folder(storage: Storage, cluster: Cluster) -> Iterator[Finding]:
    blind = [
        rank
        for rank, (seen, problem) in enumerate(
            zip(storage.seen_after_s, storage.problems, strict=False)
        )
        if seen is None and problem is None
    ]
    if blind:
        yield Finding(
            "wrong",
            "storage",
            f"{cluster.names(blind)}: has another folder than rank 0 in the place of "
            f"{storage.folder}: a file that rank 0 has written is not there after "
            f"{time_text(PATIENCE_S)}",
            "mount the same shared folder there, and give all ranks the same path",
        )
    late = [
        rank for rank, seen in enumerate(storage.seen_after_s) if seen is not None and seen > LATE_S
    ]
    if late:
        worst = max(storage.seen_after_s[rank] or 0 for rank in late)
        yield Finding(
            "warning",
            "storage",
            f"{cluster.names(late)}: new files of other hosts appear after {time_text(worst)}",
            "shorten the file system's cache of names (NFS: lookupcache=positive)",
        )


def figures(storage: Storage, checkpoint_bytes: float) -> Iterator[tuple[str, str]]:
    """The folder and its room."""
    if storage.free_bytes is not None:
        yield (
            "storage",
            f"{storage.folder}: {size_text(storage.free_bytes)} free, "
            f"a checkpoint takes {size_text(checkpoint_bytes)}",
        )


def existing(ranks: Ranks, folder: Path) -> Path:
    """``folder``, absolute, or the nearest above it that exists on the first rank; collective."""
    paths = [folder, *folder.parents]
    number = next(number for number, path in enumerate(paths) if path.exists())
    return paths[min(ranks.gather(number)[0], len(paths) - 1)]


def _problem(folder: Path) -> str | None:
    if not folder.exists():
        return f"{folder} does not exist"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is not writable"
    return None


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _look_for(path: Path, token: str) -> float | None:
    started = time.monotonic()
    while (waited := time.monotonic() - started) < PATIENCE_S:
        with suppress(OSError):
            if path.read_text(encoding="ascii") == token:
                return waited
        time.sleep(0.05)
    return None


def _renames(ranks: Ranks, scratch: Path, usable: bool) -> dict[int, str]:
    """Each host replaces a file by another one, which the first rank then reads."""
    problem: str | None = None
    path = scratch / f"replaced-{ranks.rank}"
    if ranks.speaks and usable:
        try:
            path.write_text("old", encoding="ascii")
            write_text(path, f"new {ranks.rank}", durable=True)
            sync(path)
        except OSError as error:
            problem = str(error.strerror)
    problems = ranks.gather([ranks.speaks and usable, problem])
    unseen: list[int] = []
    if ranks.rank == 0:
        for rank, (wrote, failed) in enumerate(problems):
            other = scratch / f"replaced-{rank}"
            if wrote and not failed and _look_for(other, f"new {rank}") is None:
                unseen.append(rank)
    found = {rank: failed for rank, (_, failed) in enumerate(problems) if failed}
    return found | dict.fromkeys(ranks.gather(unseen)[0], "rank 0 still reads the old one")


def _locks(ranks: Ranks, scratch: Path, usable: bool) -> dict[int, str]:
    """While the first rank holds a lock, the hosts try to take it."""
    problem: str | None = None
    with ExitStack() as open_files:
        try:
            if usable and ranks.speaks:
                file = open_files.enter_context((scratch / TOKEN).open("r"))
            if ranks.rank == 0:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = str(error.strerror)
        ranks.wait()
        if usable and ranks.speaks and ranks.rank != 0 and problem is None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                problem = "another host takes one that is taken"
            except BlockingIOError:
                pass  # as it should be
            except OSError as error:
                problem = str(error.strerror)
        found: Sequence[str | None] = ranks.gather(problem)
    return {rank: why for rank, why in enumerate(found) if why}
