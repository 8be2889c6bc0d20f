"""What messages take between the ranks of this host, measured: α and β by kind, for groups of some
sizes, as many groups at a time as there will be.

gloo computes on the host's cores, which ranks share. So a message takes longer where more ranks
send at a time, and each case is measured as it will occur. In training ranks compute between two
messages, never all equally long, and what is sent is no longer in a cache: to wait for the slowest
and to wake up again is most of what a small message costs. So ranks compute between messages here,
too, and what that takes by itself is taken off. Times are those of the wall, medians of many short
runs, and of the slowest rank.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from megabit.launch import run_ranks
from megabit.mesh import Axis
from megabit.plan.fit import non_negative
from megabit.plan.machine import KINDS, AlphaBeta, GroupLink
from megabit.reduce import (
    all_gather,
    all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from megabit.training.memory import peak_bytes
from megabit.training.messages import Kind

LEAST_S = 1e-6
"""Of any message, whatever the clock says."""
CASES = ((2, 1), (2, 2), (4, 1))
"""Ranks of a group, and groups at a time."""


@dataclass(frozen=True)
class LinkEffort:
    """How often things are done."""

    sizes: tuple[int, ...] = (2**10, 2**16, 2**18, 2**20, 2**22)
    """Bytes."""
    runs: int = 20
    """Of each size; larger ones half as often."""
    calls: int = 4
    """In a run."""
    between: int = 2**20
    """fp32 numbers that are added up before each message: a millisecond or so."""


def measure_links(
    effort: LinkEffort, progress: Callable[[float], None], cases: Sequence[tuple[int, int]] = CASES
) -> tuple[list[GroupLink], int]:
    """Links of all ``cases``, and the most memory that a rank had before any message."""
    links, base = [], 0
    for number, (ranks, groups) in enumerate(cases):
        progress(number / len(cases))
        found = run_ranks(partial(_measure, ranks, groups, effort), ranks * groups)
        base = max(base, *(memory for _, memory in found))
        for kind in KINDS:
            # All ranks have agreed on the slowest.
            seconds = found[0][0][kind]
            links.append(_fitted(kind, ranks, groups, effort.sizes, seconds))
    return links, base


def _fitted(
    kind: Kind, ranks: int, groups: int, sizes: Sequence[int], seconds: Sequence[float]
) -> GroupLink:
    """The α and β of a ring (``collectives.ring_s``) that come nearest."""
    trips = 2 if kind == "all_reduce" else 1
    steps = 1.0 if kind == "send" else float(trips * (ranks - 1))
    rows = [[steps, size * (steps / ranks if kind != "send" else 1.0)] for size in sizes]
    # By relative differences: large messages would count for everything else.
    relative = [[a / y, b / y] for (a, b), y in zip(rows, seconds, strict=True)]
    alpha, per_byte = non_negative(relative, [1.0] * len(rows))
    found = [a * alpha + b * per_byte for a, b in rows]
    error = max(abs(x / y - 1) for x, y in zip(found, seconds, strict=True))
    return GroupLink(kind, ranks, groups, AlphaBeta(alpha, 1 / max(per_byte, 1e-15)), error)


def _measure(ranks: int, groups: int, effort: LinkEffort) -> tuple[dict[Kind, list[float]], int]:
    """On one rank: seconds by kind and size, of the slowest rank."""
    world = Axis("world", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    axis = world
    for first in range(0, ranks * groups, ranks):
        members = [*range(first, first + ranks)]
        group = dist.new_group(members)
        if world.rank in members:
            axis = Axis("tp", ranks, world.rank - first, group)
    all_reduce(torch.zeros(1), axis)
    memory = peak_bytes(torch.device("cpu"))
    seconds: dict[Kind, list[float]] = {}
    for kind in KINDS:
        own = [_timed(kind, size, axis, world, effort) for size in effort.sizes]
        seconds[kind] = all_reduce(torch.tensor(own, dtype=torch.float64), world, "max").tolist()
    return seconds, memory


def _timed(kind: Kind, size: int, axis: Axis, world: Axis, effort: LinkEffort) -> float:
    """Seconds of a message beside what is computed before it."""
    call, numbers = _call(kind, size, axis), torch.ones(effort.between)
    runs = effort.runs if size <= 2**18 else max(2, effort.runs // 2)

    def run(is_sent: bool) -> float:
        all_reduce(torch.zeros(1), world)
        started = time.perf_counter()
        for _ in range(effort.calls):
            numbers.mul_(1.0)
            if is_sent:
                call()
        return (time.perf_counter() - started) / effort.calls

    run(True)  # connects, and claims memory
    both, computed = zip(*((run(True), run(False)) for _ in range(runs)), strict=True)
    return max(median(both) - median(computed), LEAST_S)


def _call(kind: Kind, size: int, axis: Axis) -> Callable[[], Tensor]:
    """One message of fp32 numbers, ``size`` bytes in all as ``Message.num_bytes`` counts."""
    count = max(axis.size, size // 4 // axis.size * axis.size)
    whole = torch.zeros(count)
    part = torch.zeros(count // axis.size)
    match kind:
        case "all_reduce":
            return lambda: all_reduce(whole, axis)
        case "all_gather":
            return lambda: all_gather(part, axis)
        case "reduce_scatter":
            return lambda: start_reduce_scatter(whole, axis).wait()
        case "all_to_all":
            return lambda: start_all_to_all(whole.view(axis.size, -1), axis).wait()
        case "send":
            return lambda: _round(whole, axis)


def _round(x: Tensor, axis: Axis) -> Tensor:
    """Once round the ring: everybody sends to the next, and waits for what comes."""
    received = torch.empty_like(x)
    following = axis.global_rank((axis.rank + 1) % axis.size)
    before = axis.global_rank((axis.rank - 1) % axis.size)
    works = [
        dist.isend(x, following, group=axis.group),
        dist.irecv(received, before, group=axis.group),
    ]
    for work in works:
        if work is not None:
            work.wait()
    return received
