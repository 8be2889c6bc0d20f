"""How long a schedule takes, given how long its parts take, and what it holds in memory.

Ranks compute in order and wait for what they need; messages travel while they compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megabit.pipeline.actions import (
    Backward,
    Compute,
    Forward,
    InputGradient,
    Schedule,
    WeightGradient,
    needed_by,
    produced_by,
)
from megabit.pipeline.placement import Placement
from megabit.pipeline.timeline import Span, Timeline


@dataclass(frozen=True)
class Costs:
    """The time of each stage for one microbatch, by stage, and of one message."""

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    message: float = 0.0

    @staticmethod
    def even(
        placement: Placement,
        forward: float = 1,
        input_gradient: float = 1,
        weight_gradient: float = 1,
        message: float = 0,
    ) -> "Costs":
        """Equal stages. Times are those of a *rank*, for all of its stages, so that placements can
        be compared."""

        def each(cost: float) -> list[float]:
            return [cost / placement.chunks] * placement.num_stages

        return Costs(each(forward), each(input_gradient), each(weight_gradient), message)

    def of(self, compute: Compute, stage: int) -> float:
        """The time that ``compute`` takes on ``stage``."""
        match compute:
            case Forward():
                return self.forward[stage]
            case InputGradient():
                return self.input_gradient[stage]
            case WeightGradient():
                return self.weight_gradient[stage]
            case Backward():
                return self.input_gradient[stage] + self.weight_gradient[stage]
        raise TypeError(f"{compute} is no known compute")


class Stuck(ValueError):
    """Ranks wait for one another, or for something that nobody computes."""

    def __init__(self, waiting: dict[int, Compute]) -> None:
        super().__init__(
            "; ".join(f"rank {rank} cannot run {compute}" for rank, compute in waiting.items())
        )
        self.waiting = waiting


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When each rank computes what, each as early as it can; without ``costs``, F = B = W.

    Raises:
        Stuck: the order of computes cannot be run to its end.
    """
    placement = schedule.placement
    costs = costs or Costs.even(placement)
    orders = [schedule.computes(rank) for rank in range(placement.ranks)]
    spans: list[list[Span]] = [[] for _ in orders]
    arrivals: dict[tuple[int, str, int, int], float] = {}
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, order in enumerate(orders):
            done = spans[rank]
            while len(done) < len(order):
                compute = order[len(done)]
                ready = done[-1].end if done else 0.0
                needed = needed_by(compute, rank, placement)
                if needed is not None:
                    arrival = arrivals.get((rank, needed.kind, needed.microbatch, needed.chunk))
                    if arrival is None:
                        break
                    ready = max(ready, arrival)
                end = ready + costs.of(compute, placement.stage(rank, compute.chunk))
                done.append(Span(compute, ready, end))
                is_moving = True
                made = produced_by(compute, rank, placement)
                if made is not None:
                    delay = costs.message if made.peer != rank else 0
                    arrivals[made.peer, made.kind, made.microbatch, made.chunk] = end + delay
    waiting = {
        rank: order[len(spans[rank])]
        for rank, order in enumerate(orders)
        if len(spans[rank]) < len(order)
    }
    if waiting:
        raise Stuck(waiting)
    return Timeline(placement, spans)


def peak_activations(run: Schedule | Timeline) -> list[float]:
    """For each rank, the most that it keeps for backward passes at a time, from F to the end of W.

    In units of what all of a rank's layers keep of one microbatch. After B less is kept than
    before, the operands of W only; it counts in full.
    """
    peaks = []
    for rank in range(run.placement.ranks):
        live = peak = 0
        for compute in run.computes(rank):
            live += isinstance(compute, Forward)
            peak = max(peak, live)
            live -= isinstance(compute, Backward | WeightGradient)
        peaks.append(peak / run.placement.chunks)
    return peaks
