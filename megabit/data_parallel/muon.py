"""Muon: momentum, orthogonalised, for matrices whose masters lie in parts on many ranks.

The update of a matrix is its Nesterov momentum with all singular values set to about 1, by
Newton-Schulz iterations (K. Jordan, 2024), times 0.2·√max(n, k), so that its elements are as large
as AdamW's and AdamW's rates fit (arXiv 2502.16982, section 2.2). Singular values belong to the
whole logical matrix. So each matrix has one rank that orthogonalises it:

    every rank sends its rows of the momentum → the matrix' rank has all of it → Newton-Schulz
    → every rank gets the rows of the result that it updates

Ranks are those that have different parts: of a stage, TP × DP, where masters are sharded, else of
TP. Matrices go round them by size, largest first. In each round a rank has one matrix at most; the
next round's travel meanwhile. A product of one shape has the same bits wherever it runs: the layout
changes no bit of an update.

Weights and momentum stay where they are. Beside them a rank needs memory for two rounds of
matrices and about three times the largest one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from megabit.config import OptimConfig
from megabit.data_parallel.layout import BucketLayout, Kind, Slot
from megabit.data_parallel.masters import Master
from megabit.mesh import Axis, ParallelMesh
from megabit.reduce import Pending, all_gather, start_exchange

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x³ and x⁵: steepest at 0, and settling between 0.7 and 1.2 (K. Jordan, 2024)."""
RMS = 0.2
"""What the root mean square of an AdamW update is about (arXiv 2502.16982)."""
EPS = 1e-7

Region = tuple[slice, slice]
"""Rows and columns of a logical matrix."""


def is_muons(name: str, kind: Kind) -> bool:
    """Whether Muon updates a tensor: matrices of layers, but neither embedding nor head."""
    return kind == "ternary" or (kind == "matrix" and ".layers." in name)


def orthogonalized(matrix: Tensor, iterations: int) -> Tensor:
    """``[n, k]`` with its singular values moved towards 1; zeros stay zeros."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if is_tall else matrix  # x xᵀ is the smaller product
    x = x / x.norm().clamp_min(EPS)
    for _ in range(iterations):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if is_tall else x


@dataclass(frozen=True)
class _Matrix:
    """A logical matrix, and which rank of the axis has what of it."""

    slot: Slot
    master: Master
    sent: tuple[Region, ...]
    """By rank; together they are the matrix, without overlap."""
    updated: tuple[Region, ...]
    """By rank; ranks that hold the same KV heads update the same rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slot.parameter.shard.shape

    def local(self, of: Tensor, owned: bool = False) -> list[Tensor]:
        """This rank's rows as views in ``of [held parts, part]``."""
        return [rows for _, rows in self.master.held(self.slot, of, owned)]


@dataclass
class Muon:
    """Updates the masters of layers' matrices; everything else is for AdamW."""

    axis: Axis
    masters: list[Master]
    matrices: list[_Matrix]
    """The largest first: rank ``i % size`` of the axis orthogonalises the i-th."""
    optim: OptimConfig
    momentum: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """By the masters' weights, in their shape; from the first update on."""

    @staticmethod
    def create(
        masters: Sequence[Master],
        names: Sequence[str],
        mesh: ParallelMesh,
        optim: OptimConfig,
        is_sharded: bool,
    ) -> "Muon":
        """Collective over TP: ranks tell each other which rows and columns they have.

        Args:
            masters: all of whose tensors are Muon's.
            names: those of all tensors, in an order that is the same on all ranks of the stage.
            is_sharded: whether DP ranks have one part each, or all of them every part.
        """
        slots = {slot.name: (slot, m) for m in masters for slot in m.bucket.layout.slots}
        ordered = [slots[name] for name in names if name in slots]
        spans = _spans([slot for slot, _ in ordered], mesh)
        axis = mesh.stage if is_sharded else mesh.tp
        matrices = []
        for number, (slot, master) in enumerate(ordered):
            regions = []
            for rank in range(axis.size):
                dp_rank, tp_rank = divmod(rank, mesh.tp.size)  # as the mesh has them in a stage
                part = dp_rank if is_sharded else None
                regions.append(_regions(slot, master.bucket.layout, spans[tp_rank][number], part))
            sent, updated = zip(*regions, strict=True)
            matrices.append(_Matrix(slot, master, sent, updated))
        matrices.sort(key=lambda matrix: -math.prod(matrix.shape))  # stable
        return Muon(axis, [*masters], matrices, optim)

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        """Update the masters by their ``grad``, which is overwritten; collective over ``axis``."""
        directions = {}
        for master in self.masters:
            directions[master.weights] = self._direction(master.weights)
            master.weights.mul_(1 - lr * weight_decay)
        size = self.axis.size
        rounds = [self.matrices[i : i + size] for i in range(0, len(self.matrices), size)]
        arriving = [self._gather(matrices, directions) for matrices in rounds[:1]]
        leaving: list[tuple[list[_Matrix], Pending]] = []
        for number, matrices in enumerate(rounds):
            parts = arriving.pop().wait()
            arriving += [self._gather(later, directions) for later in rounds[number + 1 :][:1]]
            leaving.append((matrices, self._give_back(matrices, parts)))
            if len(leaving) > 1:
                self._apply(*leaving.pop(0), lr)
        for matrices, updates in leaving:
            self._apply(matrices, updates, lr)

    def restore(self) -> None:
        """Make room for the momentum of a checkpoint."""
        for master in self.masters:
            self.momentum[master.weights] = torch.zeros_like(master.weights.detach())

    def _direction(self, weights: nn.Parameter) -> Tensor:
        """Nesterov momentum ``[held parts, part]``, in the memory of the gradient."""
        gradient, beta = weights.grad, self.optim.muon_momentum
        assert gradient is not None
        if weights not in self.momentum:
            self.momentum[weights] = torch.zeros_like(weights.detach())
        # One operation after the other: what fuses two of them rounds a tensor's last elements
        # otherwise than the rest.
        gradient.mul_(1 - beta)
        momentum = self.momentum[weights].mul_(beta).add_(gradient)
        return gradient.add_(momentum * beta)

    def _gather(
        self, matrices: Sequence[_Matrix], directions: Mapping[nn.Parameter, Tensor]
    ) -> Pending:
        """Send this rank's part of each matrix to the rank that orthogonalises it."""
        own = [
            rows.flatten()
            for matrix in matrices
            for rows in matrix.local(directions[matrix.master.weights], owned=True)
        ]
        sent = [_numel(matrix.sent[self.axis.rank]) for matrix in matrices]
        received = [_numel(region) for region in self._own(matrices, "sent")]
        return self._exchange(own, sent, received)

    def _give_back(self, matrices: Sequence[_Matrix], parts: Tensor) -> Pending:
        """Orthogonalise this rank's matrix, of which all parts are here, and send each rank the
        part that it updates."""
        own: list[Tensor] = []
        regions = self._own(matrices, "updated")
        if regions:
            matrix = matrices[self.axis.rank]
            whole = parts.new_empty(matrix.shape)
            sizes = [_numel(region) for region in matrix.sent]
            for region, part in zip(matrix.sent, parts.split(sizes), strict=True):
                view = whole[region]
                view.copy_(part.view_as(view))
            update = orthogonalized(whole, self.optim.muon_iterations)
            own = [update[region].flatten() for region in regions]
        sent = [_numel(region) for region in regions]
        received = [_numel(matrix.updated[self.axis.rank]) for matrix in matrices]
        return self._exchange(own, sent, received)

    def _apply(self, matrices: Sequence[_Matrix], updates: Pending, lr: float) -> None:
        sizes = [_numel(matrix.updated[self.axis.rank]) for matrix in matrices]
        for matrix, update in zip(matrices, updates.wait().split(sizes), strict=True):
            update = update * (lr * RMS * math.sqrt(max(matrix.shape)))
            views = matrix.local(matrix.master.weights.detach())
            for view, part in zip(views, update.split([v.numel() for v in views]), strict=True):
                view.sub_(part.view_as(view))

    def _own(self, matrices: Sequence[_Matrix], which: str) -> tuple[Region, ...]:
        """All ranks' regions of the matrix that this rank orthogonalises, if it has one."""
        if self.axis.rank >= len(matrices):
            return ()
        matrix = matrices[self.axis.rank]
        return matrix.sent if which == "sent" else matrix.updated

    def _exchange(self, own: list[Tensor], sent: list[int], received: list[int]) -> Pending:
        size = self.axis.size
        sent, received = (counts + [0] * (size - len(counts)) for counts in (sent, received))
        weights = self.masters[0].weights
        flat = torch.cat(own) if own else weights.new_empty(0)
        return start_exchange(flat, sent, received, self.axis, "updates")


def _spans(slots: Sequence[Slot], mesh: ParallelMesh) -> list[list[list[int]]]:
    """Of each TP rank and tensor: start, stop, and what of it is counted."""
    own = torch.tensor(
        [
            [span.start, span.stop, span.owned_start, span.owned_stop]
            for span in (slot.parameter.shard.span for slot in slots)
        ],
        device=mesh.device,
    )
    spans: list[list[list[int]]] = all_gather(own.unsqueeze(0), mesh.tp).tolist()
    return spans


def _regions(
    slot: Slot, layout: BucketLayout, span: Sequence[int], part: int | None
) -> tuple[Region, Region]:
    """What a rank with ``span`` of a matrix sends of its ``part`` (None: all), and what it
    updates."""
    start, stop, owned_start, owned_stop = span
    shard = slot.parameter.shard
    n = stop - start if shard.dim == 0 else shard.shape[0]
    there = replace(slot, rows=n, rows_per_rank=-(-n // layout.ranks))
    rows = range(n) if part is None else there.rows_of(part)
    if shard.dim == 1:
        region = slice(rows.start, rows.stop), slice(start, stop)
        return region, region
    first, last = start + rows.start, start + rows.stop
    columns = slice(0, shard.shape[1])
    owned_first = min(max(first, owned_start), last)
    owned = slice(owned_first, max(min(last, owned_stop), owned_first))
    return (owned, columns), (slice(first, last), columns)


def _numel(region: Region) -> int:
    rows, columns = region
    return (rows.stop - rows.start) * (columns.stop - columns.start)
