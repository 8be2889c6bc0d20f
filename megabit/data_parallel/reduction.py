"""How sums of gradients and new weights travel over DP: in one level or in two, coded or not.

A bucket is ``[ranks, part]``, and DP rank r is to get the sum of all ranks' r-th part:

    flat           parts → all-to-all over dp → tree sum
    hierarchical   parts → all-to-all inside a host → tree sum → all-to-all across hosts → tree sum

In two levels each rank sends ``1/intra`` of the bytes across hosts. Ranks inside are neighbours in
the tree, so with a power of two of them the sum has the bits of the flat one; else it agrees to the
rounding of fp32. Weights go the other way: all-gather across, then inside.

A lossy codec (``wire``) makes the messages of the slowest level: across hosts where there are two.
With *error feedback* a rank adds what the codec has lost of its last message to the next one
(Seide et al. 2014; Karimireddy et al., arXiv 1901.09847), so that over many steps everything
arrives. What is lost is kept here, in fp32, and saved with the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from megabit.data_parallel.layout import BucketLayout
from megabit.data_parallel.wire import Codec, decode_parts, encode_parts, maxima
from megabit.mesh import Axis, Levels, ParallelMesh
from megabit.reduce import (
    Chain,
    Line,
    Pending,
    Purpose,
    count_all_gather,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    tree_sum,
)


@dataclass
class Lost:
    """What a codec has lost of a rank's last messages about one bucket."""

    layout: BucketLayout
    values: Tensor
    """fp32 ``[messages, part]``: one message to each rank of the level that is coded."""


@dataclass
class GradientReduction:
    """The reduce-scatter of a stage's gradients over DP.

    Args:
        wire_dtype: of what is not coded.
        codec: for buckets that are; None: nothing is.
        with_feedback: whether what a codec loses is added to the next message.
        seed: of stochastic codecs.
    """

    mesh: ParallelMesh
    dtype: torch.dtype
    wire_dtype: torch.dtype
    codec: Codec | None = None
    with_feedback: bool = True
    seed: int = 0
    lost: dict[int, Lost] = field(default_factory=dict)
    """By the number of the bucket, of those that are coded, if there is feedback."""
    line: Line = field(default_factory=Line)
    """What is under way."""
    _step: int = 0
    _messages: int = 0

    def begin_step(self, step: int) -> None:
        """Before the first message of a step (0-based), whose number random numbers depend on."""
        self._step, self._messages = step, 0

    def start(self, parts: Tensor, layout: BucketLayout, number: int, is_coded: bool) -> Chain:
        """Begin to reduce ``parts [ranks, part]`` of bucket ``number``; gives this rank's sum, fp32
        ``[part]``. Until it is there, ``parts`` stay as they are."""
        levels = self.mesh.dp_levels
        if levels is None:
            return self.line.join(self._across(parts, layout, number, is_coded))
        inside = self._inside(parts, levels)

        def across(summed: Tensor) -> Pending:
            chain = self._across(summed, layout, number, is_coded)
            following.extend(chain.following)
            return chain.pending

        chain = Chain.of(inside, across)
        following = chain.following
        return self.line.join(chain)

    def forget(self) -> None:
        """Drop what was lost: the step that it belongs to is not applied. So is what was lost
        before, which its messages have taken along."""
        self.lost.clear()

    def take_lost(self) -> dict[str, Tensor]:
        """What was lost, by tensor: ``[messages, elements]``; nothing is left."""
        by_tensor = {
            slot.name: lost.values[:, slot.offset : slot.offset + slot.size].clone()
            for lost in self.lost.values()
            for slot in lost.layout.slots
        }
        self.lost.clear()
        return by_tensor

    def give_lost(self, by_tensor: Mapping[str, Tensor], layouts: Sequence[BucketLayout]) -> None:
        """The same for other buckets, by their numbers."""
        for number, layout in enumerate(layouts):
            own = [slot for slot in layout.slots if slot.name in by_tensor]
            if own:
                first = by_tensor[own[0].name]
                values = first.new_zeros((len(first), layout.part))
                for slot in own:
                    values[:, slot.offset : slot.offset + slot.size] = by_tensor[slot.name]
                self.lost[number] = Lost(layout, values)

    @property
    def senders(self) -> tuple[int, int]:
        """Which message sender this rank is, and of how many: what each has lost is its own."""
        axis = self.slowest_axis
        return axis.rank, axis.size

    @property
    def slowest_axis(self) -> Axis:
        """The only level, or that across hosts: what a codec makes messages for."""
        levels = self.mesh.dp_levels
        return self.mesh.dp if levels is None else levels.inter

    def _inside(self, parts: Tensor, levels: Levels) -> Pending:
        """Sum the parts of a host: ``[ranks, part]`` → ``[inter, part]``, for the ranks with this
        one's place on all hosts."""
        intra = levels.intra.size
        # Part j·intra + i is for rank i of host j.
        by_place = parts.unflatten(0, (-1, intra)).transpose(0, 1)
        swap = start_all_to_all(by_place.to(self.wire_dtype), levels.intra, "weight gradients")
        return Pending(levels.intra, swap.work, lambda: tree_sum(swap.finish().to(self.dtype)))

    def _across(self, parts: Tensor, layout: BucketLayout, number: int, is_coded: bool) -> Chain:
        """Sum ``[axis.size, part]`` over the slowest level."""
        axis = self.slowest_axis

        def exchange_whole(values: Tensor) -> Pending:
            swap = start_all_to_all(values.to(self.wire_dtype), axis, "weight gradients")
            return Pending(axis, swap.work, lambda: tree_sum(swap.finish().to(self.dtype)))

        codec = self.codec
        if codec is None or not is_coded:
            if codec is None or not codec.needs_maximum:
                return Chain.of(exchange_whole(parts))
            # In line, behind the exchanges of buckets before it, which wait for their maxima.
            return Chain.of(Pending.done(parts), exchange_whole)
        parts = self._with_lost(parts, number)
        generator = self._generator(parts.device, number)

        def exchange(maximum: Tensor | None) -> Pending:
            message = encode_parts(codec, parts, layout, maximum, generator)
            if self.with_feedback:
                lost = parts - decode_parts(codec, message, layout)
                self.lost[number] = Lost(layout, lost)
            swap = start_all_to_all(message, axis, "weight gradients")
            return Pending(
                axis, swap.work, lambda: tree_sum(decode_parts(codec, swap.finish(), layout))
            )

        if not codec.needs_maximum:
            return Chain.of(exchange(None))
        # On a group of its own: when the exchange begins depends on when a rank looks, and the
        # collectives of a group must begin in one order everywhere.
        levels = self.mesh.weights_levels
        maxima_axis = self.mesh.weights if levels is None else levels.inter
        agreed = start_all_reduce(maxima(parts, layout), maxima_axis, "weight gradients", "max")
        return Chain.of(agreed, exchange)

    def _with_lost(self, parts: Tensor, number: int) -> Tensor:
        """``parts`` and what was lost of the last message."""
        lost = self.lost.get(number)
        if not self.with_feedback or lost is None:
            return parts
        return parts + lost.values

    def _generator(self, device: torch.device, number: int) -> torch.Generator:
        """Random numbers of one message, other ones for each step, message and rank."""
        place = (self.seed, self._step, self._messages, number, self.mesh.world.rank)
        self._messages += 1
        digest = blake2b(repr(place).encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def gather_parts(own: Tensor, axis: Axis, levels: Levels | None, purpose: Purpose) -> Chain:
    """Begin to give all DP ranks all parts: ``[1, n]`` of each → ``[ranks, n]``.

    Args:
        levels: of ``axis``, if there are two.
    """
    if levels is None:
        return Chain.of(start_all_gather(own, axis, purpose))
    intra, inter = levels.intra, levels.inter
    count_all_gather(inter.size * own.nbytes, intra, purpose)

    def inside(of_hosts: Tensor) -> Pending:
        gather = start_all_gather(of_hosts.unsqueeze(0), intra, purpose, is_counted=True)
        # [intra, inter, n] → part j·intra + i is that of rank i of host j.
        return Pending(
            intra, gather.work, lambda: gather.finish().transpose(0, 1).flatten(0, 1).contiguous()
        )

    return Chain.of(start_all_gather(own, inter, purpose), inside)
