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
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from megabit.config import Config
from megabit.pipeline.plan import StagePlan
from megabit.tensor_parallel import TERNARY, Quantization
from megabit.training import messages
from megabit.training.messages import Message, ring
from megabit.training.shapes import RankShape

Sent = dict[tuple[str, str], float]
"""Bytes by (axis, purpose), as ``ParallelMesh.sent``."""

AXES = {"ends": "pp", "stage": "world"}
"""The axis that bytes count for, where a message has another one."""


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
    layers, recomputing = len(shape.layers), shape.recomputing_layers()
    total: Sent = {}
    for times, sent in (
        (shape.microbatches * shape.has_embedding, messages.embedding(shape)),
        (shape.microbatches * shape.has_head, messages.head(shape)),
        (shape.microbatches * layers, messages.layer(shape, quantization)),
        (shape.microbatches * recomputing, messages.recomputed_layer(shape, quantization)),
        (shape.microbatches, messages.between_stages(shape)),
        (1, chain(messages.gradients(shape), messages.agreement(shape, kind.is_finite))),
        (int(kind.is_updated), messages.updates(shape)),
        (int(kind.publishes), messages.weights(shape, kind.next_share)),
    ):
        _add(total, sent, times)
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
            _add(total, messages.updates(shape, of_all=True))
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


def _add(total: Sent, sent: Iterable[Message], times: int = 1) -> None:
    for message in sent:
        num_bytes = times * message.sent_bytes
        if num_bytes:
            key = AXES.get(message.axis, message.axis), message.purpose
            total[key] = total.get(key, 0) + num_bytes
