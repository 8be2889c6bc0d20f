"""What one optimizer step sends, by formula: the figure beside ``mesh.sent()``.

In the words of docs/architecture.md, with m microbatches of T tokens on a rank, and r the ranks of
the axis. A ring sends ``2 (r−1)/r · n`` bytes for an all-reduce of n bytes, and half of it for an
all-gather to n, a reduce-scatter of n or an all-to-all of n. ``c`` are the bytes of a number in
``precision.compute``, ``w`` those of fp32 (fp64 if compute is); H is hidden, A heads, kv·D KV rows.
Under sequence parallelism (SP) each all-reduce of ``[T, H]`` is a reduce-scatter.

For each microbatch, over **tp**:

=====================  ====================================  =====================================
where                  forward                               backward
=====================  ====================================  =====================================
embedding              all-reduce T·H·c                      SP: all-gather T·H·c
2 column inputs        SP: all-gather T·(H + w), int8 and    all-reduce T·H·c (exact=full: w)
                       scales (dense: T·H·c)
2 sub-norms            all-gather 2·T·A·w                    all-gather T·A·w
2 row outputs          all-reduce T·H·4 (dense: T·H·c)       SP: all-gather T·H·c
KV heads, if shared                                          all-reduce 2·T·kv·D·c
3 other norms                                                exact=full and SP: all-reduce H·w
head                   SP: all-gather T·H·c                  all-reduce T·H·c
loss                   all-reduce T·w, all-gather T·(A+r)·w
=====================  ====================================  =====================================

Label smoothing gathers T·A·w more for the loss. ``norm_placement: per_proj`` makes 5 column inputs
and 8 other norms, ``prenorm`` no sub-norms, ``in_linear`` one other norm with a gain. Without
sub-norms, and behind a Hadamard transform, an all-reduce of T·w gives the range of each row input;
a4.8 takes one of 512·T for o's.

``exact16`` sends for a row output an all-to-all of ``2·T·H + 2·r`` (int16 and a flag) and, without
SP, an all-gather of T·H·c, T being rounded up to a multiple of r; an overflow sends T·H·4 more,
which is not expected. Recomputation repeats what a ternary layer sends for its column inputs, if it
is ``full``, and a dense layer's row outputs. With full-precision activations, or at λ < 1 of a
quantization ramp, a ternary layer sends what a dense one does.

For each microbatch, over **pp**: T·H·c (SP: a TP rank's part) up from each stage but the last, and
down from each but the first, where the other stage is on another rank. For each step a tied
embedding's gradient, where two ranks have it.

For each step, over **dp**, with P the elements that a DP rank has of a stage's tensors, each cut
into r parts by rows and these padded to 64: (r−1)·P gradients (2 or w bytes; zero_stage 2: of
matrices for each microbatch), and (r−1)·P weights: 1/4 byte of ternary ones, c of dense matrices, w
of gains. zero_stage 0 sends (r−1)·P sums of w bytes instead of weights. Over tp the gradients of
gains that ranks have for their own tokens; over the stage's ranks 16 bytes for each ternary tensor,
for γ (8 KiB for a median); and six numbers of 8 bytes: tokens that count and all, objective and
loss, and two for the norm.
Ternary weights for a forward pass at λ < 1 travel as dense matrices do. What Muon sends over the
stage's ranks is in ``muon_traffic``.

In two levels, of i ranks on each of j hosts, (i−1)·j·P gradients and weights travel on **dp**,
inside hosts, and (j−1)·P on **dp_inter**, across: 1/i of what one level would send there. Coded
gradients (``data_parallel.codecs``) have bytes of their own in place of P, in the slower level, and
4 for each tensor's maximum if the codec needs it.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from megabit.config import Config
from megabit.data_parallel.codecs import codec_of
from megabit.data_parallel.layout import REDUCED_EACH_MICROBATCH
from megabit.data_parallel.zero import is_coded
from megabit.pipeline.plan import StagePlan
from megabit.reduce import Purpose
from megabit.tensor_parallel import TERNARY, Quantization
from megabit.tensor_parallel.activations import LEVELS
from megabit.tensor_parallel.weight_scale import bytes_of_sums
from megabit.training.muon_traffic import sent_updates
from megabit.training.shapes import Held, RankShape

Sent = dict[tuple[str, str], float]
"""Bytes by (axis, purpose), as ``ParallelMesh.sent``."""

Items = Iterator[tuple[str, Purpose, float]]
"""(axis, purpose, bytes)"""

COUNT_BYTES = 4
"""Of a count of codes: int32."""
NUMBER_BYTES = 8
"""Of what ranks agree on: int64 and fp64."""


@dataclass(frozen=True)
class StepKind:
    """What the traffic of a step depends on, beside the configuration."""

    batch_size: int | None = None
    """Samples, over all ranks; None: ``train.global_batch_size``."""
    is_finite: bool = True
    """Whether the gradient is: of one that is not, no norm is taken."""
    is_updated: bool = True
    """Whether weights are changed."""
    quantization: Quantization = TERNARY
    """Of the step's forward passes."""
    next_share: float = 1.0
    """λ of those of the next step. If it is another one, weights are sent in any case."""

    @property
    def publishes(self) -> bool:
        """Whether weights are sent."""
        return self.is_updated or self.next_share != self.quantization.share

    def of(self, config: Config) -> Config:
        """``config`` with the step's batch size."""
        if self.batch_size is None or self.batch_size == config.train.global_batch_size:
            return config
        train = dataclasses.replace(config.train, global_batch_size=self.batch_size)
        return dataclasses.replace(config, train=train)


USUAL = StepKind()
"""An update at λ = 1, with the whole batch."""


def step_traffic(shape: RankShape, kind: StepKind = USUAL) -> Sent:
    """What a rank sends in a step of such a kind; nothing that it sends none of.

    ``shape`` is of the step's batch size (``StepKind.of``).
    """
    quantization = kind.quantization
    recomputing = shape.recomputing_layers()
    total: Sent = {}
    for times, items in (
        (shape.microbatches, _embedding_and_head(shape)),
        (shape.microbatches * len(shape.layers), _layer(shape, quantization)),
        (shape.microbatches * recomputing, _recomputed_layer(shape, quantization)),
        (shape.microbatches, _between_stages(shape)),
        (1, chain(_gradients(shape), _agreement(shape, kind.is_finite))),
        (int(kind.is_updated), _updates(shape)),
        (int(kind.publishes), _weights(shape, kind.next_share)),
    ):
        for axis, purpose, num_bytes in items:
            if times * num_bytes:
                total[axis, purpose] = total.get((axis, purpose), 0) + times * num_bytes
    return total


def total_traffic(
    config: Config,
    world_size: int,
    plan: StagePlan,
    kind: StepKind = USUAL,
    dp_intra: int | None = None,
) -> Sent:
    """What all ranks of an island together send in a step; see ``step_traffic``.

    Args:
        world_size: of the island.
    """
    config = kind.of(config)
    tp = config.parallel.tp
    dp = world_size // (tp * config.parallel.pp)
    total: Sent = {}
    for stage in range(0, world_size, tp * dp):
        for rank in range(stage, stage + tp):  # of the first DP rank; others send the same
            shape = RankShape(config, world_size, rank, plan, dp_intra)
            sent = step_traffic(shape, kind)
            for key, num_bytes in sent.items():
                if key[1] != "updates":  # of which each sends something else
                    total[key] = total.get(key, 0) + dp * num_bytes
        if kind.is_updated:
            shape = RankShape(config, world_size, stage, plan)
            for axis, purpose, num_bytes in _updates(shape, of_all=True):
                total[axis, purpose] = total.get((axis, purpose), 0) + num_bytes
    return total


def megatron_traffic(config: Config, world_size: int, plan: StagePlan) -> Sent:
    """For comparison, what all ranks together would send over dp in Megatron-LM's distributed
    optimizer: gradients as ``precision.gradients``, and weights in bf16, 2 bytes for each."""
    tp = config.parallel.tp
    dp = world_size // (tp * config.parallel.pp)
    gradients = weights = 0.0
    for rank in range(world_size):
        shape = RankShape(config, world_size, rank, plan)
        for held in shape.parameters():
            if held.kind != "second use":
                gradients += ring(held.numel * shape.wire_bytes, dp)
                weights += ring(held.numel * 2, dp)
    return {("dp", "weight gradients"): gradients, ("dp", "weights"): weights} if dp > 1 else {}


def all_reduce(num_bytes: float, ranks: int) -> float:
    """What a ring sends to sum or compare so many bytes."""
    return 2 * ring(num_bytes, ranks)


def ring(num_bytes: float, ranks: int) -> float:
    """What a ring sends for a gather to, a reduce-scatter or an all-to-all of so many bytes."""
    return (ranks - 1) * num_bytes / ranks


def _embedding_and_head(shape: RankShape) -> Items:
    model, tp, wide = shape.config.model, shape.tp, shape.wide_bytes
    row = model.hidden_size * shape.compute_bytes
    if shape.has_embedding:
        yield "tp", "activations", _sum_of_hidden(shape, shape.compute_bytes)
        yield "tp", "activation gradients", _all_tokens(shape, row)
    if shape.has_head:
        yield "tp", "activations", _all_tokens(shape, row)
        yield "tp", "activation gradients", _sum_of_hidden(shape, shape.compute_bytes)
        yield "tp", "weight gradients", _gain_each_time(shape)
        yield "tp", "statistics", all_reduce(shape.tokens * wide, tp)
        sums = 2 if shape.config.loss.label_smoothing else 1
        blocks_and_targets = sums * model.num_attention_heads + tp
        yield "tp", "statistics", ring(shape.tokens * blocks_and_targets * wide, tp)


def _layer(shape: RankShape, quantization: Quantization) -> Items:
    model, tp, tokens, wide = shape.config.model, shape.tp, shape.tokens, shape.wide_bytes
    dense = shape.compute_bytes
    codes = _multiplies_codes(shape, quantization)
    inputs = _column_inputs(shape)
    yield "tp", "activations", inputs * _column_input(shape, codes) + 2 * _row_output(shape, codes)
    # The terms of a tree are not rounded before it.
    dx = _sum_of_hidden(shape, wide if shape.is_exact else dense)
    dy = _all_tokens(shape, model.hidden_size * dense)
    yield "tp", "activation gradients", inputs * dx + 2 * dy
    if model.num_key_value_heads % tp:
        kv = model.num_key_value_heads * model.head_dim
        yield "tp", "activation gradients", all_reduce(2 * tokens * kv * dense, tp)
    forward, backward = 2, 1
    blocks = tokens * model.num_attention_heads * wide
    if model.norm_placement != "prenorm":
        yield "tp", "statistics", 2 * (forward + backward) * ring(blocks, tp)
    yield "tp", "statistics", _row_ranges(shape, quantization)
    gains = {"subln": 2, "prenorm": 2, "in_linear": 0, "per_proj": 7}[model.norm_placement]
    yield "tp", "weight gradients", gains * _gain_each_time(shape)


def _recomputed_layer(shape: RankShape, quantization: Quantization) -> Items:
    codes = _multiplies_codes(shape, quantization)
    if shape.config.train.recompute == "full":
        yield "tp", "activations", _column_inputs(shape) * _column_input(shape, codes)
    if not codes:
        yield "tp", "activations", 2 * _row_output(shape, codes)


def _multiplies_codes(shape: RankShape, quantization: Quantization) -> bool:
    """Whether a layer's products are those of int8 and codes, or of floating-point numbers."""
    is_full = quantization.full_precision_activations or shape.config.model.activations == "full"
    return shape.is_ternary and quantization.share == 1 and not is_full


def _column_inputs(shape: RankShape) -> int:
    """Of a layer: one for q, k and v, and one for gate and up, unless each has its own."""
    return 5 if shape.config.model.norm_placement == "per_proj" else 2


def _row_ranges(shape: RankShape, quantization: Quantization) -> float:
    """For the ranges that o's and down's inputs are quantized in, unless a norm has told them."""
    model = shape.config.model
    is_full = quantization.full_precision_activations or model.activations == "full"
    if is_full or not shape.is_ternary:
        return 0
    sent = 0.0
    if model.norm_placement == "prenorm" or model.hadamard:
        sent += 2 * all_reduce(shape.tokens * shape.wide_bytes, shape.tp)
    if model.activations == "a4.8":
        sent += all_reduce(shape.tokens * LEVELS * COUNT_BYTES, shape.tp)
    return sent


def _sum_of_hidden(shape: RankShape, element_bytes: int) -> float:
    """A sum of ``[T, H]`` over TP, for the tokens that a rank has between the layers."""
    size = shape.tokens * shape.config.model.hidden_size * element_bytes
    is_split = shape.config.parallel.sequence_parallel
    return ring(size, shape.tp) if is_split else all_reduce(size, shape.tp)


def _all_tokens(shape: RankShape, token_bytes: float) -> float:
    """A gather over TP of so many bytes a token, where ranks have only their own."""
    if not shape.config.parallel.sequence_parallel:
        return 0
    return ring(shape.tokens * token_bytes, shape.tp)


def _column_input(shape: RankShape, codes: bool) -> float:
    """For q, k, v together, or gate and up."""
    hidden = shape.config.model.hidden_size
    return _all_tokens(shape, hidden + shape.wide_bytes if codes else hidden * shape.compute_bytes)


def _row_output(shape: RankShape, codes: bool) -> float:
    """For o, or down."""
    if not codes:
        return _sum_of_hidden(shape, shape.compute_bytes)
    if shape.config.parallel.row_reduce == "int32":
        return _sum_of_hidden(shape, 4)
    tp = shape.tp
    numbers = -(-shape.tokens // tp) * tp * shape.config.model.hidden_size
    sent = ring(2 * (numbers + tp), tp)
    if not shape.config.parallel.sequence_parallel:
        sent += ring(numbers * shape.compute_bytes, tp)
    return sent


def _gain_each_time(shape: RankShape) -> float:
    """For the gain of a norm that runs on a rank's own tokens, where its gradient is summed over TP
    in each microbatch."""
    if not (shape.is_exact and shape.config.parallel.sequence_parallel):
        return 0
    return all_reduce(shape.config.model.hidden_size * shape.wide_bytes, shape.tp)


def _between_stages(shape: RankShape) -> Items:
    ranks = shape.tp if shape.config.parallel.sequence_parallel else 1
    hidden = shape.tokens // ranks * shape.config.model.hidden_size * shape.compute_bytes
    placement, own = shape.plan.schedule.placement, shape.pipeline_rank
    for stage in placement.stages[own]:
        if stage < placement.num_stages - 1 and placement.rank_of(stage + 1) != own:
            yield "pp", "activations", hidden
        if stage > 0 and placement.rank_of(stage - 1) != own:
            yield "pp", "activation gradients", hidden


def _gradients(shape: RankShape) -> Items:
    """For the sums of a step's gradients, a tensor at a time."""
    dp, wide, codec = shape.dp, shape.wide_bytes, codec_of(shape.config)
    slow = "dp" if shape.dp_intra is None else "dp_inter"
    for held in shape.parameters():
        part = held.part(dp)
        is_often = shape.sums_travel_each_microbatch and held.kind in REDUCED_EACH_MICROBATCH
        times = shape.microbatches if is_often else 1
        sent = part * shape.wire_bytes
        if codec is None or not is_coded(held.kind, held.logical_numel, shape.config):
            yield from _over_dp(shape, "weight gradients", times * sent, times * sent)
        elif dp > 1:
            coded = codec.tensor_bytes(-(-held.rows // dp), held.columns)
            yield from _over_dp(shape, "weight gradients", times * sent, times * coded)
            if codec.needs_maximum:
                yield slow, "weight gradients", times * all_reduce(4, _outermost(shape))
        if not shape.is_sharded:  # all of them have all sums
            yield from _over_dp(shape, "weight gradients", part * wide, part * wide)
        if held.kind == "partial gain":
            yield "tp", "weight gradients", all_reduce(dp * part * wide, shape.tp)
    if shape.config.model.tie_word_embeddings and shape.has_embedding != shape.has_head:
        embedding = next(shape.parameters())
        held_parts = 1 if shape.is_sharded else dp
        yield "pp", "weight gradients", all_reduce(held_parts * embedding.share(dp) * wide, 2)


def _over_dp(shape: RankShape, purpose: Purpose, inside: float, across: float) -> Items:
    """A reduce-scatter to parts, or a gather of parts, of ``inside`` bytes each in a host and of
    ``across`` in between; in one level, of the latter."""
    if shape.dp_intra is None:
        yield "dp", purpose, (shape.dp - 1) * across
        return
    hosts = _outermost(shape)
    yield "dp", purpose, (shape.dp_intra - 1) * hosts * inside
    yield "dp_inter", purpose, (hosts - 1) * across


def _outermost(shape: RankShape) -> int:
    """Ranks of the slowest level of DP."""
    return shape.dp if shape.dp_intra is None else shape.dp // shape.dp_intra


def _updates(shape: RankShape, of_all: bool = False) -> Items:
    """For what Muon orthogonalises: of a rank, or of all ranks of its stage."""
    if shape.config.optim.name != "muon":
        return
    by_rank = sent_updates(shape)
    sent = by_rank[shape.rank % len(by_rank)]
    if of_all:
        sent = sum(by_rank) * (shape.tp * shape.dp // len(by_rank))
    if sent:
        yield "world" if shape.is_sharded else "tp", "updates", sent


def _weights(shape: RankShape, share: float) -> Items:
    """For what layers compute with after an update."""
    parameters = list(shape.parameters())
    scales = bytes_of_sums(shape.config.model.weight_scale)
    scales *= sum(held.kind == "ternary" for held in parameters)
    if not shape.is_sharded:  # each DP rank makes all codes
        yield "tp", "scales", all_reduce(scales, shape.tp)
        return
    yield "world", "scales", all_reduce(scales, shape.tp * shape.dp)
    for held in parameters:
        published = _published_bytes(held, shape, share)
        yield from _over_dp(shape, "weights", published, published)


def _published_bytes(held: Held, shape: RankShape, share: float) -> int:
    """Of a DP rank's part, as it travels."""
    part = held.part(shape.dp)
    match held.kind:
        case "ternary" if share == 1:
            return held.code_part(shape.dp)
        case "ternary" | "matrix":
            return part * shape.compute_bytes
        case "second use":  # a gradient only
            return 0
        case _:
            return part * shape.wide_bytes


def _agreement(shape: RankShape, is_finite: bool) -> Items:
    """For the numbers that all ranks go by."""
    counts, sums = 2, 2  # of the tokens that count and of all; of the objective and the loss
    yield "dp", "control", (counts + sums) * all_reduce(NUMBER_BYTES, shape.dp)
    yield "pp", "control", sums * all_reduce(NUMBER_BYTES, shape.pp)  # to all stages
    # The largest gradient; if it is finite, the sum of squares.
    norm = 2 if is_finite else 1
    yield "world", "control", norm * all_reduce(NUMBER_BYTES, shape.world_size)
