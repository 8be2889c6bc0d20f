"""Forward passes over the stages of a model, and what they give on every rank of the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages
from megabit.pipeline.actions import Schedule
from megabit.pipeline.catalog import make_forward_schedule
from megabit.pipeline.communicate import lookahead_on
from megabit.pipeline.execute import Finish, run_schedule
from megabit.pipeline.placement import Placement
from megabit.reduce import all_reduce
from megabit.tensor_parallel import (
    TERNARY,
    ForwardPass,
    Quantization,
    vocab_parallel_cross_entropy,
)


@dataclass(frozen=True)
class ForwardRunner:
    """A model at a layout, for forward passes only; each method is collective over TP and PP.

    Results have the same bits at every layout of a ternary model, as long as microbatches hold the
    same tokens: a product of floats may be summed in another order when its shape changes.
    """

    stages: CausalLMStages
    placement: Placement
    mesh: ParallelMesh
    quantization: Quantization = TERNARY
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    """By the number of microbatches."""

    @property
    def microbatches(self) -> int:
        """As many as keep all ranks of the pipeline busy."""
        return self.mesh.pp.size

    def outputs(self, tokens: Sequence[Tensor], finish: Finish) -> list[Tensor]:
        """What ``finish`` makes of each microbatch, where the last stage is; none elsewhere.

        Args:
            tokens: of m microbatches, int64 ``[B, S]`` each.
            finish: as for ``run_schedule``.
        """
        mesh, count = self.mesh, len(tokens)
        if count not in self._schedules:
            self._schedules[count] = make_forward_schedule(
                self.placement, count, lookahead_on(mesh.device.type)
            )
        schedule, quantization = self._schedules[count], self.quantization
        return run_schedule(
            schedule, self.stages, tokens, finish, mesh.pp, quantization=quantization
        ).outputs

    def values(self, tokens: Sequence[Tensor], finish: Finish, shape: Sequence[int]) -> Tensor:
        """``outputs`` on every rank of the pipeline: fp64 ``[m, *shape]``.

        Args:
            finish: gives a tensor of ``shape``.
        """
        mesh, outputs = self.mesh, self.outputs(tokens, finish)
        values = torch.zeros(len(tokens), *shape, dtype=torch.float64, device=mesh.device)
        for value, output in zip(values, outputs, strict=bool(outputs)):
            value.copy_(output)
        return all_reduce(values, mesh.pp, purpose="statistics")  # all others have zeros


def token_losses(
    stages: CausalLMStages, hidden: Tensor, targets: Tensor, forward_pass: ForwardPass
) -> Tensor:
    """Cross-entropy of each of ``targets``, int64 ``[B, S]``, after the last stage: fp64
    ``[B, S]``, in nats. Sums of it have bits to spare, so their order does not show."""
    logits = stages.logits(hidden, forward_pass)
    losses = vocab_parallel_cross_entropy(
        logits, targets.flatten(), stages.vocab_rows, stages.context.tp
    )
    return losses.cross_entropy.double().view(targets.shape)
