"""What a layer computes on a rank, counted in terms: see ``compute``.

With c bytes of a number in ``precision.compute``, w of a statistic (4, or 8 in fp64) and o a
conversion (c + w where c < w, else 0), elementwise passes read and write, for each element:

=========================  =================================  ====================================
what                       forward                            backward
=========================  =================================  ====================================
norm                       10·w + 2·o                         19·w + 3·o
quantization               c + 1; its range, if no norm
                           knows it: 3·c more
column output, row input   (of the product)                   dX: 2·w + o; 3·w to add one to others
row output, tp > 1         4 + 4·w + o: scaled after the sum
rotation of q and k        7·c                                7·c
attention                  k, v into pages: 4·c
grouped queries            4·c for k and v of all heads       8·c
act(gate) · up             relu2: 8·c, silu: 14·c             13·c, 28·c
residual sum               3·c                                3·c
dY for dW                                                     c + w + o (in W; int8: c + 1)
x_q for dW                                                    1 + c (in W)
dW into its bucket                                            2·w + c for each weight (in W)
=========================  =================================  ====================================

Operands and results of a product are read and written once more: x, W and y in what they are kept
in.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megabit.model.kv_heads import HeadSplit
from megabit.pipeline.balance import PartCost
from megabit.plan.machine import Rates, Term
from megabit.tensor_parallel import BlockPartition
from megabit.training.shapes import RankShape

Work = Mapping[Term, float]
"""Units by term."""
Units = defaultdict[Term, float]
"""The same while they are counted."""

CODE_BYTES = 0.25
GATE = {"relu2": (8, 13), "silu": (14, 28)}
"""Numbers that are read and written for each one of act(gate) · up, forward and backward."""


@dataclass(frozen=True)
class PartWork:
    """Of a part of the model, for one microbatch."""

    forward: Work
    input_gradient: Work
    weight_gradient: Work

    def cost(self, rates: Rates) -> PartCost:
        """Seconds."""
        return PartCost(
            rates.of(self.forward), rates.of(self.input_gradient), rates.of(self.weight_gradient)
        )


def units(*parts: Work) -> Units:
    """The sum of ``parts``."""
    total: Units = defaultdict(float)
    for part in parts:
        for term, count in part.items():
            total[term] += count
    return total


def layer_work(shape: RankShape) -> PartWork:
    """Of one layer of a rank, with what most of its layers recompute."""
    layer = _Layer(shape)
    forward, backward = layer.forward(), layer.input_gradient()
    if 2 * shape.recomputing_layers() >= max(1, len(shape.layers)):
        backward = units(backward, layer.recomputed())
    return PartWork(forward, backward, layer.weight_gradient())


def norm_bytes(shape: RankShape) -> tuple[float, float]:
    """For each element, forward and backward."""
    wide, conversion = shape.wide_bytes, _conversion(shape)
    return 10 * wide + 2 * conversion, 19 * wide + 3 * conversion


def collected_bytes(shape: RankShape, gradient_bytes: int) -> int:
    """For each element of a weight's gradient, on its way into its bucket."""
    return 2 * shape.wide_bytes + gradient_bytes


def own_tokens(shape: RankShape) -> int:
    """t: of a microbatch, between the layers."""
    return shape.tokens // (shape.tp if shape.config.parallel.sequence_parallel else 1)


def width(shape: RankShape, size: int) -> int:
    """A rank's part of a dimension that TP splits."""
    blocks = BlockPartition(size, shape.config.model.num_attention_heads)
    return blocks.span(shape.rank % shape.tp, shape.tp).width


def _conversion(shape: RankShape) -> int:
    narrow = shape.compute_bytes < shape.wide_bytes
    return shape.compute_bytes + shape.wide_bytes if narrow else 0


@dataclass(frozen=True)
class _Layer:
    shape: RankShape

    @cached_property
    def heads(self) -> int:
        """Columns of q."""
        return width(self.shape, self.shape.config.model.hidden_size)

    @cached_property
    def kv(self) -> int:
        """Columns of k."""
        model, rank = self.shape.config.model, self.shape.rank % self.shape.tp
        split = HeadSplit(model.num_attention_heads, model.num_key_value_heads, rank, self.shape.tp)
        return len(split.kv) * model.head_dim

    @cached_property
    def ffn(self) -> int:
        """Columns of gate."""
        return width(self.shape, self.shape.config.model.intermediate_size)

    @cached_property
    def column_groups(self) -> tuple[tuple[int, ...], ...]:
        """Output features of column-parallel layers, together those with one input."""
        groups: tuple[tuple[int, ...], ...] = ((self.heads, self.kv, self.kv), (self.ffn, self.ffn))
        if self.shape.config.model.norm_placement == "per_proj":
            return tuple((n,) for group in groups for n in group)
        return groups

    @property
    def rows(self) -> tuple[int, int]:
        """Input features of row-parallel layers, o and down."""
        return self.heads, self.ffn

    @cached_property
    def has_codes(self) -> bool:
        """Whether products are of int8 and codes."""
        return self.shape.is_ternary and self.shape.config.model.activations != "full"

    @cached_property
    def weights(self) -> int:
        """Elements of all seven."""
        hidden = self.shape.config.model.hidden_size
        return hidden * (sum(map(sum, self.column_groups)) + sum(self.rows))

    @cached_property
    def between(self) -> int:
        """Elements of ``[t, H]``."""
        return own_tokens(self.shape) * self.shape.config.model.hidden_size

    @cached_property
    def whole(self) -> int:
        """Elements of ``[T, H]``."""
        return self.shape.tokens * self.shape.config.model.hidden_size

    def forward(self) -> Units:
        """Of F."""
        work = units(self._column_products(), self._between_products(), self._row_products())
        norm, _ = norm_bytes(self.shape)
        norms = 2 if self.shape.config.model.norm_placement != "per_proj" else 7
        compute = self.shape.compute_bytes
        work["forward bytes"] += self.between * (norms * norm + 2 * 3 * compute)
        work["layer forward"] += 1
        return work

    def recomputed(self) -> Units:
        """What B computes again of F, at the rates of F."""
        if self.shape.config.train.recompute == "none":
            return units()
        work = self._between_products()
        if self.shape.config.train.recompute == "full":
            work = units(work, self._column_products())
            norm, _ = norm_bytes(self.shape)
            work["forward bytes"] += 2 * self.between * norm
        if not self.has_codes:
            work = units(work, self._row_products())
        work["layer forward"] += 1
        return work

    def input_gradient(self) -> Units:
        """Of B."""
        shape, model = self.shape, self.shape.config.model
        compute, wide, tokens = shape.compute_bytes, shape.wide_bytes, shape.tokens
        conversion = _conversion(shape)
        work = units()
        work[_backward_term(shape, self.has_codes, "input gradient product")] += (
            tokens * self.weights
        )
        if self.has_codes:
            work["unpacked code"] += self.weights
        moved = 0.0 + self.weights * compute
        for group in self.column_groups:
            moved += tokens * sum(group) * compute
            moved += self.whole * (len(group) * (2 * wide + conversion) + conversion)
            moved += self.whole * (len(group) - 1) * 3 * wide
        for columns in self.rows:
            moved += self.whole * compute + tokens * columns * (2 * wide + 2 * conversion)
        _, norm = norm_bytes(shape)
        if model.norm_placement != "prenorm":
            moved += tokens * sum(self.rows) * norm
        norms = 2 if model.norm_placement != "per_proj" else 7
        moved += self.between * (norms * norm + 2 * 3 * compute)
        moved += tokens * (self.heads + self.kv) * 7 * compute
        if self._expands:
            moved += tokens * self.heads * 8 * compute
        moved += tokens * self.heads * 8 * compute  # q, k, v, y, dY and the three results
        moved += tokens * self.ffn * GATE[model.hidden_act][1] * compute
        if model.hadamard:
            moved += tokens * sum(self.rows) * 4 * compute
        work["input gradient bytes"] += moved
        work["attention gradient"] += 2.5 * self._attention
        work["layer input gradient"] += 1
        return work

    def weight_gradient(self) -> Units:
        """Of W."""
        shape = self.shape
        compute, wide, tokens = shape.compute_bytes, shape.wide_bytes, shape.tokens
        work = units()
        work[_backward_term(shape, self.has_codes, "weight gradient product")] += (
            tokens * self.weights
        )
        outputs = tokens * sum(map(sum, self.column_groups)) + 2 * self.whole
        inputs = self.whole * len(self.column_groups) + tokens * sum(self.rows)
        moved = (outputs + inputs) * compute
        gradient = compute
        if self.has_codes:
            is_int8 = shape.config.precision.ternary_backward == "int8"
            gradient = wide if is_int8 else compute
            scaled = compute + 1 if is_int8 else compute + wide + _conversion(shape)
            moved += outputs * scaled + inputs * (2 if is_int8 else 1 + compute)
        moved += self.weights * (gradient + collected_bytes(shape, gradient))
        work["weight gradient bytes"] += moved
        work["layer weight gradient"] += 1
        return work

    def _column_products(self) -> Units:
        """Quantization, q, k, v, gate and up."""
        work = units()
        hidden, tokens = self.shape.config.model.hidden_size, self.shape.tokens
        compute = self.shape.compute_bytes
        outputs = sum(map(sum, self.column_groups))
        self._add_products(work, hidden * outputs)
        moved = tokens * outputs * compute
        if self.has_codes:
            moved += len(self.column_groups) * (self.between * (compute + 1) + self.whole)
        else:
            moved += len(self.column_groups) * self.whole * compute
        work["forward bytes"] += moved
        return work

    def _between_products(self) -> Units:
        """Rotation, attention, gate, the norms before o and down, and quantization there."""
        model, tokens = self.shape.config.model, self.shape.tokens
        compute = self.shape.compute_bytes
        norm, _ = norm_bytes(self.shape)
        inputs = tokens * sum(self.rows)
        moved = tokens * (7.0 * self.heads + 7.0 * self.kv) * compute
        moved += tokens * self.kv * 4 * compute + tokens * self.heads * 4 * compute
        if self._expands:
            moved += tokens * self.heads * 4 * compute
        moved += tokens * self.ffn * GATE[model.hidden_act][0] * compute
        if model.norm_placement != "prenorm":
            moved += inputs * norm
        if model.hadamard:
            moved += inputs * 4 * compute
        if self.has_codes:
            has_range = model.norm_placement != "prenorm" and not model.hadamard
            moved += inputs * (compute + 1 + (0 if has_range else 3 * compute))
        work = units()
        work["forward bytes"] += moved
        work["attention"] += self._attention
        return work

    def _row_products(self) -> Units:
        """o and down, and the scaling behind a sum over ranks."""
        shape, compute = self.shape, self.shape.compute_bytes
        work = units()
        self._add_products(work, shape.config.model.hidden_size * sum(self.rows))
        read = shape.tokens * sum(self.rows) * (1 if self.has_codes else compute)
        written = 2 * self.whole * compute
        if self.has_codes and shape.tp > 1:
            scaled = 2 * self.between
            written = 2 * self.whole * 4
            written += scaled * (4 + 3 * shape.wide_bytes + _conversion(shape))
        work["forward bytes"] += read + written
        return work

    def _add_products(self, work: Units, weights: int) -> None:
        term: Term = "ternary product" if self.has_codes else "dense product"
        work[term] += self.shape.tokens * weights
        kept = CODE_BYTES if self.has_codes else self.shape.compute_bytes
        work["forward bytes"] += weights * kept

    @property
    def _attention(self) -> float:
        """Multiply-adds of scores and of weighted values: each token meets those before it."""
        shape = self.shape
        return shape.tokens * (shape.config.data.seq_length + 1) * self.heads

    @property
    def _expands(self) -> bool:
        """Whether keys and values are copied for each query head."""
        model, tp = self.shape.config.model, self.shape.tp
        is_shared = model.num_key_value_heads % tp != 0
        return is_shared or self.kv != self.heads


def _backward_term(shape: RankShape, has_codes: bool, product: Term) -> Term:
    """The term of a backward product, by what its operands are."""
    how = shape.config.precision.ternary_backward
    if not has_codes or how == "compute" or how == shape.config.precision.compute:
        return product
    terms: dict[tuple[str, Term], Term] = {
        ("bfloat16", "input gradient product"): "bfloat16 input gradient product",
        ("bfloat16", "weight gradient product"): "bfloat16 weight gradient product",
        ("int8", "input gradient product"): "int8 input gradient product",
        ("int8", "weight gradient product"): "int8 weight gradient product",
    }
    return terms[how, product]
