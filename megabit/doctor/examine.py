"""All checks, one after another, on all ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megabit.config import Config, find_problems
from megabit.config.validate_cluster import islands_in_world
from megabit.doctor import (
    clocks,
    collectives,
    disk,
    gpu,
    interfaces,
    links,
    machine,
    pairs,
    places,
    products,
    software,
    storage,
)
from megabit.doctor.clocks import Clock
from megabit.doctor.collectives import Timing
from megabit.doctor.disk import Disk
from megabit.doctor.finding import Finding
from megabit.doctor.gpu import Gpu
from megabit.doctor.interfaces import Interfaces
from megabit.doctor.links import Links
from megabit.doctor.machine import Machine
from megabit.doctor.pairs import Effort
from megabit.doctor.places import Cluster, Place
from megabit.doctor.products import Products
from megabit.doctor.ranks import Ranks
from megabit.doctor.software import Software
from megabit.doctor.storage import Storage
from megabit.errors import RunError, first_line
from megabit.mesh import Axis
from megabit.model import num_parameters
from megabit.reduce import gather_json

MASTER_AND_MOMENTS = 12
"""Bytes of a weight in a checkpoint: three fp32 numbers."""
GRADIENT = 4
MAX_SUSPECTS = 8
"""Links that are measured once more before they are called slow."""
MAX_PAIR_S = 0.25
TOURNAMENT_S = 60.0
"""That all rounds of hosts take, about, when there are many."""


@dataclass(frozen=True)
class Plan:
    """What is examined, and how thoroughly."""

    config: Config
    has_settings: bool
    """Whether ``config`` is that of a job, not only the defaults."""
    settings: Mapping[str, str]
    """What must be the same on all ranks, by key."""
    folder: Path
    """Where the run will keep its files, absolute."""
    folder_may_be_new: bool
    """Whether what is above it is examined if it does not exist."""
    is_quick: bool

    @property
    def checkpoint_bytes(self) -> float:
        """Of the configured model."""
        return MASTER_AND_MOMENTS * num_parameters(self.config.model)

    def effort(self, rounds: int) -> Effort:
        """For each pair of a tournament of so many rounds."""
        seconds = min(MAX_PAIR_S, TOURNAMENT_S / max(rounds, 1))
        return Effort(seconds / 4, 2**20) if self.is_quick else Effort(seconds, 2**24)

    def rank_bytes(self, world_size: int) -> float:
        """What masters, moments and gradients take on a rank, at least."""
        islands = islands_in_world(self.config.outer)
        return (
            num_parameters(self.config.model)
            * (MASTER_AND_MOMENTS + GRADIENT)
            * islands
            / max(world_size, 1)
        )


@dataclass
class Diagnosis:
    """All that was found; parts that were not reached are empty or None."""

    cluster: Cluster
    findings: list[Finding] = field(default_factory=list)
    software: list[Software] = field(default_factory=list)
    machines: list[Machine] = field(default_factory=list)
    interfaces: list[Interfaces] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    storage: Storage | None = None
    disks: list[Disk] = field(default_factory=list)
    hosts: Links | None = None
    """Links between hosts."""
    locals: list[Links] = field(default_factory=list)
    """Links between the ranks of each host."""
    collectives: list[Timing] = field(default_factory=list)
    products: list[Products] = field(default_factory=list)

    @property
    def is_fine(self) -> bool:
        """Whether nothing is wrong; warnings may be there."""
        return all(finding.severity != "wrong" for finding in self.findings)


def examine(
    world: Axis,
    place: Place,
    device: torch.device,
    plan: Plan,
    environment: Mapping[str, str],
    progress: Callable[[str, float], None] = lambda name, share: None,
) -> Diagnosis:
    """Examine all ranks of ``world``; collective. The same findings on all of them.

    Args:
        place: of this rank.
        progress: is told what is done next, and what share of all is done.

    Raises:
        RunError: another rank is gone; says during which check.
    """
    current = "ranks"

    def begin(name: str, share: float) -> None:
        nonlocal current
        current = name
        progress(name, share)

    try:
        return _examine(world, place, device, plan, environment, begin)
    except RuntimeError as error:  # what torch raises when a peer is gone
        raise RunError(
            f"{current}: another rank is gone, or failed: {first_line(error)}"
        ) from error


def _examine(
    world: Axis,
    place: Place,
    device: torch.device,
    plan: Plan,
    environment: Mapping[str, str],
    begin: Callable[[str, float], None],
) -> Diagnosis:
    begin("ranks", 0)
    on_gpu = device.type == "cuda"
    # Plain text first: what other releases of megabit say of themselves may have other fields.
    own = Software.here(plan.settings)
    releases = gather_json([own.megabit, own.torch, own.python, own.settings], world, device)
    programs = [Software(*release) for release in releases]
    cluster = Cluster.of([Place(**p) for p in gather_json(vars(place), world, device)])
    found = Diagnosis(cluster, software=programs)
    found.findings += software.judge(programs, cluster)
    if len({program.megabit for program in programs}) > 1:
        return found  # their checks may differ
    ranks = Ranks(world, device, cluster)
    # What decides which collectives run is that of the first rank, if they differ.
    is_quick, may_be_new = ranks.gather([plan.is_quick, plan.folder_may_be_new])[0]
    plan = replace(plan, is_quick=is_quick, folder_may_be_new=may_be_new)
    parallel = plan.config.parallel
    found.findings += places.judge(cluster, parallel.tp)
    if plan.has_settings:
        found.findings += [
            Finding("wrong", "settings", problem, "a job with these settings and ranks won't start")
            for problem in find_problems(plan.config, world.size)
        ]

    begin("machines", 0.05)
    found.machines = [Machine(**m) for m in ranks.gather(vars(Machine.here(environment)))]
    needed = plan.rank_bytes(world.size) if plan.has_settings else 0.0
    found.findings += machine.judge(found.machines, cluster, on_gpu, 0.0 if on_gpu else needed)

    begin("interfaces", 0.08)
    found.interfaces = [Interfaces(**i) for i in ranks.gather(vars(Interfaces.here(environment)))]
    found.findings += interfaces.judge(found.interfaces, cluster, on_gpu)

    begin("clocks", 0.1)
    found.clocks = clocks.measure(ranks)
    found.findings += clocks.judge(found.clocks, cluster)

    _examine_storage(found, ranks, plan, begin)

    begin("network", 0.3)
    _examine_network(found, ranks, plan, lambda share: begin("network", 0.3 + 0.4 * share))

    begin("collectives", 0.7)
    slowest = found.hosts or next(iter(found.locals), None)
    found.collectives = collectives.measure(ranks, slowest, 2**20 if plan.is_quick else 2**24)
    found.findings += collectives.judge(found.collectives, cluster)

    begin("products", 0.9)
    found.products = products.measure(ranks, 0.2 if plan.is_quick else 1.0)
    found.findings += products.judge(found.products, cluster)

    notes: list[str] = []
    found.gpus = [Gpu(**g) for g in ranks.gather(vars(Gpu.here(device, notes.append)))]
    for rank, said in enumerate(ranks.gather(notes)):
        found.findings += [Finding("note", "GPU", f"{cluster.name(rank)}: {note}") for note in said]
    found.findings += gpu.judge(found.gpus, cluster, needed)
    begin("done", 1)
    return found


def _examine_storage(
    found: Diagnosis, ranks: Ranks, plan: Plan, begin: Callable[[str, float], None]
) -> None:
    begin("storage", 0.12)
    folder = storage.existing(ranks, plan.folder) if plan.folder_may_be_new else plan.folder
    with storage.examined(ranks, folder) as (seen, scratch):
        found.storage = seen
        found.findings += storage.judge(found.storage, ranks.cluster, plan.checkpoint_bytes)
        begin("disk", 0.2)
        num_bytes = 2**23 if plan.is_quick else 2**26
        if found.storage.free_bytes is not None:
            num_bytes = min(num_bytes, found.storage.free_bytes // 10)
        found.disks = disk.measure(ranks, scratch, num_bytes)
        found.findings += disk.judge(found.disks, ranks.cluster)


def _examine_network(
    found: Diagnosis, ranks: Ranks, plan: Plan, progress: Callable[[float], None]
) -> None:
    """Hosts among themselves, one rank of each; then each host's ranks among themselves."""
    hosts = ranks.cluster.hosts
    tournaments = [("hosts", [[host.speaker for host in hosts]])]
    tournaments += [("ranks", [list(host.ranks) for host in hosts])]
    for number, (between, clubs) in enumerate(tournaments):

        def of_both(share: float, done: int = number) -> None:
            progress((done + share) / 2)

        effort = plan.effort(max(map(len, clubs)))
        met = pairs.measure(ranks, clubs, effort, of_both)
        for club in map(set, clubs):
            own = Links(between, [pair for pair in met if pair.first in club])
            if not own.pairs:
                continue
            suspects = list(dict.fromkeys(own.slow() + own.late()))[:MAX_SUSPECTS]
            own = own.corrected(pairs.measure_again(ranks, suspects, effort))
            found.findings += links.judge(own, ranks.cluster)
            if between == "hosts":
                found.hosts = own
            else:
                found.locals.append(own)
