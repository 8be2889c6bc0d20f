"""A configuration on so many ranks of a machine: what a step's time and memory are predicted of."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from megabit.config import Config, ParallelConfig
from megabit.pipeline.actions import Schedule
from megabit.pipeline.balance import PartCosts, balance, estimate_part_costs
from megabit.pipeline.catalog import GENERATORS, make_schedule
from megabit.pipeline.layout import stage_layouts
from megabit.pipeline.placement import Placement
from megabit.pipeline.plan import StagePlan
from megabit.plan.collectives import seconds
from megabit.plan.machine import Machine, Rates
from megabit.plan.messages import Message
from megabit.plan.timeline import Cores
from megabit.training.shapes import RankShape


@dataclass(frozen=True)
class Layout:
    """A configuration on so many ranks of a machine."""

    config: Config
    world_size: int
    machine: Machine
    make: Callable[[int], Schedule]
    """The configured schedule, for a number of microbatches."""
    plan: StagePlan
    """Layers on stages. Its schedule may have fewer microbatches than the step: as many as it takes
    until a rank keeps as many activations as it ever does."""

    @property
    def dp(self) -> int:
        parallel = self.config.parallel
        return self.world_size // (parallel.tp * parallel.pp)

    @property
    def dp_intra(self) -> int | None:
        """DP ranks that share a host, where gradients are reduced in two levels
        (``communication.topology``)."""
        choice = self.config.communication
        if choice.topology == "flat" and choice.dp_intra is None:
            return None
        on_host, rest = divmod(self.machine.nodes_of, self.config.parallel.tp)
        inner = choice.dp_intra or (0 if rest else on_host)
        return inner if 1 < inner < self.dp and self.dp % inner == 0 else None

    @cached_property
    def shapes(self) -> list[RankShape]:
        """The first rank of each pipeline rank; the others of it are no larger."""
        ranks_of_stage = self.world_size // self.config.parallel.pp
        return [
            RankShape(self.config, self.world_size, rank * ranks_of_stage, self.plan, self.dp_intra)
            for rank in range(self.config.parallel.pp)
        ]

    @property
    def rates(self) -> Rates:
        return self.machine.device.rates_of(self.config.precision.compute)

    @property
    def cores(self) -> Cores | None:
        """What all ranks of a host share, if they do."""
        count = self.machine.device.cores
        ranks_of_stage = self.world_size // self.config.parallel.pp
        return None if count is None else Cores(count, self.machine.on_node(ranks_of_stage))

    @property
    def crowding(self) -> float:
        """How many processes there are for each core, where that is more than one; what is measured
        with all of them at work takes so much longer than the work that is in it."""
        count = self.machine.device.cores
        ranks = self.machine.on_node(self.world_size)
        return 1.0 if count is None else max(1.0, ranks / count)

    def message_s(self, message: Message) -> float:
        """Seconds of ``message``, all the times that it is sent, while all ranks send the like."""
        parallel = self.config.parallel
        tp, ranks_of_stage = parallel.tp, self.world_size // parallel.pp
        inner = self.dp_intra
        size, stride = {
            "tp": (tp, 1),
            "pp": (parallel.pp, ranks_of_stage),
            "dp": (self.dp if inner is None else inner, tp),
            "dp_inter": (1 if inner is None else self.dp // inner, tp * (inner or 1)),
            "ends": (2, ranks_of_stage * (parallel.pp - 1)),
            "stage": (ranks_of_stage, 1),
            "world": (self.world_size, 1),
        }[message.axis]
        if size == 1:
            return 0.0
        return seconds(message, self.machine, size, stride, self.world_size // size)

    def work_of(self, messages: list[Message]) -> float:
        """Of communication between computes, in seconds of a core of one's own."""
        return sum(map(self.message_s, messages)) / self.crowding


@dataclass
class Schedules:
    """Schedules that were made. Of ours, only the computes are wanted, which tests have proved."""

    _made: dict[tuple[str, int, int, int], Schedule] = field(default_factory=dict)
    _layers: dict[tuple[object, ...], list[int]] = field(default_factory=dict)

    def maker(self, parallel: ParallelConfig) -> Callable[[int], Schedule]:
        """The configured schedule as a function of the number of microbatches."""

        def make(microbatches: int) -> Schedule:
            key = parallel.schedule, parallel.pp, microbatches, parallel.chunks
            if key not in self._made:
                generate = GENERATORS.get(parallel.schedule)
                self._made[key] = make_schedule(*key) if generate is None else generate(*key[1:])
            return self._made[key]

        return make

    def layers_per_stage(self, config: Config, placement: Placement, costs: PartCosts) -> list[int]:
        """Of a configuration that leaves it to ``parallel.balance``."""
        key = placement, costs
        if key not in self._layers:
            self._layers[key] = balance(placement, config.model.num_hidden_layers, costs)
        return self._layers[key]


def make_layout(config: Config, world_size: int, machine: Machine, schedules: Schedules) -> Layout:
    """``config`` on so many ranks of ``machine``; it has no problems.

    Raises:
        UserError: ``parallel.schedule`` is a function of the user's that does not work.
    """
    parallel = config.parallel
    dp = world_size // (parallel.tp * parallel.pp)
    microbatches = config.train.global_batch_size // config.train.micro_batch_size // dp
    make = schedules.maker(parallel)
    # No schedule but GPipe keeps more of more microbatches than it has stages on all ranks.
    is_enough = parallel.schedule != "gpipe"
    kept = min(microbatches, 2 * parallel.pp * parallel.chunks) if is_enough else microbatches
    schedule = make(kept)
    costs = estimate_part_costs(config)
    counts = parallel.layers_per_stage or schedules.layers_per_stage(
        config, schedule.placement, costs
    )
    plan = StagePlan(schedule, stage_layouts(counts), costs)
    return Layout(config, world_size, machine, make, plan)
