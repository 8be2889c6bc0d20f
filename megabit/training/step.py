"""One optimizer step, top to bottom.

count target tokens → run the pipeline schedule (forward, backward; DP reduction of gradients starts
in its last backward) → complete, measure and clip gradients → AdamW → codes and scales of the new
weights. Everything a rank needs for it is a ``TrainingState``.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megabit.config import Config
from megabit.data.batches import Batch
from megabit.data_parallel import GradientBuckets
from megabit.errors import RunError
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStage, build_stage
from megabit.pipeline.actions import Action
from megabit.pipeline.execute import run_schedule
from megabit.pipeline.schedules import make_schedule
from megabit.reduce import all_reduce
from megabit.tensor_parallel import ShardedParameter, sharded_parameters
from megabit.training.gradients import clip, complete_gradients, global_norm
from megabit.training.optimizer import build_optimizer, set_hyperparameters
from megabit.training.schedule import two_stage


@dataclass
class TrainingState:
    """The model, its gradients and its optimizer on one rank."""

    config: Config
    mesh: ParallelMesh
    stage: CausalLMStage
    parameters: dict[str, ShardedParameter]
    """By logical name."""
    gradients: GradientBuckets
    optimizer: torch.optim.Optimizer
    actions: list[Action]
    """What this stage does in a step, in order."""

    @staticmethod
    def create(config: Config, mesh: ParallelMesh) -> "TrainingState":
        """Build and initialise; the model is the same at every layout."""
        stage = build_stage(config, mesh)
        parameters = sharded_parameters(stage)
        per_step = mesh.dp.size * config.train.micro_batch_size
        schedule = make_schedule(
            config.parallel.schedule,
            stages=config.parallel.pp,
            microbatches=config.train.global_batch_size // per_step,
        )
        state = TrainingState(
            config=config,
            mesh=mesh,
            stage=stage,
            parameters=parameters,
            gradients=GradientBuckets.create(
                parameters.values(), mesh.dp, config.parallel.bucket_mb
            ),
            optimizer=build_optimizer(parameters.values(), config.optim),
            actions=schedule[mesh.pp.rank],
        )
        stage.ternarize()
        return state


class NonFiniteGradient(RunError):
    """The gradient of a step is infinite or not a number."""


@dataclass(frozen=True)
class StepReport:
    """What a step was like; the same on every rank except for the times."""

    loss: float
    """Mean over the step's target tokens, in nats, before the update."""
    num_tokens: int
    """Target tokens of the step, over all ranks."""
    grad_norm: float
    """Before clipping."""
    lr: float
    pipeline_s: float
    """This rank's seconds in the pipeline schedule, and how many of them it waited."""
    wait_s: float


def train_step(state: TrainingState, batch: Batch, step: int) -> StepReport:
    """Run optimizer step ``step`` (0-based) on this rank's part of the global batch.

    Collective over the whole mesh.

    Raises:
        NonFiniteGradient: on every rank, before any weight is changed.
    """
    config, mesh = state.config, state.mesh
    loss_sum, num_tokens, pipeline_s, wait_s = forward_backward(state, batch)
    norm = global_norm(state.parameters.values(), mesh).item()
    if not math.isfinite(norm):
        raise NonFiniteGradient(
            f"step {step + 1}: the gradient norm is {norm}; the weights stay those after step "
            f"{step}. Lower optim.lr, or look at the data of this step"
        )
    clip(state.gradients, norm, config.optim.clip_grad_norm)
    values = two_stage(config.optim, step, config.train.steps)
    set_hyperparameters(state.optimizer, values)
    state.optimizer.step()
    state.stage.ternarize()
    loss = loss_sum.item() / num_tokens
    return StepReport(loss, num_tokens, norm, values.lr, pipeline_s, wait_s)


def forward_backward(state: TrainingState, batch: Batch) -> tuple[Tensor, int, float, float]:
    """Gradients of the mean loss over the global batch, complete, in ``state.gradients``.

    Returns the loss sum (fp64, over all ranks), the target tokens of the step, and the seconds that
    the schedule took and waited. The loss is a sum divided by the *global* token count, so it does
    not matter how tokens are spread over microbatches and ranks.
    """
    mesh, stage = state.mesh, state.stage
    batch = batch.to(mesh.device)
    num_tokens = count_targets(batch, mesh)
    if num_tokens == 0:
        raise RunError("a step has no target token: every prediction of its samples is masked")
    state.gradients.zero()
    result = run_schedule(
        state.actions,
        stage,
        batch.inputs,
        partial(microbatch_loss, stage, batch),
        mesh.pp,
        output_gradient=torch.tensor(
            1 / num_tokens, dtype=stage.context.master_dtype, device=mesh.device
        ),
        before_last_backward=state.gradients.expect_last_backward,
    )
    state.gradients.finish()
    complete_gradients(stage, state.parameters.values(), mesh)
    loss_sum = sum_over_stages(result.outputs, mesh)
    return loss_sum, num_tokens, result.busy_s, result.wait_s


def count_targets(batch: Batch, mesh: ParallelMesh) -> int:
    """Target tokens over all microbatches and DP ranks."""
    return int(all_reduce(batch.mask.sum(dtype=torch.int64), mesh.dp))


def sum_over_stages(losses: list[Tensor], mesh: ParallelMesh) -> Tensor:
    """Sum of the last stages' ``losses`` over microbatches and DP, fp64 scalar, on every rank."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for loss in losses:
        total += loss
    return all_reduce(all_reduce(total, mesh.pp), mesh.dp)


def microbatch_loss(stage: CausalLMStage, batch: Batch, hidden: Tensor, microbatch: int) -> Tensor:
    """Loss sum of one microbatch on the last stage."""
    return stage.loss(hidden, batch.targets[microbatch], batch.mask[microbatch])
