"""A host's processors, memory and limits, as one rank sees them.

In a container the machine's own figures are not what counts: what a cgroup allows is taken into
account, for processors (``cpu.max``) and for memory (``memory.max``).
"""

import os
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megabit.data.memory import CGROUP, available_bytes
from megabit.doctor.finding import Finding
from megabit.doctor.places import Cluster
from megabit.units import size_text
from megabit_kernels import native

SHARED_MEMORY = Path("/dev/shm")
SOCKETS_OF_GROUPS = 8
"""A rank has a connection to each member of each of its process groups, of which there are about
so many."""
OTHER_FILES = 256
SMALL_SHARED_MEMORY = 2**30
"""NCCL connects the ranks of a host through it; containers have 64 MiB unless told otherwise."""


@dataclass(frozen=True)
class Machine:
    """What a rank may use of its host."""

    cores: int
    allowed: list[int]
    """Numbers of those that the rank may run on."""
    quota: float | None
    """Cores' worth of time that the container has; None: no limit."""
    threads: int
    """That torch computes with."""
    omp_threads: str | None
    """``OMP_NUM_THREADS``"""
    isa: str
    """Instruction set of the native kernels; empty where there are none."""
    memory_bytes: int
    free_bytes: int
    shared_memory_bytes: int | None
    open_files: int

    @staticmethod
    def here(environment: Mapping[str, str]) -> "Machine":
        """Of this process."""
        total, free = _memory()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return Machine(
            cores=os.cpu_count() or 1,
            allowed=_allowed(),
            quota=_quota(),
            threads=torch.get_num_threads(),
            omp_threads=environment.get("OMP_NUM_THREADS"),
            isa=next(iter(native.isas()), ""),
            memory_bytes=total,
            free_bytes=free,
            shared_memory_bytes=(
                shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None
            ),
            open_files=soft if soft != resource.RLIM_INFINITY else 2**31,
        )

    @property
    def usable(self) -> float:
        """Cores' worth of time."""
        return min(len(self.allowed), self.quota or len(self.allowed))


def judge(
    everyone: Sequence[Machine], cluster: Cluster, on_gpu: bool, needed_bytes: float = 0
) -> Iterator[Finding]:
    """What is too little, or makes ranks disturb each other.

    Args:
        needed_bytes: what a rank's weights and moments take in its host's memory, at least.
    """
    for host in cluster.hosts:
        here = [everyone[rank] for rank in host.ranks]
        yield from _processors(host.name, here)
        if needed_bytes * len(here) > here[0].free_bytes:
            yield Finding(
                "wrong",
                "memory",
                f"{host.name}: weights and moments of its ranks take "
                f"{size_text(needed_bytes * len(here))}, but {size_text(here[0].free_bytes)} are "
                "free",
                "use more hosts, tp or pp, or a smaller model",
            )
        shared = here[0].shared_memory_bytes
        if on_gpu and len(here) > 1 and shared is not None and shared < SMALL_SHARED_MEMORY:
            yield Finding(
                "warning",
                "memory",
                f"{host.name}: {SHARED_MEMORY} has {size_text(shared)}, which may be too little "
                "for NCCL between the ranks of a host",
                "start the container with --shm-size=1g or --ipc=host",
            )
    needed_files = SOCKETS_OF_GROUPS * len(everyone) + OTHER_FILES
    short = [rank for rank, machine in enumerate(everyone) if machine.open_files < needed_files]
    if short:
        yield Finding(
            "wrong",
            "limits",
            f"{cluster.names(short)}: a process may have {everyone[short[0]].open_files} open "
            f"files, but {len(everyone)} ranks take about {needed_files}",
            f"raise it: ulimit -n {2 * needed_files}",
        )
    yield from _kernels(everyone, cluster, on_gpu)


def _processors(host: str, here: Sequence[Machine]) -> Iterator[Finding]:
    usable = float(len({core for machine in here for core in machine.allowed}))
    if here[0].quota is not None:
        usable = min(usable, here[0].quota)
    threads = sum(machine.threads for machine in here)
    if len(here) > usable:
        yield Finding(
            "warning",
            "processors",
            f"{host}: {len(here)} ranks share {usable:g} of {here[0].cores} cores",
            "start no more ranks than cores, or let the launcher bind to none",
        )
    elif threads > usable:
        yield Finding(
            "warning",
            "processors",
            f"{host}: {len(here)} ranks compute with {threads} threads in all, on {usable:g} cores",
            f"set OMP_NUM_THREADS={max(1, int(usable) // len(here))}",
        )
    for local_rank, machine in enumerate(here):
        if machine.threads > len(machine.allowed):
            yield Finding(
                "warning",
                "processors",
                f"{host}: its rank number {local_rank} has {machine.threads} threads, but is bound "
                f"to {len(machine.allowed)} of {machine.cores} cores",
                f"set OMP_NUM_THREADS={len(machine.allowed)}, or let the launcher bind it to more",
            )


def _kernels(everyone: Sequence[Machine], cluster: Cluster, on_gpu: bool) -> Iterator[Finding]:
    if on_gpu:
        return
    without = [rank for rank, machine in enumerate(everyone) if not machine.isa]
    if without:
        yield Finding(
            "warning",
            "processors",
            f"{cluster.names(without)}: no native CPU kernels, so products are several times "
            "slower",
            "install gcc or clang, then megabit once more",
        )
    sets = sorted({machine.isa for machine in everyone if machine.isa})
    if len(sets) > 1:
        yield Finding(
            "warning",
            "processors",
            f"ranks have kernels for different processors ({', '.join(sets)}): all wait for the "
            "slowest, and floating-point results may differ in their last bits",
            "use hosts of the same kind",
        )


def _allowed() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _quota(cgroup: Path = CGROUP) -> float | None:
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _memory(cgroup: Path = CGROUP) -> tuple[int, int]:
    """Bytes in all, and free; all of them, where nobody tells."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no limit
        total = min(total, int((cgroup / "memory.max").read_text(encoding="ascii")))
    free = available_bytes(cgroup=cgroup)
    return total, total if free is None else free
