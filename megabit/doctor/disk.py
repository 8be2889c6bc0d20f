"""How fast the folder of a run is: large files, as checkpoints are, and small ones.

All hosts write at once, as they do when a checkpoint is saved, and wait until the data would
survive a loss of power. What is read back has just been written: the system is asked to forget it,
but need not, so a rate of reading may be that of its cache.
"""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megabit.doctor.finding import Finding
from megabit.doctor.places import Cluster
from megabit.doctor.ranks import Ranks
from megabit.files import write_text
from megabit.units import speed_text, time_text

CHUNK = 2**20
MAX_S = 5.0
"""After which no more is written, or read."""
SMALL_FILES = 10
SLOW_FILE_S = 0.2
SLOW = 3.0
"""A host is slow that takes so many times as long as the typical one."""


@dataclass(frozen=True)
class Disk:
    """Of one host."""

    rank: int
    written_bytes: int
    write_s: float
    read_bytes: int
    read_s: float
    small_file_s: float
    """Median time to write, sync and rename a file of a few bytes."""
    problem: str | None = None

    @property
    def write_rate(self) -> float:
        """Bytes a second."""
        return self.written_bytes / max(self.write_s, 1e-9)

    @property
    def read_rate(self) -> float:
        """Bytes a second."""
        return self.read_bytes / max(self.read_s, 1e-9)


def measure(ranks: Ranks, folder: Path | None, num_bytes: int) -> list[Disk]:
    """One for each host that can use the folder; collective.

    Args:
        folder: to write to, on this rank.
        num_bytes: of the large file.
    """
    ranks.wait()  # hosts begin together
    disk: Disk | None = None
    if ranks.speaks and folder is not None:
        path = folder / f"large-{ranks.rank}"
        try:
            disk = _measure(ranks.rank, path, num_bytes)
        except OSError as error:
            disk = Disk(ranks.rank, 0, 0, 0, 0, 0, str(error.strerror))
        finally:
            path.unlink(missing_ok=True)
    found = ranks.gather(None if disk is None else asdict(disk))
    return [Disk(**disk) for disk in found if disk is not None]


def _measure(rank: int, path: Path, num_bytes: int) -> Disk:
    chunk = os.urandom(CHUNK)  # what a file system cannot compress
    written, started = 0, time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while written < num_bytes and time.perf_counter() - started < MAX_S:
            written += file.write(chunk)
        os.fsync(file.fileno())
        write_s = time.perf_counter() - started
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read, started = 0, time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while (got := len(file.read(CHUNK))) and time.perf_counter() - started < MAX_S:
            read += got
    read_s = time.perf_counter() - started
    times = []
    for number in range(SMALL_FILES):
        started = time.perf_counter()
        write_text(path.with_name(f"small-{rank}-{number}"), "small", durable=True)
        times.append(time.perf_counter() - started)
        if sum(times) > MAX_S:
            break
    return Disk(rank, written, write_s, read, read_s, statistics.median(times))


def judge(disks: Sequence[Disk], cluster: Cluster) -> Iterator[Finding]:
    """Hosts that cannot write, or are slower than the others; names that take long."""
    for disk in disks:
        if disk.problem is not None:
            yield Finding(
                "wrong",
                "disk",
                f"{cluster.host_of(disk.rank).name}: cannot write there ({disk.problem})",
                "make room, or check quota and mount",
            )
    good = [disk for disk in disks if disk.problem is None]
    if not good:
        return
    typical = statistics.median_high(disk.write_rate for disk in good)
    for disk in good:
        if SLOW * disk.write_rate < typical:
            yield Finding(
                "warning",
                "disk",
                f"{cluster.host_of(disk.rank).name}: writes {speed_text(disk.write_rate)}, typical "
                f"is {speed_text(typical)}",
                "check its mount and its network to the storage",
            )
    slowest = max(good, key=lambda disk: disk.small_file_s)
    if slowest.small_file_s > SLOW_FILE_S:
        yield Finding(
            "warning",
            "disk",
            f"{cluster.host_of(slowest.rank).name}: a small file takes "
            f"{time_text(slowest.small_file_s)} to write",
            "use another file system for run.dir; snapshots and logs write many small files",
        )


def figures(disks: Sequence[Disk], checkpoint_bytes: float) -> Iterator[tuple[str, str]]:
    """All hosts together."""
    good = [disk for disk in disks if disk.problem is None]
    if not good:
        return
    write = sum(disk.write_rate for disk in good)
    read = sum(disk.read_rate for disk in good)
    small = statistics.median(disk.small_file_s for disk in good)
    together = " by all hosts at once" if len(good) > 1 else ""
    yield (
        "disk",
        f"writes {speed_text(write)}{together}, reads {speed_text(read)} (perhaps from memory), "
        f"a small file in {time_text(small)}",
    )
    yield "a checkpoint", f"would take about {time_text(checkpoint_bytes / write)} to write"
