"""The messages of one optimizer step, one by one: who takes part, of what kind, how many bytes.

``traffic`` adds them up to the bytes that a rank sends, and says in a table where they come from; a
planner makes seconds of them. Both look at the sizes of a rank only (``RankShape``), not at a
model. An axis of one rank has no messages.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megabit.data_parallel.codecs import codec_of
from megabit.data_parallel.layout import REDUCED_EACH_MICROBATCH
from megabit.data_parallel.zero import is_coded
from megabit.reduce import Purpose
from megabit.tensor_parallel import TERNARY, Quantization
from megabit.tensor_parallel.activations import LEVELS
from megabit.tensor_parallel.weight_scale import bytes_of_sums
from megabit.training.muon_traffic import sent_updates
from megabit.training.shapes import Held, RankShape

Axis = Literal["tp", "pp", "ends", "dp", "dp_inter", "stage", "world"]
"""Which ranks: of the mesh's axes; *ends*: the two pipeline ranks with a tied embedding; *stage*:
TP × DP; *world*: of the island."""
Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]
Phase = Literal["forward", "input_gradient", "weight_gradient"]
"""Of a microbatch."""

COUNT_BYTES = 4
"""Of a count of codes: int32."""
NUMBER_BYTES = 8
"""Of what ranks agree on: int64 and fp64."""


@dataclass(frozen=True)
class Message:
    """What the ranks of an axis tell each other at a time."""

    axis: Axis
    purpose: Purpose
    kind: Kind
    num_bytes: float
    """Of the whole: what an all-reduce sums, what an all-gather gives, what goes into a
    reduce-scatter or an all-to-all, what is sent."""
    ranks: int
    """That take part."""
    times: int = 1
    phase: Phase = "forward"
    """For what belongs to a microbatch: where it is sent. With ``Backward``, sums of an input's
    gradient travel while the weight's is computed."""

    @property
    def sent_bytes(self) -> float:
        """What each rank sends, by a ring, all the times."""
        match self.kind:
            case "all_reduce":
                sent = all_reduce(self.num_bytes, self.ranks)
            case "send":
                sent = self.num_bytes
            case _:
                sent = ring(self.num_bytes, self.ranks)
        return self.times * sent


Messages = Iterator[Message]


def all_reduce(num_bytes: float, ranks: int) -> float:
    """What a ring sends to sum or compare so many bytes."""
    return 2 * ring(num_bytes, ranks)


def ring(num_bytes: float, ranks: int) -> float:
    """What a ring sends for a gather to, a reduce-scatter or an all-to-all of so many bytes."""
    return (ranks - 1) * num_bytes / ranks


def embedding(shape: RankShape) -> Messages:
    """Of a microbatch, where the rank has the embedding."""
    row = shape.config.model.hidden_size * shape.compute_bytes
    yield from _sum_of_hidden(shape, shape.compute_bytes, "activations", "forward")
    yield from _all_tokens(shape, row, "activation gradients", "weight_gradient")


def head(shape: RankShape) -> Messages:
    """Of a microbatch, where the rank has head and loss."""
    model, tp, wide = shape.config.model, shape.tp, shape.wide_bytes
    row = model.hidden_size * shape.compute_bytes
    yield from _all_tokens(shape, row, "activations", "forward")
    yield from _sum_of_hidden(shape, shape.compute_bytes, "activation gradients", "input_gradient")
    yield from _gains(shape, 1)
    yield from _over_tp(shape, "statistics", "all_reduce", shape.tokens * wide)
    sums = 2 if shape.config.loss.label_smoothing else 1
    blocks_and_targets = sums * model.num_attention_heads + tp
    num_bytes = shape.tokens * blocks_and_targets * wide
    yield from _over_tp(shape, "statistics", "all_gather", num_bytes)


def layer(shape: RankShape, quantization: Quantization = TERNARY) -> Messages:
    """Of a microbatch in one layer."""
    model, tp, tokens, wide = shape.config.model, shape.tp, shape.tokens, shape.wide_bytes
    dense = shape.compute_bytes
    codes = _multiplies_codes(shape, quantization)
    inputs = _column_inputs(shape)
    yield from _times(inputs, _column_input(shape, codes, "forward"))
    yield from _times(2, _row_output(shape, codes, "forward"))
    # The terms of a tree are not rounded before it.
    term = wide if shape.is_exact else dense
    dx = _sum_of_hidden(shape, term, "activation gradients", "input_gradient")
    yield from _times(inputs, dx)
    row = model.hidden_size * dense
    yield from _times(2, _all_tokens(shape, row, "activation gradients", "input_gradient"))
    if model.num_key_value_heads % tp:
        num_bytes = 2 * tokens * model.num_key_value_heads * model.head_dim * dense
        yield from _over_tp(
            shape, "activation gradients", "all_reduce", num_bytes, phase="input_gradient"
        )
    if model.norm_placement != "prenorm":
        blocks = tokens * model.num_attention_heads * wide
        yield from _over_tp(shape, "statistics", "all_gather", 2 * blocks, times=2)
        yield from _over_tp(
            shape, "statistics", "all_gather", blocks, times=2, phase="input_gradient"
        )
    yield from _row_ranges(shape, quantization)
    gains = {"subln": 2, "prenorm": 2, "in_linear": 0, "per_proj": 7}[model.norm_placement]
    yield from _gains(shape, gains)


def recomputed_layer(shape: RankShape, quantization: Quantization = TERNARY) -> Messages:
    """What such a layer repeats, if it recomputes."""
    codes = _multiplies_codes(shape, quantization)
    if shape.config.train.recompute == "full":
        again = _column_input(shape, codes, "input_gradient")
        yield from _times(_column_inputs(shape), again)
    if not codes:
        yield from _times(2, _row_output(shape, codes, "input_gradient"))


def between_stages(shape: RankShape) -> Messages:
    """Of a microbatch, on all of the rank's stages."""
    message = hidden_message(shape)
    placement, own = shape.plan.schedule.placement, shape.pipeline_rank
    for stage in placement.stages[own]:
        if stage < placement.num_stages - 1 and placement.rank_of(stage + 1) != own:
            yield message
        if stage > 0 and placement.rank_of(stage - 1) != own:
            yield dataclasses.replace(
                message, purpose="activation gradients", phase="input_gradient"
            )


def hidden_message(shape: RankShape) -> Message:
    """What one stage sends to the next of a microbatch; its gradient is as large."""
    ranks = shape.tp if shape.config.parallel.sequence_parallel else 1
    num_bytes = shape.tokens // ranks * shape.config.model.hidden_size * shape.compute_bytes
    return Message("pp", "activations", "send", num_bytes, 2)


def _multiplies_codes(shape: RankShape, quantization: Quantization) -> bool:
    """Whether a layer's products are those of int8 and codes, or of floating-point numbers."""
    is_full = quantization.full_precision_activations or shape.config.model.activations == "full"
    return shape.is_ternary and quantization.share == 1 and not is_full


def _column_inputs(shape: RankShape) -> int:
    """Of a layer: one for q, k and v, and one for gate and up, unless each has its own."""
    return 5 if shape.config.model.norm_placement == "per_proj" else 2


def _row_ranges(shape: RankShape, quantization: Quantization) -> Messages:
    """For the ranges that o's and down's inputs are quantized in, unless a norm has told them."""
    model = shape.config.model
    is_full = quantization.full_precision_activations or model.activations == "full"
    if is_full or not shape.is_ternary:
        return
    if model.norm_placement == "prenorm" or model.hadamard:
        num_bytes = shape.tokens * shape.wide_bytes
        yield from _over_tp(shape, "statistics", "all_reduce", num_bytes, times=2)
    if model.activations == "a4.8":
        num_bytes = shape.tokens * LEVELS * COUNT_BYTES
        yield from _over_tp(shape, "statistics", "all_reduce", num_bytes)


def _sum_of_hidden(
    shape: RankShape, element_bytes: int, purpose: Purpose, phase: Phase
) -> Messages:
    """A sum of ``[T, H]`` over TP, for the tokens that a rank has between the layers."""
    num_bytes = shape.tokens * shape.config.model.hidden_size * element_bytes
    kinds: tuple[Kind, ...] = ("all_reduce",)
    if shape.config.parallel.sequence_parallel:
        kinds = ("reduce_scatter",)
    elif shape.is_exact and purpose == "activation gradients":
        kinds = ("all_to_all", "all_gather")  # a tree
    for kind in kinds:
        yield from _over_tp(shape, purpose, kind, num_bytes, phase=phase)


def _all_tokens(shape: RankShape, token_bytes: float, purpose: Purpose, phase: Phase) -> Messages:
    """A gather over TP of so many bytes a token, where ranks have only their own."""
    if shape.config.parallel.sequence_parallel:
        num_bytes = shape.tokens * token_bytes
        yield from _over_tp(shape, purpose, "all_gather", num_bytes, phase=phase)


def _column_input(shape: RankShape, codes: bool, phase: Phase) -> Messages:
    """For q, k, v together, or gate and up."""
    hidden = shape.config.model.hidden_size
    if not codes:
        yield from _all_tokens(shape, hidden * shape.compute_bytes, "activations", phase)
        return
    yield from _all_tokens(shape, hidden, "activations", phase)
    yield from _all_tokens(shape, shape.wide_bytes, "activations", phase)


def _row_output(shape: RankShape, codes: bool, phase: Phase) -> Messages:
    """For o, or down."""
    if not codes:
        yield from _sum_of_hidden(shape, shape.compute_bytes, "activations", phase)
        return
    if shape.config.parallel.row_reduce == "int32":
        yield from _sum_of_hidden(shape, 4, "activations", phase)
        return
    tp = shape.tp
    numbers = -(-shape.tokens // tp) * tp * shape.config.model.hidden_size
    yield from _over_tp(shape, "activations", "all_to_all", 2 * (numbers + tp), phase=phase)
    if not shape.config.parallel.sequence_parallel:
        num_bytes = numbers * shape.compute_bytes
        yield from _over_tp(shape, "activations", "all_gather", num_bytes, phase=phase)


def _gains(shape: RankShape, count: int) -> Messages:
    """For the gains of norms that run on a rank's own tokens, where their gradients are summed over
    TP in each microbatch."""
    if count and shape.is_exact and shape.config.parallel.sequence_parallel:
        num_bytes = shape.config.model.hidden_size * shape.wide_bytes
        yield from _over_tp(
            shape, "weight gradients", "all_reduce", num_bytes, times=count, phase="input_gradient"
        )


def gradients(shape: RankShape) -> Messages:
    """For the sums of a step's gradients, a tensor at a time."""
    dp, wide, codec = shape.dp, shape.wide_bytes, codec_of(shape.config)
    for held in shape.parameters():
        part = held.part(dp)
        is_often = shape.sums_travel_each_microbatch and held.kind in REDUCED_EACH_MICROBATCH
        times = shape.microbatches if is_often else 1
        sent: float = part * shape.wire_bytes
        coded = sent
        if codec is not None and is_coded(held.kind, held.logical_numel, shape.config):
            coded = codec.tensor_bytes(-(-held.rows // dp), held.columns)
            if codec.needs_maximum and dp > 1:
                slow: Axis = "dp" if shape.dp_intra is None else "dp_inter"
                yield Message(slow, "weight gradients", "all_reduce", 4, _outermost(shape), times)
        yield from _over_dp(shape, "weight gradients", "all_to_all", sent, coded, times)
        if not shape.is_sharded:  # all of them have all sums
            yield from _over_dp(shape, "weight gradients", "all_gather", part * wide, part * wide)
        if held.kind == "partial gain":
            yield from _over_tp(shape, "weight gradients", "all_reduce", dp * part * wide)
    if shape.config.model.tie_word_embeddings and shape.has_embedding != shape.has_head:
        matrix = next(shape.parameters())
        held_parts = 1 if shape.is_sharded else dp
        num_bytes = held_parts * matrix.share(dp) * wide
        yield Message("ends", "weight gradients", "all_reduce", num_bytes, 2)


def updates(shape: RankShape, of_all: bool = False) -> Messages:
    """For what Muon orthogonalises: of a rank, or of all ranks of its stage."""
    if shape.config.optim.name != "muon":
        return
    by_rank = sent_updates(shape)
    sent = by_rank[shape.rank % len(by_rank)]
    if of_all:
        sent = sum(by_rank) * (shape.tp * shape.dp // len(by_rank))
    axis: Axis = "stage" if shape.is_sharded else "tp"
    ranks = shape.tp * shape.dp if shape.is_sharded else shape.tp
    if sent and ranks > 1:
        # Two exchanges of unequal parts.
        yield Message(axis, "updates", "all_to_all", sent * ranks / (ranks - 1), ranks)


def weights(shape: RankShape, share: float = 1.0) -> Messages:
    """For what layers compute with after an update.

    Args:
        share: λ of the next step.
    """
    parameters = list(shape.parameters())
    scales = bytes_of_sums(shape.config.model.weight_scale)
    scales *= sum(held.kind == "ternary" for held in parameters)
    if not shape.is_sharded:  # each DP rank makes all codes
        yield from _over_tp(shape, "scales", "all_reduce", scales)
        return
    ranks = shape.tp * shape.dp
    if scales:
        yield Message("stage", "scales", "all_reduce", scales, ranks)
    for held in parameters:
        published = _published_bytes(held, shape, share)
        yield from _over_dp(shape, "weights", "all_gather", published, published)


def agreement(shape: RankShape, is_finite: bool = True) -> Messages:
    """For the numbers that all ranks go by."""
    counts, sums = 2, 2  # of the tokens that count and of all; of the objective and the loss
    # The largest gradient; if it is finite, the sum of squares.
    norm = 2 if is_finite else 1
    over: tuple[tuple[Axis, int, int], ...] = (
        ("dp", shape.dp, counts + sums),
        ("pp", shape.pp, sums),  # to all stages
        ("world", shape.world_size, norm),
    )
    for axis, ranks, numbers in over:
        if ranks > 1:
            yield Message(axis, "control", "all_reduce", NUMBER_BYTES, ranks, numbers)


def _over_dp(
    shape: RankShape, purpose: Purpose, kind: Kind, inside: float, across: float, times: int = 1
) -> Messages:
    """A reduce-scatter to parts, or a gather of parts, of ``inside`` bytes each in a host and of
    ``across`` in between; in one level, of the latter."""
    hosts = _outermost(shape)
    if shape.dp == 1 or not (inside or across):
        return
    if shape.dp_intra is None:
        yield Message("dp", purpose, kind, shape.dp * across, shape.dp, times)
        return
    whole = shape.dp_intra * hosts * inside
    yield Message("dp", purpose, kind, whole, shape.dp_intra, times)
    yield Message("dp_inter", purpose, kind, hosts * across, hosts, times)


def _outermost(shape: RankShape) -> int:
    """Ranks of the slowest level of DP."""
    return shape.dp if shape.dp_intra is None else shape.dp // shape.dp_intra


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


def _over_tp(
    shape: RankShape,
    purpose: Purpose,
    kind: Kind,
    num_bytes: float,
    *,
    times: int = 1,
    phase: Phase = "forward",
) -> Messages:
    if shape.tp > 1 and num_bytes:
        yield Message("tp", purpose, kind, num_bytes, shape.tp, times, phase)


def _times(count: int, messages: Messages) -> Messages:
    for message in messages:
        yield dataclasses.replace(message, times=count * message.times)
