"""Ranks to examine: real ones in forks of this process, or only their places."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from megabit.doctor.places import Cluster, Place
from megabit.doctor.ranks import Ranks
from megabit.launch import run_ranks
from megabit.mesh import Axis
from megabit.reduce import gather_json

T = TypeVar("T")
CPU = torch.device("cpu")


def cluster_of(*ranks_on_hosts: int) -> Cluster:
    """Hosts ``a``, ``b``, … with so many ranks."""
    places: list[Place] = []
    for number, count in enumerate(ranks_on_hosts):
        for local_rank in range(count):
            name = chr(ord("a") + number)
            places.append(Place(len(places), local_rank, count, name, name, 1000, "cpu", {}))
    return Cluster.of(places)


def on_ranks(function: Callable[[Ranks], T], world_size: int, hosts: int = 1) -> list[T]:
    """What ``function`` returns on each of ``world_size`` real ranks; as many on each host, which
    are hosts in name only."""

    def run() -> T:
        world = Axis.single("world")
        if world_size > 1:
            world = Axis("world", world_size, dist.get_rank(), dist.group.WORLD)
        rank = world.rank
        size = world_size // hosts
        place = Place.here(rank, rank % size, size, "cpu", {})
        place = replace(place, hostname=chr(ord("a") + rank // size), machine=str(rank // size))
        places = [Place(**found) for found in gather_json(vars(place), world, CPU)]
        return function(Ranks(world, CPU, Cluster.of(places)))

    return run_ranks(run, world_size, timeout_s=60)
