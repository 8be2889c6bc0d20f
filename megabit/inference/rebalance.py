"""A layout of layers on stages that would be faster, by what stages were seen to take.

Nodes of a pipeline need not be alike. A stage's speed is what it took, divided by what its parts
are estimated to cost; the estimate says how a stage's time is made up of layers and head, and what
was measured how fast the stage is. With that, layers go to where they are done soonest. Nothing is
moved while the engine runs: a proposal is for its next start. Memory is not looked at.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megabit.config import ModelConfig
from megabit.inference.messages import Stats

LEAST_GAIN = 0.05
"""Part of the slowest stage's time that must be won for a layout to be worth a change."""
LEAST_STEPS = 1000
"""Forward passes that must have been measured, of whatever sizes requests make them."""
QUARTERS = 4
BYTE = 8.0
"""What reading a byte of weights costs, in multiply-adds of floats: a CPU core reads some 10 GB
a second, and does some 80 billion multiply-adds."""
TERNARY = 0.25
"""Bytes of a ternary weight, and what one multiply-add with it costs."""

CALLS = 4e7
"""What it costs to call a layer's operations, whatever their size: about half a millisecond."""


@dataclass(frozen=True)
class StepCosts:
    """Of one forward pass, in any unit. The embedding is a row for each token: nothing beside
    them."""

    layer: float
    head: float

    def of_stages(self, layers_per_stage: Sequence[int]) -> list[float]:
        """By stage."""
        costs = [self.layer * layers for layers in layers_per_stage]
        costs[-1] += self.head
        return costs


def estimate_step_costs(
    model: ModelConfig, tokens: float, rows: float, dense_bytes: int = 4
) -> StepCosts:
    """From the sizes of products: each costs what reading its weights does, or what multiplying
    does, whichever is more; and a layer what its calls do.

    Args:
        tokens: of a forward pass, on average.
        rows: those of which logits are taken.
        dense_bytes: of a weight of the head; layers' weights are ternary, or have as many.
    """
    hidden, ffn = model.hidden_size, model.intermediate_size
    kv = model.num_key_value_heads * model.head_dim
    weights = 2 * hidden * (hidden + kv) + 3 * hidden * ffn
    is_ternary = model.linear == "ternary"
    size, work = (TERNARY, TERNARY) if is_ternary else (float(dense_bytes), 1.0)
    layer = CALLS + weights * max(BYTE * size, work * tokens)
    head = hidden * model.vocab_size * max(BYTE * dense_bytes, rows)
    return StepCosts(layer, head)


def propose_layers(
    layers_per_stage: Sequence[int],
    seconds: Sequence[float],
    costs: StepCosts,
    least_gain: float = LEAST_GAIN,
) -> tuple[int, ...] | None:
    """Consecutive layers on each stage such that the slowest stage is as fast as can be, or None if
    that wins no more than ``least_gain`` of the time of the slowest one now.

    Args:
        seconds: that each stage took for the same forward passes.
    """
    if len(layers_per_stage) == 1 or min(seconds) <= 0:
        return None
    slowness = _slowness(layers_per_stage, seconds, costs)
    if slowness is None:
        return None
    counts = [0] * len(slowness)
    loads = _times(counts, slowness, costs)
    # Layers are alike: to give each to the stage that is done with it first is the best there is.
    for _ in range(sum(layers_per_stage)):
        stage = min(range(len(counts)), key=lambda s: loads[s] + slowness[s] * costs.layer)
        counts[stage] += 1
        loads[stage] += slowness[stage] * costs.layer
    return tuple(counts) if max(loads) < (1 - least_gain) * max(seconds) else None


class StageTimes:
    """What stages took of late, and the layout that follows from it.

    A proposal has to win enough in each quarter of what was measured, so that a stage which was
    slow for a moment moves nothing.

    Args:
        layers_per_stage: as they are.
        least_steps: forward passes that are measured before anything is proposed; older ones are
            forgotten, as far as these are there without them.
    """

    def __init__(
        self,
        model: ModelConfig,
        layers_per_stage: Sequence[int],
        dense_bytes: int = 4,
        least_steps: int = LEAST_STEPS,
    ) -> None:
        self.model, self.layers_per_stage = model, tuple(layers_per_stage)
        self.dense_bytes, self.least_steps = dense_bytes, least_steps
        self._reports: deque[Stats] = deque()

    def add(self, stats: Stats) -> tuple[int, ...] | None:
        """Take the next of an engine's reports; the proposal, by all so far, if there is one."""
        if len(stats.stage_seconds) != len(self.layers_per_stage):
            return None
        reports = self._reports
        if not reports or stats.steps > reports[-1].steps:
            reports.append(stats)
        while len(reports) > QUARTERS + 1 and self._steps_since(reports[1]) >= self.least_steps:
            reports.popleft()
        if len(reports) <= QUARTERS or self._steps_since(reports[0]) < self.least_steps:
            return None
        proposed = self._between(reports[0], reports[-1])
        ends = [reports[i * (len(reports) - 1) // QUARTERS] for i in range(QUARTERS + 1)]
        if proposed is None or not all(self._wins(proposed, *pair) for pair in pairwise(ends)):
            return None
        return proposed

    def _steps_since(self, report: Stats) -> int:
        return self._reports[-1].steps - report.steps

    def _between(self, first: Stats, last: Stats) -> tuple[int, ...] | None:
        return propose_layers(
            self.layers_per_stage, _seconds(first, last), self._costs(first, last)
        )

    def _wins(self, layers: Sequence[int], first: Stats, last: Stats) -> bool:
        """Whether ``layers`` would have been enough faster between two reports."""
        seconds, costs = _seconds(first, last), self._costs(first, last)
        slowness = _slowness(self.layers_per_stage, seconds, costs)
        if slowness is None:
            return False
        return max(_times(layers, slowness, costs)) < (1 - LEAST_GAIN) * max(seconds)

    def _costs(self, first: Stats, last: Stats) -> StepCosts:
        steps = last.steps - first.steps
        rows = (last.generation_tokens - first.generation_tokens) / steps
        tokens = (last.prompt_tokens - first.prompt_tokens) / steps + rows
        return estimate_step_costs(self.model, tokens, rows, self.dense_bytes)


def _seconds(first: Stats, last: Stats) -> list[float]:
    pairs = zip(first.stage_seconds, last.stage_seconds, strict=True)
    return [after - before for before, after in pairs]


def _slowness(
    layers_per_stage: Sequence[int], seconds: Sequence[float], costs: StepCosts
) -> list[float] | None:
    """Seconds for a unit of cost, by stage. None where a stage has nothing to do: its speed is not
    known."""
    units = costs.of_stages(layers_per_stage)
    if min(units) <= 0 or min(seconds) <= 0:
        return None
    return [taken / unit for taken, unit in zip(seconds, units, strict=True)]


def _times(
    layers_per_stage: Sequence[int], slowness: Sequence[float], costs: StepCosts
) -> list[float]:
    units = costs.of_stages(layers_per_stage)
    return [slow * unit for slow, unit in zip(slowness, units, strict=True)]
