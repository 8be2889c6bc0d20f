"""One optimizer step, top to bottom.

count target tokens → run the pipeline schedule (forward, backward; the sums of gradients over DP
start in its last backward) → measure the gradient → let the stability guard judge → clip and AdamW
on master weights, or skip → codes, scales and dense replicas to everyone. Everything a rank needs
for it is a ``TrainingState``.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megabit.config import Config, tree_blocks
from megabit.data.batches import Batch
from megabit.data.step_plan import StepPlan
from megabit.data_parallel import ZeroOptimizer
from megabit.errors import RunError
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages, build_stages, num_parameters
from megabit.outer.opening import Outer, open_outer
from megabit.pipeline.actions import Schedule
from megabit.pipeline.catalog import make_schedule
from megabit.pipeline.communicate import lookahead_on
from megabit.pipeline.execute import PipelineResult, run_schedule
from megabit.pipeline.plan import StagePlan, agree_on_plan
from megabit.reduce import all_reduce
from megabit.tensor_parallel import ActivationProbe, Noise, Quantization
from megabit.training.clip import gradient_factor
from megabit.training.guard import SPARES_WEIGHTS, Verdict
from megabit.training.objective import Objective, build_objective
from megabit.training.part_costs import measure_part_costs, with_layers
from megabit.training.probe import StepProbe
from megabit.training.progress import Progress
from megabit.training.schedule import hyperparameters, quantization_share, warmup_tokens
from megabit.training.teacher import Teacher, open_teacher


@dataclass
class TrainingState:
    """The model and its optimizer on one rank, and how far the run has come."""

    config: Config
    """With the layers of stages filled in, if they were to be measured."""
    mesh: ParallelMesh
    plan: StagePlan
    """Who computes what, in which order."""
    steps: StepPlan
    """Which samples each step takes."""
    stages: CausalLMStages
    optimizer: ZeroOptimizer
    progress: Progress
    teacher: Teacher | None = None
    """What the objective learns from, if it does."""
    outer: Outer | None = None
    """What brings islands together, if there are any."""
    schedules: dict[int, Schedule] = field(default_factory=dict)
    """By the microbatches of a rank in a step: while the batch grows there are several."""

    @staticmethod
    def create(config: Config, mesh: ParallelMesh) -> "TrainingState":
        """Build and initialise; the model is the same at every layout. Collective over the mesh.

        Raises:
            UserError: ``parallel.schedule`` names a function that does not work, or not the same
                one on all ranks; or ``loss.teacher`` cannot teach the model.
        """
        plan = agree_on_plan(config, mesh)
        if config.parallel.balance == "measured":
            plan = plan.balanced_by(measure_part_costs(config, mesh))
            config = with_layers(config, plan.layers_per_stage)
        steps = StepPlan.of(config)
        teacher = open_teacher(config, mesh)
        stages = build_stages(config, mesh, plan)
        weight = stages.embedding_weight
        state = TrainingState(
            config=config,
            mesh=mesh,
            plan=plan,
            steps=steps,
            stages=stages,
            optimizer=ZeroOptimizer.create(
                stages,
                mesh,
                config,
                tied=(weight, stages.head_use) if stages.is_tied and weight is not None else None,
                chunk_of=stages.chunk_of,
                share=quantization_share(config.train.quantization_ramp, 0, steps.total_tokens),
            ),
            progress=Progress.of(config),
            teacher=teacher,
            schedules={plan.schedule.microbatches: plan.schedule},
        )
        state.outer = open_outer(config, state.optimizer)
        return state

    @property
    def place(self) -> tuple[int, int]:
        """Which of how many equal runs of a step's samples is this rank's: islands share them out,
        and DP ranks in each."""
        outer, dp = self.config.outer, self.mesh.dp
        island = outer.island if outer.method == "stale" else self.mesh.outer.rank
        return island * dp.size + dp.rank, outer.islands * dp.size

    def schedule_of(self, microbatches: int) -> Schedule:
        """The pipeline schedule of a step with so many of them on this rank."""
        if microbatches not in self.schedules:
            parallel, device = self.config.parallel, self.mesh.device.type
            self.schedules[microbatches] = make_schedule(
                parallel.schedule, parallel.pp, microbatches, parallel.chunks, lookahead_on(device)
            )
        return self.schedules[microbatches]

    def quantization_of(self, step: int) -> Quantization:
        """How step ``step`` (0-based) quantizes."""
        total, consumed = self.steps.total_tokens, self.steps.tokens_before(step)
        return Quantization(
            quantization_share(self.config.train.quantization_ramp, consumed, total),
            self.progress.full_precision_activations,
        )


@dataclass(frozen=True)
class StepReport:
    """What a step was like; the same on every rank except for the times and the probe."""

    loss: float
    """Plain cross-entropy, a mean over the step's target tokens, in nats, before the update."""
    objective: float
    """What was minimised: the loss, unless ``config.loss`` says otherwise."""
    num_tokens: int
    """Target tokens of the step, over all ranks."""
    batch_size: int
    """Samples of the step, over all ranks."""
    grad_norm: float
    """Before clipping; inf if the gradient is not finite."""
    lr: float
    weight_decay: float
    quantization: Quantization
    """Of the step's forward passes."""
    next_share: float
    """λ of the next step."""
    loss_scale: float
    pipeline: PipelineResult
    """When this rank computed what."""
    is_updated: bool
    """Whether weights were changed."""
    verdicts: Sequence[Verdict] = ()
    """What the stability guard had to say."""
    overflowed: bool = False
    """Whether an fp16 gradient was out of range, and the loss scale was lowered for it."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds on this rank: ``forward_backward``, ``gradients``, ``update``."""
    probe: StepProbe | None = None

    @property
    def is_skipped(self) -> bool:
        """Whether no weight was changed."""
        return not self.is_updated


def train_step(
    state: TrainingState, batch: Batch, step: int, is_probed: bool = False
) -> StepReport:
    """Run optimizer step ``step`` (0-based) on this rank's part of the global batch.

    Collective over the whole mesh. If the loss or the gradient is infinite or not a number
    anywhere, or the guard says so, all ranks skip the update together: weights, moments and codes
    stay as they are.

    Args:
        is_probed: count what quantization does to activations and weights, and measure the
            gradient before it is reduced; it costs a few percent of the step.
    """
    config, optimizer, progress, steps = state.config, state.optimizer, state.progress, state.steps
    phases: dict[str, float] = {}
    probe = ActivationProbe() if is_probed else None
    optimizer.gradients.measures_local = is_probed
    scale = progress.loss_scale.value
    with _timed(phases, "forward_backward"):
        result = forward_backward(state, batch, step, probe, finish_gradients=False)
    with _timed(phases, "gradients"):
        optimizer.finish_gradients()
        norm = optimizer.gradient_norm(num_parameters(config.model)) / scale
        loss, objective = result.sums(state.mesh)
    is_finite = all(map(math.isfinite, (norm, objective, loss)))
    overflowed = not math.isfinite(norm) and progress.loss_scale.may_shrink
    verdicts = [] if overflowed else progress.guard.judge(step, loss, norm)
    is_updated = is_finite and not {v.action for v in verdicts} & SPARES_WEIGHTS
    consumed, total = steps.tokens_before(step), steps.total_tokens
    values = hyperparameters(
        config.optim,
        consumed,
        total,
        warmup_tokens(config.optim, steps),
        steps.tokens_before(step + 1) - consumed,
    )
    lr = values.lr * progress.lr_factor
    now, following = state.quantization_of(step), state.quantization_of(step + 1)
    counts = None
    with _timed(phases, "update"):
        if is_updated:
            optim = config.optim
            factor = gradient_factor(norm, optim.clip_grad_norm, optim.clip_boost) / scale
            if optim.clip_grad_value:
                optimizer.clip_values(optim.clip_grad_value * scale)
            counts = optimizer.step(factor, lr, values.weight_decay, following.share, is_probed)
        else:
            optimizer.skip()
            if following.share != now.share:
                optimizer.publish(following.share)
    progress.loss_scale.after_step(overflowed)
    return StepReport(
        loss=loss,
        objective=objective,
        num_tokens=result.objective.num_tokens,
        batch_size=steps.batch_size(step),
        grad_norm=norm,
        lr=lr,
        weight_decay=values.weight_decay,
        quantization=now,
        next_share=following.share,
        loss_scale=scale,
        pipeline=result.pipeline,
        is_updated=is_updated,
        verdicts=verdicts,
        overflowed=overflowed,
        phases=phases,
        probe=None
        if probe is None
        else StepProbe(probe, counts or {}, optimizer.gradients.local_square / scale**2),
    )


@dataclass(frozen=True)
class BackwardResult:
    """What forward and backward passes of a step gave on this rank."""

    objective: Objective
    pipeline: PipelineResult

    def sums(self, mesh: ParallelMesh) -> tuple[float, float]:
        """Means of loss and objective over the global batch, on every rank; collective."""
        losses, outputs = self.objective.losses, self.pipeline.outputs
        loss, minimised = sum_over_stages(mesh, losses, outputs)
        return loss / self.objective.num_targets, minimised / self.objective.num_terms


def forward_backward(
    state: TrainingState,
    batch: Batch,
    step: int,
    probe: ActivationProbe | None = None,
    finish_gradients: bool = True,
) -> BackwardResult:
    """Gradients of the objective over the global batch, complete, in ``state.optimizer``.

    They are those of ``progress.loss_scale`` times it. The objective is a sum divided by the
    *global* number of terms, so it does not matter how tokens are spread over microbatches and
    ranks.

    Args:
        finish_gradients: with false, the caller waits for their sums (``finish_gradients``).
    """
    mesh, stages = state.mesh, state.stages
    batch = batch.to(mesh.device)
    objective = build_objective(state.config, mesh, stages, batch, state.teacher)
    if objective.num_targets == 0:
        raise RunError("a step has no target token: every prediction of its samples is masked")
    microbatches = len(batch.inputs)
    first = state.place[0] * microbatches
    seed = state.config.train.seed
    blocks = 1
    if state.config.parallel.exact == "full":
        blocks = tree_blocks(microbatches * mesh.dp.size) // mesh.dp.size
    state.optimizer.gradients.begin_step(microbatches, blocks, step)
    scale = state.progress.loss_scale.value
    pipeline = run_schedule(
        state.schedule_of(microbatches),
        stages,
        objective.inputs,
        objective,
        mesh.pp,
        noises=[Noise(seed, step, first + i) for i in range(microbatches)],
        output_gradient=torch.tensor(
            scale / objective.num_terms, dtype=stages.context.master_dtype, device=mesh.device
        ),
        quantization=state.quantization_of(step),
        probe=probe,
    )
    if finish_gradients:
        state.optimizer.finish_gradients()
    return BackwardResult(objective, pipeline)


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds of the block, on the host's clock."""
    started = time.perf_counter()
    try:
        yield
    finally:
        phases[name] = phases.get(name, 0.0) + time.perf_counter() - started


def sum_over_stages(mesh: ParallelMesh, *losses: Sequence[Tensor]) -> list[float]:
    """Sum of each of ``losses`` over microbatches, stages and DP, on every rank."""
    # fp32 losses of like size leave fp64 with bits to spare: their sum is exact in any order.
    total = torch.zeros(len(losses), dtype=torch.float64, device=mesh.device)
    for row, of_microbatches in zip(total, losses, strict=True):
        for loss in of_microbatches:
            row += loss
    return all_reduce(all_reduce(total, mesh.pp), mesh.dp).tolist()
