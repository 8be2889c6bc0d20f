"""The sizes of what one rank holds and computes on, from the configuration alone.

``traffic`` and ``memory`` say with them what a run should send and keep. Nothing here looks at a
model: parameters are listed by the rules of the design, so that a model that is built otherwise is
noticed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megabit.config import Config
from megabit.data_parallel.layout import ALIGNMENT, CODES_PER_BYTE, Kind
from megabit.model.kv_heads import HeadSplit
from megabit.pipeline.layout import StageLayout, stage_layouts
from megabit.tensor_parallel import BlockPartition


@dataclass(frozen=True)
class Held:
    """A rank's part ``[rows, columns]`` of a parameter; a gain has one column."""

    kind: Kind
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def share(self, ranks: int) -> int:
        """Elements that each of ``ranks`` DP ranks has of it, ``ceil(rows / ranks)`` rows."""
        return -(-self.rows // ranks) * self.columns

    def part(self, ranks: int) -> int:
        """Elements of ``share`` in a bucket, where each tensor begins at a multiple of 64. A bucket
        adds nothing to that, so its size does not matter."""
        return -(-self.share(ranks) // ALIGNMENT) * ALIGNMENT

    def code_part(self, ranks: int) -> int:
        """Bytes of its packed codes in a bucket: whole bytes for each row, 4 codes to one."""
        num_bytes = -(-self.rows // ranks) * -(-self.columns // CODES_PER_BYTE)
        alignment = ALIGNMENT // CODES_PER_BYTE
        return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class RankShape:
    """One rank of a run."""

    config: Config
    world_size: int
    rank: int

    @property
    def tp(self) -> int:
        return self.config.parallel.tp

    @property
    def pp(self) -> int:
        return self.config.parallel.pp

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    @property
    def layout(self) -> StageLayout:
        """What is on this rank's stage. A stage's ranks are neighbours, and in it those of a TP
        group."""
        stages = self.config.parallel.layers_per_stage
        layers = self.config.model.num_hidden_layers
        return stage_layouts(layers, self.pp, stages)[self.rank // (self.tp * self.dp)]

    @property
    def is_ternary(self) -> bool:
        return self.config.model.linear == "ternary"

    @property
    def is_exact(self) -> bool:
        """Whether training is layout-exact."""
        return self.config.parallel.exact == "full"

    @property
    def is_sharded(self) -> bool:
        """Whether each DP rank has its own part of masters and moments."""
        return self.config.optim.zero_stage > 0 and self.dp > 1

    @property
    def sums_travel_each_microbatch(self) -> bool:
        """Whether matrices' gradients are reduced in each microbatch."""
        return self.config.optim.zero_stage == 2 and self.dp > 1

    @property
    def microbatches(self) -> int:
        """Of a step, on this rank."""
        train = self.config.train
        return train.global_batch_size // train.micro_batch_size // self.dp

    @property
    def tokens(self) -> int:
        """T: of a microbatch."""
        return self.config.train.micro_batch_size * self.config.data.seq_length

    @property
    def compute_bytes(self) -> int:
        """Of a number that is computed with: activations, dense matrices."""
        dtype: torch.dtype = getattr(torch, self.config.precision.compute)
        return dtype.itemsize

    @property
    def wide_bytes(self) -> int:
        """Of a statistic, a master weight or a sum of gradients: fp32, or fp64 if compute is."""
        return max(4, self.compute_bytes)

    @property
    def wire_bytes(self) -> int:
        """Of a gradient on its way over DP."""
        return 2 if self.config.precision.gradients == "bfloat16" else self.wide_bytes

    def parameters(self) -> Iterator[Held]:
        """What this rank holds of each parameter, and the gradient of a tied head once more in
        layout-exact training on one stage."""
        model, layout = self.config.model, self.layout
        tied = model.tie_word_embeddings
        embedding = Held("matrix", self._width(model.vocab_size), model.hidden_size)
        if layout.embedding or (layout.head and tied):
            yield embedding
        for _ in layout.layers:
            yield from self._layer()
        if layout.head:
            yield self._hidden_gain()
            if not tied:
                yield embedding  # as large as the head
        if self.is_exact and tied and layout.embedding and layout.head:
            yield Held("second use", embedding.rows, embedding.columns)

    def recomputing_layers(self) -> int:
        """Layers of this stage that compute something again backward."""
        train = self.config.train
        if train.recompute == "none":
            return 0
        chosen = train.recompute_layers
        return sum(chosen is None or layer in chosen for layer in self.layout.layers)

    def _layer(self) -> Iterator[Held]:
        model = self.config.model
        hidden = model.hidden_size
        linear: Kind = "ternary" if self.is_ternary else "matrix"
        heads, ffn = self._width(hidden), self._width(model.intermediate_size)
        split = HeadSplit(
            model.num_attention_heads, model.num_key_value_heads, self.rank % self.tp, self.tp
        )
        kv = len(split.kv) * model.head_dim
        yield self._hidden_gain()
        for rows in (heads, kv, kv):  # q, k, v
            yield Held(linear, rows, hidden)
        yield Held("gain", heads, 1)
        yield Held(linear, hidden, heads)  # o
        yield self._hidden_gain()
        for rows in (ffn, ffn):  # gate, up
            yield Held(linear, rows, hidden)
        yield Held("gain", ffn, 1)
        yield Held(linear, hidden, ffn)  # down

    def _hidden_gain(self) -> Held:
        """Of a norm between layers. Under sequence parallelism its gradient is a sum over TP, which
        layout-exact training takes in each microbatch, else the step once."""
        is_partial = self.config.parallel.sequence_parallel and not self.is_exact
        return Held("partial gain" if is_partial else "gain", self.config.model.hidden_size, 1)

    def _width(self, size: int) -> int:
        """This rank's part of a dimension that TP splits."""
        blocks = BlockPartition(size, self.config.model.num_attention_heads)
        return blocks.span(self.rank % self.tp, self.tp).width
