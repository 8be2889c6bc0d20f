"""How long a training step of a layout takes, and of what that time is made.

The way of a prediction, for one layout on one machine:

    Layout ─ RankShape of each pipeline rank ┬─ compute.part_times: work of F, B, W
                                             ├─ messages, collectives.seconds: over TP and PP
                                             └─ timeline.stretched: when each rank has computed
    then, of the slowest rank:  gradients over DP, what of it backward does not hide
                                + norm, AdamW, ternarizing (compute.update_s)
                                + codes over DP, what of it the next forward does not hide

Nothing of it knows a model; what a rank holds is said by ``training.shapes``, and what it sends is
checked against ``training.traffic``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megabit.config import Config
from megabit.model.flops import flops_per_token
from megabit.pipeline.balance import PartCost, PartCosts
from megabit.pipeline.simulate import Costs
from megabit.plan.compute import part_times
from megabit.plan.layout import Layout
from megabit.plan.messages import (
    PHASES,
    Message,
    between_stages,
    embedding_messages,
    head_messages,
    layer_messages,
)
from megabit.plan.rank_end import RankEnd, RankEnds
from megabit.plan.timeline import stretched
from megabit.training.shapes import RankShape

DAY_S = 86_400
PARTS = ("compute", "bubble", "TP", "PP", "DP", "update", "other")
"""Of the time of a step; they add up to it."""
ROUNDING = 1e-9
"""Of a duration: what many additions of numbers of seconds may be off by."""


@dataclass(frozen=True)
class Step:
    """A predicted step."""

    seconds: dict[str, float]
    """By part. ``TP``, ``PP``, ``DP``: communication that nothing hides; ``bubble``: a rank waits
    for another stage, mean over ranks."""
    hidden_s: float
    """Communication over DP that is hidden behind compute, of the slowest rank."""
    tokens: int
    """Of a step."""
    ranks: int
    flops: float
    """Of a token's forward and backward pass, by the convention of ``model.flops``."""
    peak_tflops: float | None
    """Of a rank."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s

    def days(self, tokens: float) -> float:
        """Of a run of so many tokens."""
        return tokens / self.tokens_per_s / DAY_S

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, as ``telemetry.utilization`` counts it."""
        if self.peak_tflops is None:
            return None
        return self.flops * self.tokens_per_s / self.ranks / (self.peak_tflops * 1e12)

    @property
    def bubble(self) -> float:
        """Waiting for other stages, as a share of the step."""
        return self.seconds["bubble"] / self.total_s

    @property
    def exposed(self) -> float:
        """Communication that nothing hides, as a share of the step."""
        return sum(self.seconds[part] for part in ("TP", "PP", "DP")) / self.total_s


Work = tuple[list[float], list[float], list[float]]
"""F, B and W, by stage."""


@dataclass
class Memo:
    """What layouts have in common, by what it depends on: there are thousands of them."""

    parts: dict[tuple[object, ...], tuple[PartCosts, PartCosts]] = field(default_factory=dict)
    """Compute and communication over TP, of the parts of the model."""
    ends: RankEnds = field(default_factory=RankEnds)


@dataclass(frozen=True)
class Account:
    """The work of a layout's step, before anybody waits for anybody."""

    layout: Layout
    compute: Work
    talk: Work
    """Over TP."""
    memo: Memo

    @staticmethod
    def of(layout: Layout, memo: Memo | None = None) -> "Account":
        """Of ``layout``; with a ``memo`` of layouts of the same model, batch, world and machine."""
        memo = memo or Memo()
        compute, talk = _part_costs(layout, memo)
        return Account(
            layout,
            _by_stage(layout, compute),
            _by_stage(layout, talk),
            memo,
        )

    @cached_property
    def message_s(self) -> float:
        """Between stages."""
        layout = self.layout
        return layout.message_s(between_stages(layout.shapes[0])) / layout.crowding

    @cached_property
    def ends(self) -> list[RankEnd]:
        """By pipeline rank."""
        layout = self.layout
        return [self.memo.ends.of(shape, layout.rates, layout.message_s) for shape in layout.shapes]

    @cached_property
    def costs(self) -> Costs:
        """For the simulator."""
        forward, input_gradient, weight_gradient = (
            [a + b for a, b in zip(own, sent, strict=True)]
            for own, sent in zip(self.compute, self.talk, strict=True)
        )
        return Costs(forward, input_gradient, weight_gradient, self.message_s)

    @property
    def least_s(self) -> float:
        """A step takes no less: the work of the busiest rank's stages, without any waiting."""
        stages = [sum(times) for times in zip(*self.compute, *self.talk, strict=True)]
        placement = self.layout.plan.schedule.placement
        busiest = max(sum(stages[s] for s in own) for own in placement.stages)
        return self.layout.shapes[0].microbatches * busiest

    @property
    def mean_s(self) -> float:
        """The work of all stages, shared evenly by the ranks."""
        work = sum(map(sum, (*self.compute, *self.talk)))
        return self.layout.shapes[0].microbatches * work / len(self.layout.shapes)

    def step(self) -> Step:
        """The step played, and what it is made of."""
        layout, placement = self.layout, self.layout.plan.schedule.placement
        microbatches, ranks = layout.shapes[0].microbatches, placement.ranks
        steps = stretched(layout.make, microbatches, self.costs, layout.cores)
        gradients = [self._gradients(rank) for rank in range(ranks)]
        weights = [self._weights(rank) for rank in range(ranks)]
        until_gradients = max(a + b.exposed for a, b in zip(steps.ends, gradients, strict=True))
        after = max(weight.exposed for weight in weights) + max(e.agreement for e in self.ends)
        busy_s, tp_s = (self._mean(work) for work in (self.compute, self.talk))
        waiting = steps.duration - busy_s - tp_s
        if waiting < ROUNDING * steps.duration:  # nobody waits
            scale = steps.duration / (busy_s + tp_s)
            busy_s, tp_s, waiting = busy_s * scale, tp_s * scale, 0.0
        hops = 2 * (placement.num_stages - 1) / ranks if ranks > 1 else 0
        pp_s = min(waiting, self.message_s * hops)
        config = layout.config
        return Step(
            seconds={
                "compute": busy_s,
                "bubble": waiting - pp_s,
                "TP": tp_s,
                "PP": pp_s,
                "DP": until_gradients - steps.duration + after,
                "update": max(end.update for end in self.ends) * layout.crowding,
                "other": layout.rates.step_s * layout.crowding,
            },
            hidden_s=max(a.hidden + b.hidden for a, b in zip(gradients, weights, strict=True)),
            tokens=config.train.global_batch_size * config.data.seq_length,
            ranks=layout.world_size,
            flops=flops_per_token(config.model, config.data.seq_length).total,
            peak_tflops=layout.machine.device.peak_tflops.get(config.precision.compute),
        )

    def _gradients(self, rank: int) -> "_Communication":
        """Behind the last backward pass; with ZeRO 2, behind each."""
        stages, costs = self.layout.plan.schedule.placement.stages[rank], self.costs
        backward = sum(costs.input_gradient[s] + costs.weight_gradient[s] for s in stages)
        shape = self.layout.shapes[rank]
        rounds = shape.microbatches if shape.sums_travel_each_microbatch else 1
        return self._exposed(self.ends[rank].gradients, rounds * backward)

    def _weights(self, rank: int) -> "_Communication":
        """Behind the first forward pass of the next step."""
        stages = self.layout.plan.schedule.placement.stages[rank]
        return self._exposed(self.ends[rank].weights, sum(self.costs.forward[s] for s in stages))

    def _exposed(self, total: float, behind: float) -> "_Communication":
        hidden = min(total * self.layout.machine.network.overlap, behind)
        return _Communication(total - hidden, hidden)

    def _mean(self, work: Work) -> float:
        """Of a rank, where all of them are at work at once."""
        microbatches = self.layout.shapes[0].microbatches
        ranks = len(self.ends)
        return microbatches * sum(map(sum, work)) / ranks * self.layout.crowding


@dataclass(frozen=True)
class _Communication:
    exposed: float
    hidden: float


def tokens_of(config: Config) -> int:
    """Of a whole run."""
    train = config.train
    return train.tokens or train.steps * train.global_batch_size * config.data.seq_length


def step_of(layout: Layout) -> Step:
    """What a step of ``layout`` takes."""
    return Account.of(layout).step()


def _part_costs(layout: Layout, memo: Memo) -> tuple[PartCosts, PartCosts]:
    """Compute and communication over TP of the parts of the model. Layers are alike, on whatever
    rank they are."""
    config, parallel = layout.config, layout.config.parallel
    key = (
        *(parallel.tp, parallel.sequence_parallel, parallel.row_reduce, layout.dp > 1),
        *(config.train.micro_batch_size, config.train.recompute, config.optim.zero_stage),
        parallel.pp > 1,
    )
    if key not in memo.parts:
        shape = max(layout.shapes, key=lambda shape: len(shape.layers))
        memo.parts[key] = part_times(shape, layout.rates), _tp_times(layout, shape)
    return memo.parts[key]


def _tp_times(layout: Layout, shape: RankShape) -> PartCosts:
    def cost(messages: Mapping[str, list[Message]]) -> PartCost:
        return PartCost(*(layout.work_of(messages.get(phase, [])) for phase in PHASES))

    return PartCosts(
        layer=cost(layer_messages(shape)),
        embedding=cost(embedding_messages(shape)),
        head=cost(head_messages(shape)),
    )


def _by_stage(layout: Layout, costs: PartCosts) -> Work:
    parts = [costs.of_stage(stage) for stage in layout.plan.layouts]
    return (
        [part.forward for part in parts],
        [part.input_gradient for part in parts],
        [part.weight_gradient for part in parts],
    )
