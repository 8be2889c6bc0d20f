"""The peak of a rank's memory in a training step, by part: a prediction from the configuration.

    what stays    codes, dense weights, sums of gradients, masters, moments: ``training.memory``
    activations   the most at a time while the rank's part of the schedule runs (``activations``)
    buffers       what travels: gradients on their way over DP, messages between stages
    base          the process before it has a model: libraries, communicators

Three moments are looked at, and the one with most memory is told: the end of the passes, with
gradients on their way; the update; and the start, when a rank has the initial weights in full
beside their masters.

On a CPU the peak is that of the process (VmHWM), and it depends on what glibc makes of the tensors
(``allocator.keep_freed_memory``): freed memory stays with the process, and what is allocated next
often does not fit into it. ``SPREAD`` is by how much the passes' memory is spread out so; large
blocks, such as those of gradients on their way, never fit between smaller ones, so they stand
beside the activations. On a GPU the peak is that of allocated memory, in which no such holes count.

A teacher and the embedding objective are left out, and evaluation, which comes at other times and
keeps nothing for backward passes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megabit.config import tree_blocks
from megabit.config.validate_cluster import COMPRESSED
from megabit.data_parallel.buckets import MAX_IN_FLIGHT
from megabit.data_parallel.layout import bucket_limit
from megabit.data_parallel.zero import is_coded
from megabit.pipeline.actions import (
    Backward,
    Compute,
    Forward,
    InputGradient,
    WeightGradient,
)
from megabit.pipeline.layout import StageLayout
from megabit.pipeline.mailbox import MAX_SENDS
from megabit.plan.activations import (
    Activations,
    embedding_activations,
    head_activations,
    layer_activations,
)
from megabit.plan.machine import Device
from megabit.plan.sizes import Sizes
from megabit.training.memory import KINDS, outer_bytes, resident_bytes
from megabit.training.shapes import RankShape
from megabit.units import MIB

PARTS = (*KINDS, "outer", "activations", "buffers", "base")
"""``outer``: what an outer optimizer keeps, if there is one."""

TRAVELLING = 3
"""Buckets of gradients that are on their way at a time with ``zero_stage`` 0 and 1, where nothing
waits for them before the end of the passes. Measured on a CPU with gloo, 2 to 6."""
SPREAD = 0.6
"""On a CPU: bytes of holes in the heap for each byte of activations, as fitted to 56 ranks of 14
layouts of a 60 M model with glibc 2.36. It grows until the second step and no more."""
SPREAD_BYTES = 35 * MIB
"""And beside that, however few activations there are: from the same fit."""
FIRST_STEP_BYTES = 26 * MIB
"""What a process of a CPU has beside its base once torch and the kernels have run a step, whatever
the model: 24 to 34 MiB measured with a model of 2 MiB at TP, PP and DP 4."""
RAMP_SHARE = 0.5
"""Any λ below 1."""


def memory_of(shape: RankShape, device: Device) -> dict[str, int]:
    """Bytes by part, in the order of ``PARTS``, at the moment of the step when there are most.

    Where λ is faded in (``train.quantization_ramp``), of the larger of both times.
    """
    rank = _Rank(shape, device)
    moments = [*rank.moments(is_ramp=False)]
    if shape.is_ternary and shape.config.train.quantization_ramp:
        moments += rank.moments(is_ramp=True)
    return max(moments, key=lambda parts: sum(parts.values()))


@dataclass(frozen=True)
class _Rank:
    shape: RankShape
    device: Device

    def moments(self, is_ramp: bool) -> Iterator[dict[str, int]]:
        """Bytes by part at the moments at which there may be most."""
        shape, device = self.shape, self.device
        kept = resident_bytes(
            shape,
            torch.device("cpu"),
            share=RAMP_SHARE if is_ramp else 1.0,
            layout=None if device.is_shared else "planes",
        )
        kept["gradients"] += self._unfinished_blocks()
        base = device.base_bytes + (FIRST_STEP_BYTES if device.is_shared else 0)
        around = {"outer": outer_bytes(shape), "base": base}
        lost = self._lost()
        activations = peak_activations(Sizes(shape, is_ramp, is_gpu=not device.is_shared))
        if device.is_shared:
            activations += int(SPREAD * activations) + SPREAD_BYTES
        travelling = max(self._gradients_under_way(), self._weights_under_way(kept))
        yield _parts_of(
            kept, around, activations=activations, buffers=lost + travelling + self._messages()
        )
        yield _parts_of(kept, around, buffers=lost + self._updates())
        latent = sum(h.numel for h in shape.parameters() if h.kind != "second use")
        at_start = {**kept, "gradients": 0, "moments": 0}
        yield _parts_of(at_start, around, buffers=latent * shape.wide_bytes)

    def _unfinished_blocks(self) -> int:
        """Layout-exact training: sums of blocks that wait for others."""
        shape = self.shape
        if not shape.is_exact:
            return 0
        blocks = max(1, tree_blocks(shape.microbatches * shape.dp) // shape.dp)
        return int(math.log2(blocks)) * self._sums()

    def _sums(self) -> int:
        """Bytes of this rank's own sums of all gradients."""
        dp = self.shape.dp
        parts = sum(dp * held.part(dp) for held in self.shape.parameters())
        return parts * self.shape.wide_bytes

    def _bucket(self) -> int:
        """Elements of a large bucket that is not the largest tensor."""
        return int(bucket_limit(self.shape.config.parallel.bucket_mb, self.shape.dp))

    def _elements_of(self, buckets: int) -> int:
        """Of so many buckets, the largest ones."""
        tensors = [held.numel for held in self.shape.parameters()]
        largest = max(tensors, default=0)
        bucket = self._bucket()
        return min(sum(tensors), max(bucket, largest) + (buckets - 1) * bucket)

    def _gradients_under_way(self) -> int:
        """Of buckets that travel: what is sent if it is another copy, and what comes; of the one
        that is added up, sums in fp32; with ``zero_stage`` 2 also the sums that are sent."""
        shape = self.shape
        if shape.dp == 1:
            return 0
        wire, wide = shape.wire_bytes, shape.wide_bytes
        is_each = shape.sums_travel_each_microbatch
        has_copy = wire != wide or shape.dp_intra is not None
        each = wire * (2 if has_copy else 1) + (wide if is_each else 0)
        elements = self._elements_of(MAX_IN_FLIGHT if is_each else TRAVELLING)
        total = elements * each
        one = self._elements_of(1)
        total += one * wide // 2 + (one * wide if wire != wide else 0)
        if is_each:  # and what is open: layers' weights and others
            total += (self._elements_of(MAX_IN_FLIGHT + 2) - elements) * wide
        if not shape.is_sharded:  # all buckets are gathered at once, beside what is gathered
            total += self._sums() // shape.dp
        return total

    def _weights_under_way(self, kept: dict[str, int]) -> int:
        """New codes and dense weights, all at once as they are published."""
        shape = self.shape
        if not shape.is_sharded:
            return 0
        codes = sum(
            shape.dp * held.code_part(shape.dp)
            for held in shape.parameters()
            if held.kind == "ternary" and kept["codes"]
        )
        weights = codes + kept["dense weights"]
        return weights + weights // shape.dp

    def _messages(self) -> int:
        """Between stages: gradients that leave, and one of each kind that arrives."""
        shape = self.shape
        if shape.pp == 1:
            return 0
        sizes = Sizes(shape)
        sends_gradients = any(not layout.embedding for layout in shape.layouts)
        return (2 + (min(MAX_SENDS, shape.microbatches) if sends_gradients else 0)) * sizes.hidden

    def _updates(self) -> int:
        """Muon: two rounds of matrices that travel, and three times one that is orthogonalised; or,
        before that, the momentum of a bucket once more."""
        shape = self.shape
        if shape.config.optim.name != "muon":
            return 0
        matrices = [*shape.layer_matrices()]
        largest = max((held.logical_numel for held in matrices), default=0)
        bucket = min(sum(held.numel for held in matrices), max(self._bucket(), largest))
        shares = shape.dp if shape.is_sharded else 1
        return max(5 * largest, bucket // shares) * shape.wide_bytes

    def _lost(self) -> int:
        """What a codec has lost of the last messages, kept for the next ones."""
        shape = self.shape
        config = shape.config
        wire = config.precision.gradients
        has_feedback = config.communication.error_feedback and wire != "ternary"
        if shape.dp == 1 or wire not in COMPRESSED or not has_feedback:
            return 0
        messages = shape.dp // (shape.dp_intra or 1)
        coded = (h for h in shape.parameters() if is_coded(h.kind, h.logical_numel, config))
        return sum(messages * held.part(shape.dp) for held in coded) * shape.wide_bytes


def peak_activations(sizes: Sizes) -> int:
    """The most that forward and backward passes of a step take at a time on a rank."""
    shape = sizes.shape
    schedule, rank = shape.plan.schedule, shape.pipeline_rank
    last = schedule.placement.num_stages - 1
    chunks = [
        chunk_activations(sizes, layout, schedule.placement.stage(rank, chunk) == last)
        for chunk, layout in enumerate(shape.layouts)
    ]
    live = peak = 0
    for compute in schedule.computes(rank):
        most, before, after = _change(compute, chunks[compute.chunk])
        peak = max(peak, live - before + most)
        live += after - before
    return peak


def chunk_activations(sizes: Sizes, layout: StageLayout, is_last: bool) -> Activations:
    """Of one microbatch on a stage.

    Args:
        is_last: whether its output is the loss.
    """
    parts, shape = [*_parts(sizes, layout)], sizes.shape
    # The output, at which its gradient begins; rotations' tables are the same for all layers.
    output = 0 if is_last else sizes.hidden
    tables = shape.config.data.seq_length * shape.config.model.head_dim * sizes.compute
    kept = forward = output + (tables if layout.layers else 0)
    for part in parts:
        forward = max(forward, kept + part.forward)
        kept += part.kept
    backward = input_gradient = live = live_apart = kept
    for part in reversed(parts):
        live -= part.kept
        live_apart -= part.kept
        backward = max(backward, live + part.backward)
        input_gradient = max(input_gradient, live_apart + part.input_gradient)
        live_apart += part.put_off
    put_off = waiting = weight_gradient = sum(part.put_off for part in parts)
    for part in reversed(parts):
        waiting -= part.put_off
        weight_gradient = max(weight_gradient, waiting + part.weight_gradient)
    return Activations(kept, put_off, forward, backward, input_gradient, weight_gradient)


def _parts(sizes: Sizes, layout: StageLayout) -> Iterator[Activations]:
    if layout.embedding:
        yield embedding_activations(sizes)
    chosen = sizes.shape.config.train.recompute_layers
    found: dict[bool, Activations] = {}
    for layer in layout.layers:
        is_chosen = chosen is None or layer in chosen
        if is_chosen not in found:
            found[is_chosen] = layer_activations(sizes, layer)
        yield found[is_chosen]
    if layout.head:
        yield head_activations(sizes)


def _change(compute: Compute, of: Activations) -> tuple[int, int, int]:
    """Bytes at the most while ``compute`` runs; before it; after it."""
    match compute:
        case Forward():
            return of.forward, 0, of.kept
        case Backward():
            return of.backward, of.kept, 0
        case InputGradient():
            return of.input_gradient, of.kept, of.put_off
        case WeightGradient():
            return of.weight_gradient, of.put_off, 0
    raise TypeError(f"{compute} is no known compute")


def _parts_of(
    kept: dict[str, int], around: dict[str, int], activations: int = 0, buffers: int = 0
) -> dict[str, int]:
    parts = {**kept, **around, "activations": activations, "buffers": buffers}
    return {part: parts[part] for part in PARTS}
