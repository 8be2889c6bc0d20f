"""The sizes that a rank's activations are made of: tokens, widths, bytes of a number."""

from dataclasses import dataclass
from functools import cached_property

from megabit.model.kv_heads import HeadSplit
from megabit.tensor_parallel import BlockPartition
from megabit.training.shapes import RankShape


@dataclass(frozen=True)
class Sizes:
    """Of one rank, in training."""

    shape: RankShape
    is_ramp: bool = False
    """While weights are W̃ with λ < 1 (``train.quantization_ramp``)."""
    is_gpu: bool = False
    """Whether kernels read codes as they are. On a CPU, backward products have operands of their
    own: codes and int8 inputs as numbers of the operands' dtype."""

    @cached_property
    def tokens(self) -> int:
        """T: of a microbatch."""
        return self.shape.tokens

    @cached_property
    def own_tokens(self) -> int:
        """t: between layers."""
        parallel = self.shape.config.parallel
        return self.tokens // parallel.tp if parallel.sequence_parallel else self.tokens

    @cached_property
    def compute(self) -> int:
        """Bytes of a number that is computed with."""
        return self.shape.compute_bytes

    @cached_property
    def wide(self) -> int:
        """Bytes of a statistic, and of a gradient that codes or a norm give."""
        return self.shape.wide_bytes

    @cached_property
    def hidden_size(self) -> int:
        """H."""
        return self.shape.config.model.hidden_size

    @cached_property
    def hidden(self) -> int:
        """Bytes of ``[t, H]``."""
        return self.own_tokens * self.hidden_size * self.compute

    @cached_property
    def whole_hidden(self) -> int:
        """Bytes of ``[T, H]``."""
        return self.tokens * self.hidden_size * self.compute

    @cached_property
    def heads(self) -> HeadSplit:
        """Which query and KV heads the rank has."""
        model, tp = self.shape.config.model, self.shape.tp
        rank = self.shape.rank % tp
        return HeadSplit(model.num_attention_heads, model.num_key_value_heads, rank, tp)

    @cached_property
    def queries(self) -> int:
        """Columns of this rank's query heads."""
        return self._width(self.hidden_size)

    @cached_property
    def keys(self) -> int:
        """Columns of the KV heads that they read."""
        return len(self.heads.kv) * self.shape.config.model.head_dim

    @cached_property
    def ffn(self) -> int:
        """This rank's columns of the feed-forward layer."""
        return self._width(self.shape.config.model.intermediate_size)

    @cached_property
    def vocabulary(self) -> int:
        """This rank's rows of the embedding and of the head."""
        return self._width(self.shape.config.model.vocab_size)

    @cached_property
    def is_expanded(self) -> bool:
        """Whether keys and values are copied for each query head (``KVHeads.expand``)."""
        split = self.heads
        is_one_to_one = split.kv_of_query == list(range(len(split.kv)))
        return not is_one_to_one or split.kv_heads % split.degree != 0

    @cached_property
    def quantizes(self) -> bool:
        """Whether layers' inputs are quantized, if only in part."""
        return self.shape.is_ternary and self.shape.config.model.activations != "full"

    @cached_property
    def adds_integers(self) -> bool:
        """Whether layers' products are of codes."""
        return self.quantizes and not self.is_ramp

    @cached_property
    def operand(self) -> int:
        """Bytes of an operand of a layer's backward products."""
        backward = self.shape.config.precision.ternary_backward
        own = {"compute": self.compute, "bfloat16": 2, "int8": 1}[backward]
        return own if self.adds_integers else self.compute

    @cached_property
    def has_sub_norm(self) -> bool:
        """Whether there is a norm before row-parallel layers."""
        return self.shape.config.model.norm_placement != "prenorm"

    @cached_property
    def has_hadamard(self) -> bool:
        return self.shape.config.model.hadamard

    @cached_property
    def input_norms(self) -> bool:
        """Whether column-parallel layers have norms of their own."""
        return self.shape.config.model.norm_placement == "per_proj"

    def of(self, columns: int) -> int:
        """Bytes of ``[T, columns]``."""
        return self.tokens * columns * self.compute

    def product_input(self, columns: int) -> int:
        """What a layer's product keeps of an input ``[T, columns]``: int8 codes and scales, or
        numbers."""
        if self.adds_integers:
            return self.tokens * (columns + self.wide)
        return self.of(columns)

    def _width(self, size: int) -> int:
        blocks = BlockPartition(size, self.shape.config.model.num_attention_heads)
        return blocks.span(self.shape.rank % self.shape.tp, self.shape.tp).width
