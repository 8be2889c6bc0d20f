"""From the configuration to who computes what: the schedule, and the layers on each stage."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megabit.config import Config
from megabit.errors import UserError
from megabit.mesh import ParallelMesh
from megabit.pipeline.actions import Schedule
from megabit.pipeline.balance import PartCosts, balance, estimate_part_costs
from megabit.pipeline.catalog import make_schedule
from megabit.pipeline.communicate import LOOKAHEAD, lookahead_on
from megabit.pipeline.layout import StageLayout, stage_layouts
from megabit.reduce import first_problem, is_same


@dataclass(frozen=True)
class StagePlan:
    """A step's schedule, and what its stages are made of."""

    schedule: Schedule
    layouts: tuple[StageLayout, ...]
    """By stage."""
    costs: PartCosts
    """What the parts of the model are taken to cost."""

    def of_rank(self, rank: int) -> tuple[StageLayout, ...]:
        """Of a pipeline rank's stages, by chunk."""
        return tuple(self.layouts[stage] for stage in self.schedule.placement.stages[rank])

    @property
    def layers_per_stage(self) -> list[int]:
        return [len(layout.layers) for layout in self.layouts]

    def balanced_by(self, costs: PartCosts) -> "StagePlan":
        """The plan with its layers laid out by other costs."""
        num_layers = sum(self.layers_per_stage)
        counts = balance(self.schedule.placement, num_layers, costs)
        return replace(self, layouts=stage_layouts(counts), costs=costs)


def plan_stages(config: Config, dp: int, lookahead: int = LOOKAHEAD) -> StagePlan:
    """The plan of ``config`` at so many DP ranks.

    Layers are laid out as ``parallel.layers_per_stage`` says, else balanced by estimated costs.
    For ``parallel.balance: measured`` that is the trainer's first plan only.

    Args:
        lookahead: see ``communicate.with_communication``.

    Raises:
        UserError: ``parallel.schedule`` names a function that does not work, or the layers do not
            fit its stages.
    """
    parallel, train = config.parallel, config.train
    replicas = dp * config.outer.islands
    microbatches = train.global_batch_size // train.micro_batch_size // replicas
    schedule = make_schedule(
        parallel.schedule, parallel.pp, microbatches, parallel.chunks, lookahead
    )
    costs = estimate_part_costs(config)
    counts = parallel.layers_per_stage or balance(
        schedule.placement, config.model.num_hidden_layers, costs
    )
    problem = _layout_problem(counts, schedule, parallel.schedule)
    if problem is not None:
        raise UserError(f"parallel.layers_per_stage: {counts} {problem}")
    return StagePlan(schedule, stage_layouts(counts), costs)


def agree_on_plan(config: Config, mesh: ParallelMesh) -> StagePlan:
    """``plan_stages``, the same on every rank or an error on every rank; collective over the world.

    A schedule of the user's is a file that each host has of its own.
    """
    plan, problem = None, None
    try:
        plan = plan_stages(config, mesh.dp.size, lookahead_on(mesh.device.type))
    except UserError as error:
        problem = str(error)
    problem = first_problem(problem, mesh.world, mesh.device)
    if plan is None or problem is not None:
        raise UserError(*(problem or "").splitlines())
    digest = hashlib.sha256(str(plan.schedule).encode()).digest()
    if not is_same(digest, mesh.world, mesh.device):
        raise UserError(
            f"parallel.schedule: {config.parallel.schedule} gives ranks different schedules; put "
            "the same file on all hosts"
        )
    return plan


def _layout_problem(counts: Sequence[int], schedule: Schedule, name: str) -> str | None:
    """What is wrong with so many layers on each stage, if anything."""
    placement = schedule.placement
    if len(counts) != placement.num_stages:
        return (
            f"is for {len(counts)} stages, and parallel.schedule={name} has "
            f"{placement.num_stages} (parallel.pp · parallel.vpp)"
        )
    ends = {0, placement.num_stages - 1}
    for rank, stages in enumerate(placement.stages):
        if not ends & {*stages} and not any(counts[stage] for stage in stages):
            which = "stage" if len(stages) == 1 else "stages"
            return (
                f"leaves pipeline rank {rank} without any layer "
                f"({which} {', '.join(map(str, stages))}); it needs one"
            )
    return None
