"""The gradients of a stage: added up in flat buckets, reduced over DP while backward still runs.

Every parameter hands its gradient of a microbatch to its bucket (``ShardedParameter.collect``).
When the last tensor of a bucket has its last gradient, the bucket's parts travel to the ranks that
they are for, which add what they get in fp32, as a tree: a reduce-scatter (``reduction`` has the
ways there are). All ranks of a DP group hold the same tensors and run the same backward pass, so
they start the same buckets in the same order.

``zero_stage`` 2 does that in every microbatch and adds up only its own part; what travels is a
buffer that is given back. ``zero_stage`` 0 gathers the parts again, so that each rank has all sums.

In layout-exact training the microbatches of the global batch are cut into fixed blocks. A rank adds
those of a block one after the other, and blocks in a tree (``reduce.tree_sum``), of which the sums
of ranks are subtrees.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megabit.data_parallel.layout import REDUCED_EACH_MICROBATCH, BucketLayout, Slot
from megabit.data_parallel.reduction import GradientReduction, gather_parts
from megabit.mesh import ParallelMesh
from megabit.reduce import Chain, all_reduce

MAX_IN_FLIGHT = 2
"""Buffers of stage 2 that travel at a time. With the other stages nothing waits for the network
before the end of backward; what has come is added up when the next bucket is sent."""


@dataclass
class Bucket:
    """A bucket and what is in it."""

    layout: BucketLayout
    number: int = 0
    """Among the stage's buckets."""
    is_coded: bool = False
    """Whether its gradients may lose something on their way."""
    sums: Tensor | None = None
    """``[ranks, part]``: the microbatches of the present block."""
    blocks: list[tuple[int, Tensor]] = field(default_factory=list)
    """Sums of earlier blocks: of 2^level blocks each, by falling level."""
    gradients: int = 0
    """How many have been handed over in this step."""
    travelling: Chain | None = None
    total: Tensor | None = None
    """``[held parts, part]``, once the step's gradients are complete: what this rank updates."""


@dataclass
class GradientBuckets:
    """The gradients of a stage on one rank.

    Args:
        reduces_each_microbatch: zero_stage 2.
        gathers_sums: zero_stage 0.
    """

    buckets: list[Bucket]
    mesh: ParallelMesh
    dtype: torch.dtype
    reduction: GradientReduction
    reduces_each_microbatch: bool = False
    gathers_sums: bool = False
    height: int = 0
    """Bytes of all sums at the end of the last backward pass, when there are most of them."""
    measures_local: bool = False
    """Whether ``local_square`` is wanted of the next step."""
    local_square: float = 0.0
    """Σg² of this rank's own gradients in the last step, before they were added up over DP;
    replicas over TP included, and with ``zero_stage`` 2 of each microbatch by itself."""
    _microbatches: int = 0
    _blocks: int = 1
    _squares: list[Tensor] = field(default_factory=list)
    _in_flight: deque[Bucket] = field(default_factory=deque)

    def collect(self) -> None:
        """Take over the gradients of all parameters."""
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                slot.parameter.collect(partial(self._add, bucket, slot))

    def begin_step(self, microbatches: int, blocks: int = 1, step: int = 0) -> None:
        """Before the first backward pass of a step.

        Args:
            microbatches: of this rank.
            blocks: that they are cut into; more than 1 in layout-exact training only.
            step: its number, 0-based.
        """
        self._microbatches, self._blocks = microbatches, blocks
        self.reduction.begin_step(step)
        self._squares.clear()
        for bucket in self.buckets:
            bucket.gradients, bucket.total, bucket.travelling = 0, None, None
            bucket.blocks.clear()
            if bucket.sums is not None:
                bucket.sums.zero_()
        self._in_flight.clear()

    def finish(self) -> None:
        """Wait until ``total`` of every bucket is there; collective over DP."""
        for bucket in self.buckets:
            expected = self._microbatches * bucket.layout.gradients
            if bucket.gradients != expected:
                raise RuntimeError(
                    f"{bucket.gradients} of {expected} gradients were handed over to the bucket of "
                    f"{bucket.layout.slots[0].name}"
                )
            self._receive(bucket)
        self._in_flight.clear()
        self.local_square = float(sum(self._squares)) if self._squares else 0.0
        if self.gathers_sums and self.mesh.dp.size > 1:
            gathers = [
                gather_parts(bucket.total, self.mesh.dp, self.mesh.dp_levels, "weight gradients")
                for bucket in self.buckets
                if bucket.total is not None
            ]
            for bucket, gather in zip(self.buckets, gathers, strict=True):
                bucket.total = gather.wait()
        sums = {id(x): x.nbytes for b in self.buckets for x in (b.sums, b.total) if x is not None}
        self.height = sum(sums.values())

    def _add(self, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
        layout = bucket.layout
        if bucket.sums is None:
            shape = (layout.ranks, layout.part)
            bucket.sums = torch.zeros(shape, dtype=self.dtype, device=gradient.device)
        layout.add(bucket.sums, slot, gradient)
        bucket.gradients += 1
        microbatches, rest = divmod(bucket.gradients, layout.gradients)
        if rest:
            return
        if microbatches == self._microbatches or self._is_reduced_now(bucket):
            self._send(bucket)
        elif microbatches % (self._microbatches // self._blocks) == 0:
            self._end_block(bucket)

    def _is_reduced_now(self, bucket: Bucket) -> bool:
        return self.reduces_each_microbatch and bucket.layout.kind in REDUCED_EACH_MICROBATCH

    def _end_block(self, bucket: Bucket) -> None:
        """Put the block that is complete into the tree, and begin another."""
        assert bucket.sums is not None
        level, total = 0, bucket.sums
        while bucket.blocks and bucket.blocks[-1][0] == level:
            total = bucket.blocks.pop()[1].add_(total)
            level += 1
        bucket.blocks.append((level, total))
        bucket.sums = None

    def _send(self, bucket: Bucket) -> None:
        if self._blocks > 1:
            self._end_block(bucket)
            ((_, bucket.sums),) = bucket.blocks  # a power of two of blocks is one tree
            bucket.blocks.clear()
        assert bucket.sums is not None
        if bucket.layout.kind == "partial gain":
            all_reduce(bucket.sums, self.mesh.tp, purpose="weight gradients")
        if self.measures_local:
            self._squares.append(bucket.sums.square().sum(dtype=torch.float64))
        if self.mesh.dp.size == 1:
            bucket.total = bucket.sums
            return
        outgoing, is_bounded = bucket.sums, self._is_reduced_now(bucket)
        if is_bounded:
            bucket.sums = None
            self._receive(bucket)
        self._receive_what_is_here(MAX_IN_FLIGHT - 1 if is_bounded else len(self.buckets))
        self._in_flight.append(bucket)
        bucket.travelling = self.reduction.start(
            outgoing, bucket.layout, bucket.number, bucket.is_coded
        )

    def _receive_what_is_here(self, at_most: int) -> None:
        """Free the buffers of what has come, oldest first, and wait until few enough are left."""
        while self._in_flight:
            chain = self._in_flight[0].travelling
            is_here = chain is None or self.reduction.line.is_here(chain)
            if not is_here and len(self._in_flight) <= at_most:
                return
            self._receive(self._in_flight.popleft())

    def _receive(self, bucket: Bucket) -> None:
        """Add up what has come from all ranks, if something is under way."""
        if bucket.travelling is None:
            return
        summed, bucket.travelling = self.reduction.line.wait(bucket.travelling), None
        own = summed.unsqueeze(0)
        bucket.total = own if bucket.total is None else bucket.total.add_(own)


def tied_totals(buckets: Sequence[Bucket], parameter: object) -> Tensor:
    """The view ``[held parts, elements]`` of ``parameter``'s rows in the total of its bucket."""
    for bucket in buckets:
        for slot in bucket.layout.slots:
            if slot.parameter is parameter:
                assert bucket.total is not None
                return bucket.total[:, slot.offset : slot.offset + slot.size]
    raise KeyError("the parameter is in no bucket")
