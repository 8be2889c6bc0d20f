"""The sizes of what one rank holds and computes on, from the configuration alone.

``traffic`` and ``memory`` say with them what a run should send and keep. Nothing here looks at a
model: parameters are listed by the rules of the design, so that a model that is built otherwise is
noticed.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from megabit.config import Config
from megabit.data_parallel.layout import ALIGNMENT, Kind
from megabit.model.kv_heads import HeadSplit
from megabit.pipeline.layout import StageLayout
from megabit.pipeline.plan import StagePlan
from megabit.tensor_parallel import BlockPartition
from megabit_kernels.packing import CODES_PER_BYTE, packed_width


@dataclass(frozen=True)
class Held:
    """A rank's part ``[rows, columns]`` of a parameter; a gain has one column."""

    kind: Kind
    rows: int
    columns: int
    logical_numel: int
    """Elements of the whole parameter."""

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
        num_bytes = -(-self.rows // ranks) * packed_width(self.columns)
        alignment = ALIGNMENT // CODES_PER_BYTE
        return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class RankShape:
    """One rank of a run."""

    config: Config
    world_size: int
    """Of its island."""
    rank: int
    """In its island."""
    plan: StagePlan
    """Of the run; to make it anew takes as long as to prove its schedule."""
    dp_intra: int | None = None
    """DP ranks of the inner level, where gradients go in two."""

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
    def pipeline_rank(self) -> int:
        """The ranks of a pipeline rank are neighbours, and in it those of a TP group."""
        return self.rank // (self.tp * self.dp)

    @property
    def layouts(self) -> tuple[StageLayout, ...]:
        """What is on this rank's stages."""
        return self.plan.of_rank(self.pipeline_rank)

    @property
    def layers(self) -> list[int]:
        """Of all of its stages, by their index in the model."""
        return [layer for layout in self.layouts for layer in layout.layers]

    @property
    def has_embedding(self) -> bool:
        return any(layout.embedding for layout in self.layouts)

    @property
    def has_head(self) -> bool:
        return any(layout.head for layout in self.layouts)

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
        islands = self.config.outer.islands
        return train.global_batch_size // train.micro_batch_size // self.dp // islands

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
        """Of a gradient on its way over DP, unless it is coded."""
        return 2 if self.config.precision.gradients == "bfloat16" else self.wide_bytes

    def parameters(self) -> Iterator[Held]:
        """What this rank holds of each parameter, and the gradient of a tied head once more where
        it is kept apart from the embedding's: on another stage, or in layout-exact training."""
        model = self.config.model
        tied = model.tie_word_embeddings
        hidden, vocab = model.hidden_size, model.vocab_size
        embedding = Held("matrix", self._width(vocab), hidden, vocab * hidden)
        if self.has_embedding or (self.has_head and tied):
            yield embedding
        for _ in self.layers:
            yield from self._layer
        if self.has_head:
            yield self._hidden_gain()
            if not tied:
                yield embedding  # as large as the head
        is_apart = self.is_exact or len(self.layouts) > 1
        if is_apart and tied and self.has_embedding and self.has_head:
            yield dataclasses.replace(embedding, kind="second use")

    def layer_matrices(self) -> Iterator[Held]:
        """Those of ``parameters`` that are matrices of layers."""
        for _ in self.layers:
            yield from (held for held in self._layer if held.kind in ("ternary", "matrix"))

    def recomputing_layers(self) -> int:
        """Layers of this rank that compute something again backward."""
        train = self.config.train
        if train.recompute == "none":
            return 0
        chosen = train.recompute_layers
        return sum(chosen is None or layer in chosen for layer in self.layers)

    @cached_property
    def _layer(self) -> tuple[Held, ...]:
        return tuple(self._of_layer())

    def _of_layer(self) -> Iterator[Held]:
        model = self.config.model
        hidden = model.hidden_size
        linear: Kind = "ternary" if self.is_ternary else "matrix"
        heads, ffn = self._width(hidden), self._width(model.intermediate_size)
        split = HeadSplit(
            model.num_attention_heads, model.num_key_value_heads, self.rank % self.tp, self.tp
        )
        kv = len(split.kv) * model.head_dim
        all_kv, all_ffn = model.num_key_value_heads * model.head_dim, model.intermediate_size
        placement = model.norm_placement
        for inputs, columns, wide in (
            (((heads, hidden), (kv, all_kv), (kv, all_kv)), heads, hidden),
            (((ffn, all_ffn), (ffn, all_ffn)), ffn, all_ffn),
        ):
            if placement != "in_linear":
                yield self._hidden_gain()
            for rows, all_rows in inputs:  # q, k, v; gate, up
                yield Held(linear, rows, hidden, all_rows * hidden)
                if placement == "per_proj":
                    yield self._hidden_gain()
            if placement in ("subln", "per_proj"):
                yield Held("gain", columns, 1, wide)
            yield Held(linear, hidden, columns, hidden * wide)  # o; down

    def _hidden_gain(self) -> Held:
        """Of a norm between layers. Under sequence parallelism its gradient is a sum over TP, which
        layout-exact training takes in each microbatch, else the step once."""
        is_partial = self.config.parallel.sequence_parallel and not self.is_exact
        size = self.config.model.hidden_size
        return Held("partial gain" if is_partial else "gain", size, 1, size)

    def _width(self, size: int) -> int:
        """This rank's part of a dimension that TP splits."""
        blocks = BlockPartition(size, self.config.model.num_attention_heads)
        return blocks.span(self.rank % self.tp, self.tp).width
