"""When each pipeline rank computes what, where ranks may have to share the cores of a host.

On GPUs a rank has a device of its own, and this is ``pipeline.simulate``. On a CPU, r processes of
one thread each on c < r cores run at c/r of their speed while all of them have something to do, and
faster while some wait for others: idle time in a pipeline is then time for another rank. So costs
are *work*, in seconds of a core of one's own, and this plays the schedule event by event, with
cores shared evenly by whoever computes.

A step of many microbatches repeats itself in its middle. ``stretched`` plays two short steps and
continues the straight line through them, which is what the real one takes to within a microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from megabit.pipeline.actions import Compute, Schedule, needed_by, produced_by
from megabit.pipeline.simulate import Costs, Stuck, simulate
from megabit.pipeline.timeline import Span, Timeline


@dataclass(frozen=True)
class Cores:
    """What the ranks of a pipeline share."""

    count: int
    """Of the host that all of them are on."""
    processes: int
    """That compute wherever one pipeline rank does: tp · dp of them."""

    def speed(self, busy_ranks: int) -> float:
        """Share of a core that a process has while so many pipeline ranks compute."""
        return min(1.0, self.count / (busy_ranks * self.processes))


def simulate_on(schedule: Schedule, costs: Costs, cores: Cores | None) -> Timeline:
    """The timeline of a step. With ``cores``, spans are longer than their work.

    Raises:
        Stuck: see ``simulate``.
    """
    if cores is None or cores.speed(schedule.placement.ranks) == 1:
        return simulate(schedule, costs)
    return _Shared(schedule, costs, cores).play()


class _Shared:
    """One step being played."""

    def __init__(self, schedule: Schedule, costs: Costs, cores: Cores) -> None:
        self.schedule, self.costs, self.cores = schedule, costs, cores
        self.placement = schedule.placement
        self.orders = [schedule.computes(rank) for rank in range(self.placement.ranks)]
        self.spans: list[list[Span]] = [[] for _ in self.orders]
        self.arrivals: dict[tuple[int, str, int, int], float] = {}
        self.running: dict[int, tuple[float, float]] = {}
        """By rank: when it began, and the work that is left."""
        self.now = 0.0

    def play(self) -> Timeline:
        while True:
            starts = self._begin()
            if not self.running and starts is None:
                break
            speed = self.cores.speed(len(self.running)) if self.running else 1.0
            work = min((left for _, left in self.running.values()), default=None)
            until_end = None if work is None else work / speed
            until_start = None if starts is None else starts - self.now
            wait = min(t for t in (until_end, until_start) if t is not None)
            self.now += wait
            done = wait * speed
            for rank, (began, left) in [*self.running.items()]:
                # What ends here ends exactly, whatever was lost in rounding.
                if until_end == wait and left == work:
                    self._end(rank, began)
                else:
                    self.running[rank] = began, max(0.0, left - done)
        waiting = {
            rank: order[len(spans)]
            for rank, (order, spans) in enumerate(zip(self.orders, self.spans, strict=True))
            if len(spans) < len(order)
        }
        if waiting:
            raise Stuck(waiting)
        return Timeline(self.placement, self.spans)

    def _begin(self) -> float | None:
        """Let all ranks begin that can; when the next of the others can, if that is known."""
        coming = None
        for rank, order in enumerate(self.orders):
            if rank in self.running or len(self.spans[rank]) == len(order):
                continue
            compute = order[len(self.spans[rank])]
            needed = needed_by(compute, rank, self.placement)
            ready: float | None = self.now
            if needed is not None:
                key = rank, needed.kind, needed.microbatch, needed.chunk
                ready = self.arrivals.get(key)
            if ready is None:
                continue
            if ready <= self.now:
                self.running[rank] = self.now, self._work(rank, compute)
            else:
                coming = ready if coming is None else min(coming, ready)
        return coming

    def _work(self, rank: int, compute: Compute) -> float:
        return self.costs.of(compute, self.placement.stage(rank, compute.chunk))

    def _end(self, rank: int, began: float) -> None:
        compute = self.orders[rank][len(self.spans[rank])]
        del self.running[rank]
        self.spans[rank].append(Span(compute, began, self.now))
        made = produced_by(compute, rank, self.placement)
        if made is not None:
            delay = self.costs.message if made.peer != rank else 0.0
            key = made.peer, made.kind, made.microbatch, made.chunk
            self.arrivals[key] = self.now + delay


@dataclass(frozen=True)
class Steps:
    """What a step of many microbatches takes, by pipeline rank, in seconds."""

    ends: list[float]
    """When each rank has computed everything, from the first start of any."""

    @cached_property
    def duration(self) -> float:
        """Until the last rank is done."""
        return max(self.ends)


def stretched(
    make: Callable[[int], Schedule], microbatches: int, costs: Costs, cores: Cores | None
) -> Steps:
    """The ends of a step of ``microbatches``.

    Args:
        make: the schedule for a number of microbatches.
    """
    first = make(1).placement
    # Groups of p microbatches, as interleaved orders have; enough of them to be past the start.
    short, unit = 4 * first.ranks, 2 * first.ranks
    short += microbatches % unit
    if microbatches <= short + unit:
        return Steps(_ends(make(microbatches), costs, cores))
    low = _ends(make(short), costs, cores)
    high = _ends(make(short + unit), costs, cores)
    times = (microbatches - short) / unit
    return Steps([a + times * (b - a) for a, b in zip(low, high, strict=True)])


def _ends(schedule: Schedule, costs: Costs, cores: Cores | None) -> list[float]:
    timeline = simulate_on(schedule, costs, cores)
    return [spans[-1].end - timeline.start for spans in timeline.ranks]
