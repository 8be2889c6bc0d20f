"""Where a stage's tensors lie in flat buckets, and which rows of them a data-parallel rank has.

A bucket is ``ranks`` parts of equal length, one for each DP rank, so that a reduce-scatter or an
all-gather of it is one message of one part to each rank. A local tensor ``[n, k]`` is cut by rows:
rank r has the r-th ``ceil(n / ranks)`` of them, in its part, at the same offset in every part.
Offsets and lengths are multiples of 64 elements: fused AdamW computes the last few elements of a
tensor by other code than the rest, and a part must not have any.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megabit.tensor_parallel import ShardedParameter
from megabit.units import MIB
from megabit_kernels.packing import CODES_PER_BYTE, packed_width

ALIGNMENT = 64
FULL_SPEED_RANKS = 8
"""Up to so many DP ranks, buckets have the configured size."""

Kind = Literal["ternary", "matrix", "second use", "gain", "partial gain"]
"""What buckets are made of: ternary weights are published as codes; dense matrices; a matrix once
more, for its gradient only; gains, which do not decay; gains whose gradients are to be summed over
TP first."""

REDUCED_EACH_MICROBATCH: tuple[Kind, ...] = ("ternary", "matrix", "second use")
"""What ``zero_stage`` 2 reduces in each microbatch; gains are too small to be worth it."""


@dataclass(frozen=True)
class Slot:
    """A tensor's place in its bucket."""

    name: str
    parameter: ShardedParameter
    rows: int
    """Of the local tensor, n."""
    columns: int
    """Elements of a row, k; 1 for a gain."""
    rows_per_rank: int
    offset: int
    """In each part."""
    code_offset: int
    """In each part of a bucket of packed codes, in bytes."""

    @property
    def size(self) -> int:
        """Elements in each part, without padding."""
        return self.rows_per_rank * self.columns

    @property
    def code_columns(self) -> int:
        """Bytes of a row of packed codes."""
        return packed_width(self.columns)

    def rows_of(self, part: int) -> range:
        """The local rows that lie in ``part``; the last parts may have none."""
        start = min(part * self.rows_per_rank, self.rows)
        return range(start, min(start + self.rows_per_rank, self.rows))

    def owned_rows_of(self, part: int) -> range:
        """Those of them that this rank counts where replicas over TP must be counted once."""
        rows, shard = self.rows_of(part), self.parameter.shard
        if shard.dim != 0:
            return rows
        start = shard.span.owned_start - shard.span.start
        stop = shard.span.owned_stop - shard.span.start
        return range(max(rows.start, start), max(min(rows.stop, stop), max(rows.start, start)))

    def rows_in(self, parts: Tensor, index: int, rows: range, part: int) -> Tensor:
        """The view ``[rows, k]`` of local ``rows``, which lie in ``part``: ``parts[index]``."""
        begin = self.offset + (rows.start - part * self.rows_per_rank) * self.columns
        flat = parts[index, begin : begin + len(rows) * self.columns]
        return flat.view(len(rows), self.columns)


@dataclass(frozen=True)
class BucketLayout:
    """The slots of a bucket."""

    kind: Kind
    slots: tuple[Slot, ...]
    ranks: int
    part: int
    """Elements of a part, a multiple of ``ALIGNMENT``."""
    code_part: int
    """Bytes of a part of packed codes."""

    @property
    def gradients(self) -> int:
        """Handed over in a backward pass."""
        return sum(slot.parameter.uses for slot in self.slots)

    def add(self, parts: Tensor, slot: Slot, gradient: Tensor) -> None:
        """Add a local tensor to its rows in ``parts [ranks, part]``."""
        gradient = gradient.reshape(slot.rows, slot.columns)
        whole = slot.rows // slot.rows_per_rank
        held = parts[:whole, slot.offset : slot.offset + slot.size]
        first = gradient[: whole * slot.rows_per_rank]
        held.unflatten(1, (slot.rows_per_rank, slot.columns)).add_(
            first.view(whole, slot.rows_per_rank, slot.columns)
        )
        if rest := slot.rows_of(whole) if whole < self.ranks else range(0):
            slot.rows_in(parts, whole, rest, whole).add_(gradient[rest.start :])

    def local(self, parts: Tensor, slot: Slot) -> Tensor:
        """The local tensor ``[n, k]`` that ``parts [ranks, part]`` hold."""
        held = parts[:, slot.offset : slot.offset + slot.size]
        return held.reshape(-1, slot.columns)[: slot.rows]

    def local_codes(self, parts: Tensor, slot: Slot) -> Tensor:
        """The packed codes ``[n, ceil(k/4)]`` that ``parts [ranks, code_part]`` hold."""
        size = slot.rows_per_rank * slot.code_columns
        held = parts[:, slot.code_offset : slot.code_offset + size]
        return held.reshape(-1, slot.code_columns)[: slot.rows]


def lay_out(
    parameters: Iterable[tuple[str, ShardedParameter, Kind]],
    ranks: int,
    bucket_mb: float,
    chunk_of: Callable[[str], int] = lambda name: 0,
) -> list[BucketLayout]:
    """Buckets in the order in which backward passes complete them.

    A bucket has tensors of one pipeline stage only: so that it counts whole microbatches, and does
    not wait for the backward passes of another stage.

    Args:
        parameters: by name, in the order of the forward pass.
        bucket_mb: MiB of fp32 at which a bucket is closed; more at more than ``FULL_SPEED_RANKS``.
        chunk_of: which of the rank's stages a parameter belongs to, by its name.
    """
    limit = bucket_limit(bucket_mb, ranks)
    open_groups: dict[tuple[Kind, int], list[tuple[str, ShardedParameter]]] = {}
    sizes: dict[tuple[Kind, int], int] = {}
    buckets: list[BucketLayout] = []
    ordered = list(parameters)
    position = {(kind, name): i for i, (name, _, kind) in enumerate(ordered)}
    for name, parameter, kind in reversed(ordered):
        key = kind, chunk_of(name)
        group = open_groups.setdefault(key, [])
        if group and sizes[key] + parameter.numel() > limit:
            buckets.append(_bucket(kind, group, ranks))
            group = open_groups[key] = []
        sizes[key] = parameter.numel() + (sizes[key] if group else 0)
        group.append((name, parameter))
    buckets += [_bucket(kind, group, ranks) for (kind, _), group in open_groups.items()]
    # A bucket is complete with the first of its tensors in the forward pass, its last slot.
    return sorted(buckets, key=lambda bucket: -position[bucket.kind, bucket.slots[-1].name])


def bucket_limit(bucket_mb: float, ranks: int) -> float:
    """Elements at which a bucket is closed, unless its first tensor is larger."""
    return bucket_mb * MIB / 4 * max(1, ranks / FULL_SPEED_RANKS)


def _bucket(
    kind: Kind, parameters: Iterable[tuple[str, ShardedParameter]], ranks: int
) -> BucketLayout:
    slots: list[Slot] = []
    offset = code_offset = 0
    for name, parameter in parameters:
        rows, columns = parameter.shape[0], parameter.shape[1:].numel()
        slots.append(Slot(name, parameter, rows, columns, -(-rows // ranks), offset, code_offset))
        offset += _aligned(slots[-1].size, ALIGNMENT)
        code_bytes = slots[-1].rows_per_rank * slots[-1].code_columns
        code_offset += _aligned(code_bytes, ALIGNMENT // CODES_PER_BYTE)
    return BucketLayout(kind, tuple(slots), ranks, offset, code_offset)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
