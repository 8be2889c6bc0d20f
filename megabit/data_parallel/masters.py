"""Master weights: the rows of each bucket that this rank updates."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megabit.data_parallel.buckets import Bucket
from megabit.data_parallel.layout import Slot
from megabit.mesh import ParallelMesh
from megabit.tensor_parallel import Shard


@dataclass(frozen=True)
class Piece:
    """Rows of a local tensor that this rank updates, with what the optimizer has of them."""

    name: str
    shard: Shard
    rows: range
    """Of the local tensor."""
    tensors: Mapping[str, Tensor]
    """``master``; after the first update ``exp_avg`` and ``exp_avg_sq``, or Muon's ``momentum``;
    from backward to update ``gradient``: views in the shape of the local tensor's rows."""

    @property
    def index(self) -> tuple[slice, ...]:
        """Where in the logical tensor the piece lies."""
        span = self.shard.span
        index = [slice(0, size) for size in self.shard.shape]
        index[self.shard.dim] = slice(span.start, span.stop)
        first = index[0].start
        index[0] = slice(first + self.rows.start, first + self.rows.stop)
        return tuple(index)


@dataclass
class Master:
    """fp32 weights of a bucket's parts that this rank updates."""

    bucket: Bucket
    first_part: int
    weights: nn.Parameter
    """``[held parts, part]``"""

    @staticmethod
    def of(
        bucket: Bucket,
        values: Mapping[str, Tensor],
        mesh: ParallelMesh,
        is_sharded: bool,
        dtype: torch.dtype,
    ) -> "Master":
        """This rank's parts of the local tensors ``values``, by name; zeros where there is none.

        Args:
            is_sharded: whether DP ranks have one part each, or all of them every part.
        """
        layout = bucket.layout
        first, count = (mesh.dp.rank, 1) if is_sharded else (0, layout.ranks)
        weights = torch.zeros((count, layout.part), dtype=dtype, device=mesh.device)
        master = Master(bucket, first, nn.Parameter(weights))
        for slot in layout.slots:
            if slot.name in values:
                local = values[slot.name].reshape(slot.rows, slot.columns)
                for rows, view in master.held(slot, weights):
                    view.copy_(local[rows.start : rows.stop])
        return master

    @property
    def name(self) -> str:
        """Of its first tensor, which no other master has."""
        return self.bucket.layout.slots[0].name

    @property
    def parts(self) -> range:
        """Which parts are held."""
        return range(self.first_part, self.first_part + len(self.weights))

    def held(
        self, slot: Slot, of: Tensor, owned: bool = False, parts: range | None = None
    ) -> Iterator[tuple[range, Tensor]]:
        """(local rows, their view ``[rows, k]`` in ``of [held parts, part]``) for each part.

        Args:
            owned: only rows that this rank counts where replicas over TP are counted once.
            parts: some of those that are held; default: all.
        """
        for part in self.parts if parts is None else parts:
            rows = slot.owned_rows_of(part) if owned else slot.rows_of(part)
            if rows:
                yield rows, slot.rows_in(of, part - self.first_part, rows, part)
