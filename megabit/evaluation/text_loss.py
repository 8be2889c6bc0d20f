"""The loss of a text: its mean over all tokens, its perplexity, and bits per byte."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megabit.data.batches import Batch, held_out_batches
from megabit.data.corpus import SplitInfo
from megabit.evaluation.forward import ForwardRunner, token_losses
from megabit.evaluation.text_sets import TextSet
from megabit.model import CausalLMStages
from megabit.reduce import all_gather, all_reduce
from megabit.telemetry.metrics import perplexity
from megabit.tensor_parallel import ForwardPass


@dataclass(frozen=True)
class Evaluation:
    """Loss over the tokens of a text."""

    loss: float
    """Mean over the predicted tokens, in nats."""
    num_tokens: int
    bits_per_byte: float
    """Bits to encode a byte of the text; the measure that does not depend on the tokenizer."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where fp64 cannot hold it."""
        return perplexity(self.loss)


def bits_per_byte(loss: float, split: SplitInfo) -> float:
    """From nats per token, by the tokens and bytes of the split that the tokens are from."""
    return loss / math.log(2) * split.tokens / split.bytes


def evaluate_sets(
    runner: ForwardRunner,
    sets: Mapping[str, TextSet],
    micro_batch_size: int,
    limit: int | None = None,
) -> dict[str, Evaluation]:
    """``evaluate_text`` of each set, by name and in order; collective over the mesh."""
    return {
        name: evaluate_text(runner, text, micro_batch_size, limit) for name, text in sets.items()
    }


def evaluate_text(
    runner: ForwardRunner, text: TextSet, micro_batch_size: int, limit: int | None = None
) -> Evaluation:
    """Evaluate on all windows of a text, or on ``limit`` of them spread evenly; collective over
    the mesh, and the same on every rank.

    Over all windows every token is predicted exactly once. A ternary model gives the same bits at
    every layout: microbatches hold the same windows, and ``fsum`` rounds their sum only once.
    """
    mesh = runner.mesh
    losses: list[float] = []
    own_tokens = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for held_out in held_out_batches(
        text.windows,
        runner.microbatches,
        micro_batch_size,
        mesh.dp.rank,
        mesh.dp.size,
        limit,
    ):
        batch = held_out.to(mesh.device)
        own = runner.values(batch.inputs.unbind(), partial(_loss_sum, runner.stages, batch), ())
        losses += all_gather(own, mesh.dp, "statistics").tolist()
        own_tokens += batch.mask.sum()
    num_tokens = int(all_reduce(own_tokens, mesh.dp))
    loss = math.fsum(losses) / num_tokens
    return Evaluation(loss, num_tokens, bits_per_byte(loss, text.split))


def _loss_sum(
    stages: CausalLMStages, batch: Batch, hidden: Tensor, microbatch: int, forward_pass: ForwardPass
) -> Tensor:
    """Over the predictions of a microbatch that count."""
    losses = token_losses(stages, hidden, batch.targets[microbatch], forward_pass)
    return losses.masked_fill(~batch.mask[microbatch], 0).sum()
