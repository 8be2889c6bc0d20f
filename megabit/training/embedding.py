"""Sentence embeddings: a triplet loss over the passages of a microbatch (``loss.objective``).

A sample of S tokens is a pair: its first half is the *anchor*, its second half the *positive*. Two
adjacent passages of one stream of text stand for two passages that belong together; where a
document ends within a sample, they may not. Each half is encoded by itself: a microbatch ``[B, S]``
goes through the model as ``[2B, S/2]``, so that no attention crosses the halves. An embedding is
the mean of a passage's final, normed hidden states, scaled to length 1; the output head is not
used, and a run has none (``CausalLMStages``).

With the cosine distance d(x, y) = 1 − x·y, a triplet is an anchor i, its positive and the positive
j ≠ i of another sample of the same *microbatch*, the negative. Its loss is

    max(0, d(anchor i, positive i) − d(anchor i, positive j) + margin)

Of the B·(B − 1) triplets of a microbatch those with the largest loss count, ceil(ratio · B·(B − 1))
of them (online hard mining); so it is known before the step how many will. Negatives come from the
microbatch: ``train.micro_batch_size`` is part of the recipe here, and no other layout setting is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from megabit.config import Config, LossConfig
from megabit.data.batches import Batch, held_out_batches
from megabit.data.sampler import HeldOutWindows
from megabit.evaluation.forward import ForwardRunner
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages
from megabit.reduce import all_gather
from megabit.tensor_parallel import PLAIN, ForwardPass, LayerContext
from megabit.training.token_selection import num_selected, select_tokens
from megabit_kernels import numerics


@dataclass
class EmbeddingObjective:
    """The objective of one step on one rank; see ``objective.Objective``.

    What is reported as the loss is the mean over *all* triplets.
    """

    stages: CausalLMStages
    inputs: Sequence[Tensor]
    """Of each microbatch, int64 ``[2B, S/2]``: anchor and positive of each sample in turn."""
    loss: LossConfig
    num_terms: int
    num_targets: int
    """Triplets in the global batch."""
    num_tokens: int
    losses: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(
        config: Config, mesh: ParallelMesh, stages: CausalLMStages, batch: Batch
    ) -> "EmbeddingObjective":
        """That of ``batch``, whose targets and mask it does not look at; sends nothing."""
        microbatches, samples, length = batch.inputs.shape
        everywhere = microbatches * mesh.dp.size
        triplets = torch.ones(samples * (samples - 1), dtype=torch.bool)
        mined = int(num_selected(triplets, config.loss.mining_ratio))
        return EmbeddingObjective(
            stages,
            [halves(tokens) for tokens in batch.inputs],
            config.loss,
            num_terms=everywhere * mined,
            num_targets=everywhere * len(triplets),
            num_tokens=everywhere * samples * length,
        )

    def __call__(
        self, hidden: Tensor, microbatch: int, forward_pass: ForwardPass = PLAIN
    ) -> Tensor:
        count = len(self.inputs[microbatch])
        embeddings = embed(self.stages, hidden, count)
        losses = triplet_losses(embeddings, self.loss.triplet_margin)
        self.losses.append(losses.detach().sum())
        everything = torch.ones_like(losses, dtype=torch.bool)
        mined = select_tokens(losses.detach(), everything, self.loss.mining_ratio)
        return (losses * mined).sum()


def halves(tokens: Tensor) -> Tensor:
    """Samples ``[B, S]`` as passages ``[2B, S/2]``."""
    return tokens.reshape(2 * tokens.shape[0], tokens.shape[1] // 2)


def embed(stages: CausalLMStages, hidden: Tensor, count: int) -> Tensor:
    """Embeddings of ``count`` passages of equal length, after the last stage: ``[t, H]`` →
    ``[count, H]`` of length 1, in fp32 (fp64 for fp64), the same on every TP rank."""
    values = gather_tokens(stages.model.norm(hidden).values, stages.context)
    wide = values.to(numerics.stats_dtype(values.dtype))
    return F.normalize(wide.unflatten(0, (count, -1)).mean(1), dim=-1)


def triplet_losses(embeddings: Tensor, margin: float) -> Tensor:
    """Of each triplet, anchors first: ``[2B, H]``, anchors and positives in turn → ``[B·(B−1)]``.

    d(a, p) − d(a, n) is the anchor's cosine with the negative less that with its positive.
    """
    cosines = embeddings[0::2] @ embeddings[1::2].t()
    losses = (cosines - cosines.diagonal().unsqueeze(1) + margin).relu()
    return losses[~torch.eye(len(losses), dtype=torch.bool, device=losses.device)]


def gather_tokens(x: Tensor, context: LayerContext) -> Tensor:
    """``[t, H]`` → ``[T, H]`` on every rank, each of which goes on to compute the same from it.

    So backward takes a rank's own tokens of the gradient, and sums nothing over TP: not what
    ``enter_column_parallel`` is for, behind which each rank has a term of the gradient.
    """
    return _GatherTokens.apply(x, context) if context.sequence_parallel else x


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: LayerContext) -> Tensor:
        ctx.tp = context.tp
        return all_gather(x, context.tp, "activations")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.tp.size)[ctx.tp.rank], None


@dataclass(frozen=True)
class EmbeddingEvaluation:
    """How well held-out passages find the one that they belong to."""

    recall_at_1: float
    """Share of the anchors whose nearest positive, of all pairs', is their own. Chance is
    1/``num_pairs``."""
    loss: float
    """Mean triplet loss over all triplets that the pairs make."""
    num_pairs: int


def evaluate_embeddings(
    runner: ForwardRunner,
    windows: HeldOutWindows,
    micro_batch_size: int,
    margin: float,
    limit: int | None = None,
) -> EmbeddingEvaluation:
    """Evaluate on all whole held-out windows, or on about ``limit`` of them spread evenly; each is
    a pair. Collective over the mesh; the same on every rank.

    Every rank holds the embeddings of all pairs, and their cosines: N² numbers in fp64.

    Args:
        margin: of the loss.
    """
    mesh, stages = runner.mesh, runner.stages
    count = 2 * micro_batch_size
    found: list[Tensor] = []
    kept: list[Tensor] = []
    for batch in held_out_batches(
        windows, runner.microbatches, micro_batch_size, mesh.dp.rank, mesh.dp.size, limit
    ):
        tokens = [halves(x) for x in batch.to(mesh.device).inputs]
        finish = partial(_finish, stages, count)
        embeddings = runner.values(tokens, finish, (count, stages.hidden_size))
        found.append(all_gather(embeddings.view(-1, 2, stages.hidden_size), mesh.dp))
        # Padding is in the last windows: they are no pairs.
        whole = batch.mask.all(-1).flatten().to(mesh.device, torch.int64)
        kept.append(all_gather(whole, mesh.dp).bool())
    pairs = torch.cat(found)[torch.cat(kept)]
    return judge(pairs, margin)


def judge(pairs: Tensor, margin: float) -> EmbeddingEvaluation:
    """Of embeddings ``[N, 2, H]`` of length 1; of fewer than two pairs, all is not a number."""
    if len(pairs) < 2:
        return EmbeddingEvaluation(float("nan"), float("nan"), len(pairs))
    cosines = pairs[:, 0] @ pairs[:, 1].t()
    hits = (cosines.argmax(1) == torch.arange(len(pairs), device=pairs.device)).double().mean()
    return EmbeddingEvaluation(
        float(hits), float(triplet_losses(pairs.flatten(0, 1), margin).mean()), len(pairs)
    )


def _finish(
    stages: CausalLMStages, count: int, hidden: Tensor, microbatch: int, forward_pass: ForwardPass
) -> Tensor:
    return embed(stages, hidden, count)
