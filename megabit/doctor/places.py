"""Where ranks are: which host, which process, which device, and whether that makes sense.

A *host* is where ranks see the same network interfaces: a machine, a container, a network
namespace. Launchers' numbers (``LOCAL_RANK``, SLURM's, MPI's) are compared with it.
"""

import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from megabit.doctor.finding import Finding
from megabit.units import counted

LAUNCHERS = ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables that say how many processes, or hosts, a job has."""


@dataclass(frozen=True)
class Place:
    """Where one rank is."""

    rank: int
    local_rank: int
    local_world_size: int | None
    """Ranks on this host, if the launcher says it (``LOCAL_WORLD_SIZE``)."""
    hostname: str
    machine: str
    """The same for all that see the same interfaces, whatever they are called."""
    pid: int
    device: str
    launcher: dict[str, str]
    """Those of ``LAUNCHERS`` that are set."""

    @staticmethod
    def here(
        rank: int,
        local_rank: int,
        local_world_size: int,
        device: str,
        environment: Mapping[str, str],
    ) -> "Place":
        """Of this process."""
        return Place(
            rank,
            local_rank,
            local_world_size if "LOCAL_WORLD_SIZE" in environment else None,
            socket.gethostname(),
            _machine(),
            os.getpid(),
            device,
            {name: environment[name] for name in LAUNCHERS if name in environment},
        )


@dataclass(frozen=True)
class Host:
    """Ranks that are together."""

    name: str
    ranks: tuple[int, ...]

    @property
    def speaker(self) -> int:
        """The rank that acts for the host where one is enough."""
        return self.ranks[0]


@dataclass(frozen=True)
class Cluster:
    """All ranks and their hosts."""

    places: Sequence[Place]
    """In the order of ranks."""
    hosts: Sequence[Host] = field(default_factory=list)

    @staticmethod
    def of(places: Sequence[Place]) -> "Cluster":
        """Hosts in the order of their first ranks; those of the same name are numbered."""
        together: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for place in places:
            together[place.hostname, place.machine].append(place.rank)
        names = [name for name, _ in together]
        return Cluster(
            places,
            [
                Host(name if names.count(name) == 1 else f"{name}[{number}]", tuple(ranks))
                for number, ((name, _), ranks) in enumerate(together.items())
            ],
        )

    @cached_property
    def _host_of(self) -> dict[int, Host]:
        return {rank: host for host in self.hosts for rank in host.ranks}

    def host_of(self, rank: int) -> Host:
        """The one that ``rank`` is on."""
        return self._host_of[rank]

    def name(self, rank: int) -> str:
        """``rank 3 on node07``; of a host with one rank, the host."""
        host = self.host_of(rank)
        if len(self.hosts) == 1:
            return f"rank {rank}"
        return host.name if len(host.ranks) == 1 else f"rank {rank} on {host.name}"

    def names(self, ranks: Sequence[int]) -> str:
        """Hosts if they are there whole, else ranks: ``node03, node07``, ``ranks 0–3, 5``."""
        hosts = list(dict.fromkeys(self.host_of(rank).name for rank in ranks))
        whole = {rank for host in self.hosts if host.name in hosts for rank in host.ranks}
        if len(self.hosts) > 1 and whole == set(ranks):
            return ", ".join(hosts)
        where = f" on {', '.join(hosts)}" if len(self.hosts) > 1 else ""
        return f"rank{'s' * (len(ranks) > 1)} {_runs(ranks)}{where}"


def judge(cluster: Cluster, tp: int = 1) -> Iterator[Finding]:
    """What does not fit together.

    Args:
        tp: neighbouring ranks that talk the most, and so should share a host.
    """
    places, hosts = cluster.places, cluster.hosts
    for host in hosts:
        here = [places[rank] for rank in host.ranks]
        said = {p.local_world_size for p in here if p.local_world_size is not None}
        if said - {len(here)}:
            yield Finding(
                "warning",
                "ranks",
                f"{host.name} has {len(here)} ranks, but LOCAL_WORLD_SIZE says "
                f"{_listed(said)} there",
                "start one launcher on each host, with all of its ranks",
            )
        devices = [place.device for place in here if place.device != "cpu"]
        shared = {device for device in devices if devices.count(device) > 1}
        if shared:
            yield Finding(
                "wrong",
                "ranks",
                f"several ranks of {host.name} are on {_listed(shared)}",
                "give each rank a GPU of its own: LOCAL_RANK must differ on a host",
            )
        if any(later != earlier + 1 for earlier, later in pairwise(host.ranks)):
            yield Finding(
                "warning",
                "ranks",
                f"ranks {_runs(host.ranks)} of {host.name} are not consecutive, so groups that "
                "should be within a host span several",
                "have the launcher fill one host after the other (mpirun --map-by slot, srun "
                "--distribution=block)",
            )
    sizes = {len(host.ranks) for host in hosts}
    if len(sizes) > 1:
        yield Finding(
            "warning",
            "ranks",
            "hosts have different numbers of ranks: "
            + ", ".join(f"{host.name} {len(host.ranks)}" for host in hosts),
            "start the same number on each host, else the others wait for the one with the most "
            "to do",
        )
    if len(hosts) > 1 and any(size % tp for size in sizes):
        yield Finding(
            "warning",
            "ranks",
            f"parallel.tp={tp} does not divide the {_listed(sizes)} ranks of a host, so a tensor-"
            "parallel group spans hosts and sends every layer's activations between them",
            "use a tp that divides them",
        )
    yield from _launchers(cluster)


def _launchers(cluster: Cluster) -> Iterator[Finding]:
    world, hosts = len(cluster.places), len(cluster.hosts)
    for name in LAUNCHERS:
        said = {p.launcher[name] for p in cluster.places if name in p.launcher}
        # One process for each rank, or one for each host that starts its ranks.
        good = {str(hosts)} if name == "SLURM_JOB_NUM_NODES" else {str(world), str(hosts)}
        if said - good:
            yield Finding(
                "warning",
                "ranks",
                f"{name} is {_listed(said)}, but there are {world} ranks on "
                f"{counted(hosts, 'host')}",
                "start the doctor on all that the scheduler has given, as the job will be",
            )


def _machine() -> str:
    """Kernel and network namespace, where there are such; else nothing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""


def _runs(ranks: Sequence[int]) -> str:
    """``0–3, 5``"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _listed(values: set[str] | set[int]) -> str:
    return " and ".join(sorted(map(str, values)))
