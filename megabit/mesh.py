"""``ParallelMesh``: the ranks as a grid (islands, pp, dp, tp), and only owner of process groups.

Ranks of one tensor-parallel group are neighbours, so on a cluster TP stays inside a host. *Islands*
train by themselves and meet now and then (``outer``); elsewhere there is one, the world. Nothing
looks a mesh up: it is made once and passed to whoever communicates.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megabit.config import Config
from megabit.config.validate_cluster import islands_in_world
from megabit.errors import UserError

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for others."""


class CollectiveCheck(Protocol):
    """Raises on all ranks of an axis if they are about to call different collectives."""

    def __call__(self, call: str, sent: Sequence[int] = (), received: Sequence[int] = ()) -> None:
        """``call`` says what it is. ``sent`` and ``received`` are elements to and from each rank,
        of what is not the same everywhere."""
        ...


@dataclass
class Axis:
    """One dimension of the mesh, as one rank sees it.

    ``group`` is None if the axis has a single rank: then nothing is ever sent.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None = None
    sent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Bytes that this rank has sent along the axis so far, by purpose (``reduce.Purpose``)."""
    sent_as: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The same bytes by codec where they have one (``coded``), else by purpose."""
    waited_s: float = 0.0
    """Seconds that this rank has been blocked in collectives of the axis so far."""
    begun: int = 0
    """Collectives and exchanges that this rank has begun to wait for."""
    calls: int = 0
    """Those whose wait is over."""
    check: "CollectiveCheck | None" = field(default=None, repr=False)
    """Asked before each collective, if ranks are to compare what they call."""
    _codec: str | None = field(default=None, init=False, repr=False)

    def global_rank(self, rank: int) -> int:
        """The world's number of this axis' ``rank``."""
        assert self.group is not None
        return dist.get_global_rank(self.group, rank)

    @property
    def sent_bytes(self) -> float:
        """What this rank has sent along the axis so far, for whatever purpose."""
        return sum(self.sent.values())

    def count(self, num_bytes: float, purpose: str) -> None:
        """Note that ``num_bytes`` are sent."""
        self.sent[purpose] += num_bytes
        self.sent_as[self._codec or purpose] += num_bytes

    @contextmanager
    def coded(self, codec: str) -> Iterator[None]:
        """What the block begins to send is counted under ``codec``, too."""
        outer, self._codec = self._codec, codec
        try:
            yield
        finally:
            self._codec = outer

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the block as waited, for one collective."""
        started = time.perf_counter()
        self.begun += 1
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - started
            self.calls += 1

    @staticmethod
    def single(name: str) -> "Axis":
        """An axis of one rank, which sends nothing."""
        return Axis(name, size=1, rank=0)


@dataclass(frozen=True)
class Levels:
    """An axis in two steps: rank ``inter.rank · intra.size + intra.rank`` of it."""

    intra: Axis
    """Ranks that share a fast network, consecutive ones."""
    inter: Axis
    """Ranks with the same place in each of these."""


@dataclass(frozen=True)
class Topology:
    """What the grid follows, beside TP and PP."""

    islands: int = 1
    dp_intra: int | None = None
    """Consecutive DP ranks that share a fast network; None: as hosts are."""
    is_hierarchical: bool | None = False
    """Whether DP goes in two levels; None: where DP groups have several ranks on several hosts."""
    local_rank: int | None = None
    """Of this rank on its host; None: all ranks are on one. A host's ranks are consecutive."""

    @staticmethod
    def of(config: Config, local_rank: int | None = None) -> "Topology":
        """As configured."""
        communication = config.communication
        choices = {"auto": None, "flat": False, "hierarchical": True}
        return Topology(
            islands_in_world(config.outer),
            communication.dp_intra,
            communication.dp_intra is not None or choices[communication.topology],
            local_rank,
        )


@dataclass
class ParallelMesh:
    """The grid and this rank's place in it."""

    tp: Axis = field(default_factory=lambda: Axis.single("tp"))
    pp: Axis = field(default_factory=lambda: Axis.single("pp"))
    dp: Axis = field(default_factory=lambda: Axis.single("dp"))
    world: Axis = field(default_factory=lambda: Axis.single("world"))
    island: Axis = field(default_factory=lambda: Axis.single("world"))
    """All ranks that take a step together: ``world`` itself where there is one island."""
    outer: Axis = field(default_factory=lambda: Axis.single("outer"))
    """Ranks with the same place in each island."""
    stage: Axis = field(default_factory=lambda: Axis.single("stage"))
    """All ranks with the same stages, TP × DP: together they hold each weight of these once or
    more."""
    weights: Axis = field(default_factory=lambda: Axis.single("dp"))
    """The DP axis once more, with a group of its own: new weights travel on it, and what is sent on
    ``dp`` meanwhile does not queue behind them."""
    dp_levels: Levels | None = None
    """The DP axis in two levels, if what is reduced over it goes in two steps."""
    weights_levels: Levels | None = None
    """``weights`` likewise."""
    embedding: Axis = field(default_factory=lambda: Axis.single("embedding"))
    """First and last rank of a pipeline: the two holders of a tied embedding, unless the first has
    both ends. Single elsewhere."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Store | None = None
    """Where ranks met: for signs of life, never for anything a step waits for."""

    @staticmethod
    def create(
        tp: int,
        pp: int,
        device: torch.device,
        timeout: timedelta = TIMEOUT,
        topology: Topology | None = None,
        store: Store | None = None,
    ) -> "ParallelMesh":
        """The mesh over the initialised process group; collective over the whole world.

        Without a process group, that of a world of one.

        Args:
            timeout: of every group but the world's, which has that of ``process_group``; a rank
                that waits longer than that for others fails.
            topology: default: one island, DP in one level.

        Raises:
            UserError: DP is to go in two levels and cannot.
        """
        topology = topology or Topology()
        if not dist.is_initialized():
            assert tp == pp == topology.islands == 1, "the configuration was not validated"
            return ParallelMesh(device=device)
        world_size, rank = dist.get_world_size(), dist.get_rank()
        assert world_size % (topology.islands * tp * pp) == 0, "the configuration was not validated"
        grid = torch.arange(world_size).view(topology.islands, pp, -1, tp)
        world = Axis("world", world_size, rank, dist.group.WORLD if world_size > 1 else None)
        mesh = ParallelMesh(world=world, island=world, device=device, store=store)
        joined = partial(_joined, rank=rank, timeout=timeout)
        # Every rank takes part in making every group, in the same order.
        if topology.islands > 1:
            mesh.island = Axis("world", world_size // topology.islands, 0)
            for island in grid:
                mesh.island = joined(mesh.island, island.flatten())
            for same_place in grid.flatten(1).t():
                mesh.outer = joined(mesh.outer, same_place)
        for ranks in grid.flatten(0, 2):
            mesh.tp = joined(mesh.tp, ranks)
        dp_intra = _dp_intra(topology, grid, world, device)
        for stage in grid.flatten(0, 1):
            mesh.stage = joined(mesh.stage, stage.flatten())
            for replicas in stage.t():
                mesh.dp = joined(mesh.dp, replicas)
                mesh.weights = joined(mesh.weights, replicas)
                if dp_intra is not None:
                    mesh.dp_levels = _levels(mesh.dp_levels, replicas.view(-1, dp_intra), joined)
                    mesh.weights_levels = _levels(
                        mesh.weights_levels, replicas.view(-1, dp_intra), joined
                    )
        for pipeline in grid.flatten(2).transpose(1, 2).flatten(0, 1):
            mesh.pp = joined(mesh.pp, pipeline)
            if pp > 1:
                mesh.embedding = joined(mesh.embedding, pipeline[[0, -1]])
        if mesh.pp.group is not None:
            # NCCL wants the first operation of a group to be one that all of its ranks take part
            # in, and a pipeline's messages go between neighbours only.
            dist.all_reduce(torch.zeros(1, device=device), group=mesh.pp.group)
        return mesh

    def close(self) -> None:
        """Let go of all groups, before torch's process group is destroyed; nothing is sent then.

        Axes live on in whatever used them, often until the interpreter ends. A group that lived as
        long would have threads of its own that the interpreter cannot end: the process would abort.
        """
        for axis in self.axes():
            axis.group = None

    def axes(self) -> Iterator[Axis]:
        """All of them, each once."""
        return (axis for axes in self._axes().values() for axis in axes)

    @property
    def dp_intra(self) -> int | None:
        """DP ranks of the inner level, if there are two."""
        return None if self.dp_levels is None else self.dp_levels.intra.size

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the run: it prints and writes the shared files."""
        return self.world.rank == 0

    def sent(self) -> dict[tuple[str, str], float]:
        """Bytes that this rank has sent so far, by axis and purpose.

        Axes are those of the layout: what the ends of a pipeline exchange counts for ``pp``, and
        what all ranks of a stage, an island or the world exchange for ``world``. In two levels,
        ``dp`` is what travels inside and ``dp_inter`` what travels across.
        """
        return self._total(lambda axis: axis.sent)

    def sent_as(self) -> dict[tuple[str, str], float]:
        """The same bytes by axis and codec, or purpose of what has no codec (``Axis.sent_as``)."""
        return self._total(lambda axis: axis.sent_as)

    def sent_bytes(self) -> dict[str, float]:
        """What this rank has sent so far, by axis."""
        return {n: sum(a.sent_bytes for a in axes) for n, axes in self._axes().items()}

    def waited_s(self) -> dict[str, float]:
        """Seconds this rank has been blocked in collectives and exchanges so far, by axis."""
        return {n: sum(a.waited_s for a in axes) for n, axes in self._axes().items()}

    def calls(self) -> dict[str, int]:
        """Collectives and exchanges that this rank has waited for so far, by axis."""
        return {n: sum(a.calls for a in axes) for n, axes in self._axes().items()}

    def begun(self) -> dict[str, int]:
        """Those, and the one that it waits for now, by axis."""
        return {n: sum(a.begun for a in axes) for n, axes in self._axes().items()}

    def _total(self, counts: Callable[[Axis], dict[str, float]]) -> dict[tuple[str, str], float]:
        total: defaultdict[tuple[str, str], float] = defaultdict(float)
        for name, axes in self._axes().items():
            for axis in axes:
                for key, count in counts(axis).items():
                    total[name, key] += count
        return dict(total)

    def _axes(self) -> dict[str, tuple[Axis, ...]]:
        levels = [each for each in (self.dp_levels, self.weights_levels) if each is not None]
        islands = () if self.island is self.world else (self.island,)
        return {
            "tp": (self.tp,),
            "pp": (self.pp, self.embedding),
            "dp": (self.dp, self.weights, *(each.intra for each in levels)),
            "dp_inter": tuple(each.inter for each in levels),
            "outer": (self.outer,),
            "world": (self.world, self.stage, *islands),
        }


def _dp_intra(
    topology: Topology, grid: torch.Tensor, world: Axis, device: torch.device
) -> int | None:
    """DP ranks of an inner level, the same for all DP groups, or None for one level."""
    dp = grid.shape[2]
    if topology.is_hierarchical is False:
        return None
    if topology.dp_intra is not None:
        # With 1 or all of them, one of the two levels has nothing to do.
        return topology.dp_intra if 1 < topology.dp_intra < dp else None
    hosts = torch.zeros(world.size, dtype=torch.int64, device=device)
    if topology.local_rank is not None:  # a host goes by its first rank
        hosts[world.rank] = world.rank - topology.local_rank
        dist.all_reduce(hosts)
    on_hosts = hosts.cpu()[grid.transpose(2, 3).flatten(0, 2)]  # [DP groups, dp]
    for intra in (size for size in range(dp - 1, 1, -1) if dp % size == 0):
        runs = on_hosts.view(len(on_hosts), -1, intra)
        if (runs == runs[..., :1]).all():
            # Of several hosts: else the network is equally fast everywhere.
            return intra if (on_hosts != on_hosts[:, :1]).any() else None
    if topology.is_hierarchical:
        raise UserError(
            "communication.topology: hierarchical needs DP groups with several ranks on each of "
            "several hosts; name communication.dp_intra, or use auto"
        )
    return None


def _levels(
    levels: Levels | None, places: torch.Tensor, joined: Callable[[Axis, torch.Tensor], Axis]
) -> Levels:
    """Make the groups of both levels over ``places [inter, intra]``, and this rank's axes."""
    levels = levels or Levels(Axis.single("dp"), Axis.single("dp_inter"))
    intra, inter = levels.intra, levels.inter
    for ranks in places:
        intra = joined(intra, ranks)
    for ranks in places.t():
        inter = joined(inter, ranks)
    return Levels(intra, inter)


def _joined(axis: Axis, ranks: torch.Tensor, rank: int, timeout: timedelta) -> Axis:
    """Make the group of ``ranks``: the axis over it for those in it, ``axis`` for the others."""
    members = ranks.tolist()
    if len(members) == 1:
        return axis
    group = dist.new_group(members, timeout=timeout)
    return Axis(axis.name, len(members), members.index(rank), group) if rank in members else axis


@contextmanager
def open_mesh(
    tp: int,
    pp: int,
    rank: int,
    world_size: int,
    device: torch.device,
    init_method: str = "env://",
    timeout: timedelta = TIMEOUT,
    topology: Topology | None = None,
) -> Iterator[ParallelMesh]:
    """The process group and the mesh over it, for the length of the block."""
    with process_group(rank, world_size, device, init_method, timeout) as store:
        mesh = ParallelMesh.create(tp, pp, device, timeout, topology, store)
        try:
            yield mesh
        finally:
            mesh.close()


@contextmanager
def process_group(
    rank: int,
    world_size: int,
    device: torch.device,
    init_method: str = "env://",
    timeout: timedelta = TIMEOUT,
) -> Iterator[Store | None]:
    """torch's default process group for the length of the block, and the store that its ranks met
    at; none for a world of one.

    A mesh that is made in the block must be closed in it, unless the process ends by ``os._exit``;
    ``open_mesh`` sees to that.
    """
    if world_size == 1:
        yield None
        return
    store, _, _ = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("process_group", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    try:
        yield store
    finally:
        dist.destroy_process_group()
