"""Held-out loss: the forward pass over held-out text, at the layout of the run."""

import math
from dataclasses import dataclass
from functools import partial

from megabit.data.batches import held_out_batches
from megabit.data.corpus import SplitInfo
from megabit.data.sampler import HeldOutWindows
from megabit.pipeline.catalog import make_forward_schedule
from megabit.pipeline.communicate import lookahead_on
from megabit.pipeline.execute import run_schedule
from megabit.training.step import TrainingState, count_targets, microbatch_loss, sum_over_stages


@dataclass(frozen=True)
class Evaluation:
    """Loss over held-out tokens."""

    loss: float
    """Mean over the predicted tokens, in nats."""
    num_tokens: int
    bits_per_byte: float
    """Bits to encode a byte of the text; the measure that does not depend on the tokenizer."""


def bits_per_byte(loss: float, split: SplitInfo) -> float:
    """From nats per token, by the tokens and bytes of the split that the tokens are from."""
    return loss / math.log(2) * split.tokens / split.bytes


def evaluate(
    state: TrainingState, windows: HeldOutWindows, split: SplitInfo, limit: int | None = None
) -> Evaluation:
    """Evaluate on all windows, or on ``limit`` of them spread evenly; collective over the mesh.

    Over all windows every held-out token is predicted exactly once.
    """
    mesh, stages = state.mesh, state.stages
    microbatches = mesh.pp.size  # as many as there are ranks to keep busy
    schedule = make_forward_schedule(
        state.plan.schedule.placement, microbatches, lookahead_on(mesh.device.type)
    )
    loss_sum, num_tokens = 0.0, 0
    for held_out in held_out_batches(
        windows,
        microbatches,
        state.config.train.micro_batch_size,
        mesh.dp.rank,
        mesh.dp.size,
        limit,
    ):
        batch = held_out.to(mesh.device)
        result = run_schedule(
            schedule,
            stages,
            batch.inputs.unbind(),
            partial(microbatch_loss, stages, batch),
            mesh.pp,
        )
        loss_sum += sum_over_stages(result.outputs, mesh).item()
        num_tokens += count_targets(batch, mesh)
    loss = loss_sum / num_tokens
    return Evaluation(loss, num_tokens, bits_per_byte(loss, split))
