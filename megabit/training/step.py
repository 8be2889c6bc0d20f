"""One optimizer step, top to bottom.

count target tokens → run the pipeline schedule (forward, backward; the sums of gradients over DP
start in its last backward) → measure the gradient, clip it or skip the step → AdamW on master
weights → codes, scales and dense replicas to everyone. Everything a rank needs for it is a
``TrainingState``.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megabit.config import Config, tree_blocks
from megabit.data.batches import Batch
from megabit.data_parallel import ZeroOptimizer
from megabit.errors import RunError
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages, build_stages, num_parameters
from megabit.pipeline.execute import PipelineResult, run_schedule
from megabit.pipeline.plan import StagePlan, agree_on_plan
from megabit.reduce import all_reduce
from megabit.tensor_parallel import ForwardPass, Noise
from megabit.training.part_costs import measure_part_costs, with_layers
from megabit.training.schedule import two_stage


@dataclass
class TrainingState:
    """The model and its optimizer on one rank."""

    config: Config
    """With the layers of stages filled in, if they were to be measured."""
    mesh: ParallelMesh
    plan: StagePlan
    """Who computes what, in which order."""
    stages: CausalLMStages
    optimizer: ZeroOptimizer

    @staticmethod
    def create(config: Config, mesh: ParallelMesh) -> "TrainingState":
        """Build and initialise; the model is the same at every layout. Collective over the mesh.

        Raises:
            UserError: ``parallel.schedule`` names a function that does not work, or not the same
                one on all ranks.
        """
        plan = agree_on_plan(config, mesh)
        if config.parallel.balance == "measured":
            plan = plan.balanced_by(measure_part_costs(config, mesh))
            config = with_layers(config, plan.layers_per_stage)
        stages = build_stages(config, mesh, plan)
        microbatches = config.train.global_batch_size // config.train.micro_batch_size
        is_exact = config.parallel.exact == "full"
        weight = stages.embedding_weight
        return TrainingState(
            config=config,
            mesh=mesh,
            plan=plan,
            stages=stages,
            optimizer=ZeroOptimizer.create(
                stages,
                mesh,
                config,
                tied=(weight, stages.head_use) if stages.is_tied and weight is not None else None,
                blocks_per_step=tree_blocks(microbatches) // mesh.dp.size if is_exact else 1,
                chunk_of=stages.chunk_of,
            ),
        )


@dataclass(frozen=True)
class StepReport:
    """What a step was like; the same on every rank except for the times."""

    loss: float
    """Mean over the step's target tokens, in nats, before the update."""
    num_tokens: int
    """Target tokens of the step, over all ranks."""
    grad_norm: float
    """Before clipping; inf if the step was skipped because its gradient is not finite."""
    lr: float
    pipeline: PipelineResult
    """When this rank computed what."""

    @property
    def is_skipped(self) -> bool:
        """Whether no weight was changed."""
        return not math.isfinite(self.grad_norm)


def train_step(state: TrainingState, batch: Batch, step: int) -> StepReport:
    """Run optimizer step ``step`` (0-based) on this rank's part of the global batch.

    Collective over the whole mesh. If the gradient is infinite or not a number anywhere, all ranks
    skip the update together: weights, moments and codes stay as they are.
    """
    config, optimizer = state.config, state.optimizer
    loss_sum, num_tokens, pipeline = forward_backward(state, batch, step)
    norm = optimizer.gradient_norm(num_parameters(config.model))
    values = two_stage(config.optim, step, config.train.steps)
    if math.isfinite(norm):
        limit = config.optim.clip_grad_norm
        scale = limit / norm if limit and norm > limit else 1.0
        optimizer.step(scale, values.lr, values.weight_decay)
    loss = loss_sum.item() / num_tokens
    return StepReport(loss, num_tokens, norm, values.lr, pipeline)


def forward_backward(
    state: TrainingState, batch: Batch, step: int
) -> tuple[Tensor, int, PipelineResult]:
    """Gradients of the mean loss over the global batch, complete, in ``state.optimizer``.

    Returns the loss sum (fp64, over all ranks), the target tokens of the step, and what the
    schedule's run was like. The loss is a sum divided by the *global* token count, so it does
    not matter how tokens are spread over microbatches and ranks.
    """
    mesh, stages = state.mesh, state.stages
    batch = batch.to(mesh.device)
    num_tokens = count_targets(batch, mesh)
    if num_tokens == 0:
        raise RunError("a step has no target token: every prediction of its samples is masked")
    microbatches = len(batch.inputs)
    first = mesh.dp.rank * microbatches
    seed = state.config.train.seed
    state.optimizer.gradients.begin_step(microbatches)
    result = run_schedule(
        state.plan.schedule,
        stages,
        batch.inputs.unbind(),
        partial(microbatch_loss, stages, batch),
        mesh.pp,
        noises=[Noise(seed, step, first + i) for i in range(microbatches)],
        output_gradient=torch.tensor(
            1 / num_tokens, dtype=stages.context.master_dtype, device=mesh.device
        ),
    )
    state.optimizer.finish_gradients()
    loss_sum = sum_over_stages(result.outputs, mesh)
    return loss_sum, num_tokens, result


def count_targets(batch: Batch, mesh: ParallelMesh) -> int:
    """Target tokens over all microbatches and DP ranks."""
    return int(all_reduce(batch.mask.sum(dtype=torch.int64), mesh.dp))


def sum_over_stages(losses: list[Tensor], mesh: ParallelMesh) -> Tensor:
    """Sum of the last stages' ``losses`` over microbatches and DP, fp64 scalar, on every rank."""
    # fp32 losses of like size leave fp64 with bits to spare: their sum is exact in any order.
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for loss in losses:
        total += loss
    return all_reduce(all_reduce(total, mesh.pp), mesh.dp)


def microbatch_loss(
    stages: CausalLMStages, batch: Batch, hidden: Tensor, microbatch: int, forward_pass: ForwardPass
) -> Tensor:
    """Loss sum of one microbatch, after the last stage."""
    return stages.loss(hidden, batch.targets[microbatch], batch.mask[microbatch], forward_pass)
