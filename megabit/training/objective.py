"""What a step minimises: from the last stage's output to one number.

``LanguageModelObjective``: cross-entropy in fp32, with label smoothing and z-loss if asked; of all
tokens, or of those that are selected (``token_selection``); and beside it the distance to a
teacher's distribution (``teacher``). ``embedding`` has the other one. An objective is a sum over
microbatches, divided by the number of terms that count in the *global* batch, which is known before
the first forward pass. The plain cross-entropy of all tokens is summed up next to it: it is what is
reported as the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megabit.config import Config, LossConfig
from megabit.data.batches import Batch
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages
from megabit.reduce import all_reduce
from megabit.tensor_parallel import (
    PLAIN,
    ForwardPass,
    vocab_parallel_cross_entropy,
    vocab_parallel_kl,
)
from megabit.training.embedding import EmbeddingObjective
from megabit.training.teacher import Teacher
from megabit.training.token_selection import num_selected, select_tokens


class Objective(Protocol):
    """What the trainer asks of an objective, for one step."""

    num_terms: int
    """What the sum is divided by: terms in the global batch."""
    num_targets: int
    """What the sum of the loss is divided by."""
    losses: list[Tensor]
    """Of each microbatch after the last stage, the sum of what is reported as the loss."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the global batch that are learned from."""

    @property
    def inputs(self) -> Sequence[Tensor]:
        """What the first stage reads of each microbatch."""

    def __call__(self, hidden: Tensor, microbatch: int, forward_pass: ForwardPass) -> Tensor:
        """Sum of the objective's terms of a microbatch, in fp32 (fp64 in an fp64 run); the same on
        every TP rank."""


def build_objective(
    config: Config,
    mesh: ParallelMesh,
    stages: CausalLMStages,
    batch: Batch,
    teacher: Teacher | None = None,
) -> Objective:
    """That of one step, as ``config.loss`` says; collective over the mesh.

    Args:
        batch: this rank's part of the global batch, on the mesh's device.
        teacher: that of ``config``; it is asked for its logits of ``batch``.
    """
    if config.loss.objective == "embedding":
        return EmbeddingObjective.of(config, mesh, stages, batch)
    logits = None if teacher is None else teacher.logits(batch)
    return LanguageModelObjective.of(config, mesh, stages, batch, logits)


@dataclass
class LanguageModelObjective:
    """The objective of one step on one rank; see ``Objective``."""

    stages: CausalLMStages
    batch: Batch
    loss: LossConfig
    num_terms: int
    num_targets: int
    teacher_logits: Sequence[Tensor] | None = None
    """Of each microbatch, ``[T, v]``, where the last stage is."""
    losses: list[Tensor] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.num_targets

    @property
    def inputs(self) -> Sequence[Tensor]:
        return self.batch.inputs.unbind()

    @staticmethod
    def of(
        config: Config,
        mesh: ParallelMesh,
        stages: CausalLMStages,
        batch: Batch,
        teacher_logits: Sequence[Tensor] | None = None,
    ) -> "LanguageModelObjective":
        """Counts the terms of the global batch: one all-reduce over DP."""
        loss, mask = config.loss, batch.mask
        targets = mask.sum(dtype=torch.int64)
        selected = targets if loss.select == "all" else num_selected(mask, loss.select_ratio).sum()
        counts = all_reduce(torch.stack([selected, targets]), mesh.dp).tolist()
        num_terms, num_targets = (int(count) for count in counts)
        return LanguageModelObjective(stages, batch, loss, num_terms, num_targets, teacher_logits)

    def __call__(
        self, hidden: Tensor, microbatch: int, forward_pass: ForwardPass = PLAIN
    ) -> Tensor:
        loss, stages = self.loss, self.stages
        targets, mask = self.batch.targets[microbatch], self.batch.mask[microbatch]
        tp, rows = stages.context.tp, stages.vocab_rows
        logits = stages.logits(hidden, forward_pass)
        terms, cross_entropy = vocab_parallel_cross_entropy(
            logits, targets.flatten(), rows, tp, loss.z_loss, loss.label_smoothing
        )
        self.losses.append((cross_entropy * mask.flatten()).sum())
        counted = mask
        if loss.select != "all":
            scores = cross_entropy
            if loss.select == "excess":
                scores = cross_entropy - self._teacher_loss(microbatch)
            counted = select_tokens(scores.view_as(mask), mask, loss.select_ratio)
        total = (terms * counted.flatten()).sum()
        if loss.distill_weight:
            assert self.teacher_logits is not None
            divergence = vocab_parallel_kl(
                logits, self.teacher_logits[microbatch], rows, tp, loss.distill_temperature
            )
            # A mean over all targets, whatever the number of terms that the sum is divided by.
            weight = loss.distill_weight * self.num_terms / self.num_targets
            total = total + weight * (divergence * mask.flatten()).sum()
        return total

    @torch.no_grad()
    def _teacher_loss(self, microbatch: int) -> Tensor:
        assert self.teacher_logits is not None
        targets, stages = self.batch.targets[microbatch].flatten(), self.stages
        return vocab_parallel_cross_entropy(
            self.teacher_logits[microbatch], targets, stages.vocab_rows, stages.context.tp
        ).cross_entropy
