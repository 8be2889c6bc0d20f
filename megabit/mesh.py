"""``ParallelMesh``: the ranks as a grid (pp, dp, tp), and the only owner of process groups.

Ranks of one tensor-parallel group are neighbours, so on a cluster TP stays inside a node. Nothing
looks a mesh up: it is made once and passed to whoever communicates.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

AXES = ("pp", "dp", "tp")
"""Slowest to fastest rank number."""


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
    waited_s: float = 0.0
    """Seconds that this rank has been blocked in collectives of the axis so far."""

    def global_rank(self, rank: int) -> int:
        """The world's number of this axis' ``rank``."""
        assert self.group is not None
        return dist.get_global_rank(self.group, rank)

    @property
    def sent_bytes(self) -> float:
        """What this rank has sent along the axis so far, for whatever purpose."""
        return sum(self.sent.values())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the block as waited."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - started

    @staticmethod
    def single(name: str) -> "Axis":
        return Axis(name, size=1, rank=0)


@dataclass
class ParallelMesh:
    """The grid and this rank's place in it."""

    tp: Axis = field(default_factory=lambda: Axis.single("tp"))
    pp: Axis = field(default_factory=lambda: Axis.single("pp"))
    dp: Axis = field(default_factory=lambda: Axis.single("dp"))
    world: Axis = field(default_factory=lambda: Axis.single("world"))
    stage: Axis = field(default_factory=lambda: Axis.single("stage"))
    """All ranks of a pipeline stage, TP × DP: together they hold each weight of it once or more."""
    weights: Axis = field(default_factory=lambda: Axis.single("dp"))
    """The DP axis once more, with a group of its own: new weights travel on it, and what is sent on
    ``dp`` meanwhile does not queue behind them."""
    embedding: Axis = field(default_factory=lambda: Axis.single("embedding"))
    """First and last stage of a pipeline: the two holders of a tied embedding. Single elsewhere."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @staticmethod
    def create(tp: int, pp: int, device: torch.device) -> "ParallelMesh":
        """The mesh over the initialised process group; collective over the whole world.

        Without a process group, that of a world of one.
        """
        if not dist.is_initialized():
            assert tp == pp == 1, "the configuration was not validated"
            return ParallelMesh(device=device)
        world_size, rank = dist.get_world_size(), dist.get_rank()
        assert world_size % (tp * pp) == 0, "the configuration was not validated"
        grid = init_device_mesh(device.type, (pp, world_size // (tp * pp), tp), mesh_dim_names=AXES)

        def axis(name: str) -> Axis:
            size = grid.size(AXES.index(name))
            return Axis(
                name, size, grid.get_local_rank(name), grid.get_group(name) if size > 1 else None
            )

        world = Axis("world", world_size, rank, dist.group.WORLD if world_size > 1 else None)
        mesh = ParallelMesh(axis("tp"), axis("pp"), axis("dp"), world, device=device)
        # Every rank takes part in making every group, in the same order.
        for stage in grid.mesh:
            mesh.stage = _joined(mesh.stage, stage.flatten().tolist(), rank)
            for replicas in stage.t():
                mesh.weights = _joined(mesh.weights, replicas.tolist(), rank)
        if pp > 1:
            for ends in zip(grid.mesh[0].flatten(), grid.mesh[-1].flatten(), strict=True):
                mesh.embedding = _joined(mesh.embedding, [int(end) for end in ends], rank)
        if mesh.pp.group is not None:
            # NCCL wants the first operation of a group to be one that all of its ranks take part
            # in, and a pipeline's messages go between neighbours only.
            dist.all_reduce(torch.zeros(1, device=device), group=mesh.pp.group)
        return mesh

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the run: it prints and writes the shared files."""
        return self.world.rank == 0

    def sent(self) -> dict[tuple[str, str], float]:
        """Bytes that this rank has sent so far, by axis and purpose.

        Axes are those of the layout: what the ends of a pipeline exchange counts for ``pp``, and
        what all ranks of a stage or of the world exchange for ``world``.
        """
        total: defaultdict[tuple[str, str], float] = defaultdict(float)
        for name, axes in self._axes().items():
            for axis in axes:
                for purpose, count in axis.sent.items():
                    total[name, purpose] += count
        return dict(total)

    def sent_bytes(self) -> dict[str, float]:
        """What this rank has sent so far, by axis."""
        return {n: sum(a.sent_bytes for a in axes) for n, axes in self._axes().items()}

    def waited_s(self) -> dict[str, float]:
        """Seconds this rank has been blocked in collectives and exchanges so far, by axis."""
        return {n: sum(a.waited_s for a in axes) for n, axes in self._axes().items()}

    def _axes(self) -> dict[str, tuple[Axis, ...]]:
        return {
            "tp": (self.tp,),
            "pp": (self.pp, self.embedding),
            "dp": (self.dp, self.weights),
            "world": (self.world, self.stage),
        }


def _joined(axis: Axis, ranks: list[int], rank: int) -> Axis:
    """Make the group of ``ranks``: the axis over it for those in it, ``axis`` for the others."""
    if len(ranks) == 1:
        return axis
    group = dist.new_group(ranks)
    return Axis(axis.name, len(ranks), ranks.index(rank), group) if rank in ranks else axis


@contextmanager
def process_group(
    rank: int,
    world_size: int,
    device: torch.device,
    init_method: str = "env://",
    timeout: timedelta = timedelta(minutes=30),
) -> Iterator[None]:
    """torch's default process group for the length of the block; none for a world of one."""
    if world_size == 1:
        yield
        return
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
