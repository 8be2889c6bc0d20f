"""Layers on stages so that no rank computes much longer than the others.

The embedding and the head cost time as well: a head over a large vocabulary is worth several
layers. What parts cost is estimated from the shapes of their products, or measured
(``training.part_costs``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megabit.config import Config
from megabit.pipeline.layout import StageLayout
from megabit.pipeline.placement import Placement
from megabit.pipeline.simulate import Costs

TERNARY_FORWARD = 0.25
"""What an int8 × ternary product is taken to cost, for each unit of the same product in
``precision.compute``. Backward products are of the latter kind, except with an int8 backward."""


@dataclass(frozen=True)
class PartCost:
    """What a part of the model takes for one microbatch, in seconds or in multiply-adds."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient

    def __add__(self, other: "PartCost") -> "PartCost":
        return PartCost(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    def __mul__(self, times: float) -> "PartCost":
        return PartCost(
            self.forward * times, self.input_gradient * times, self.weight_gradient * times
        )


@dataclass(frozen=True)
class PartCosts:
    """What the parts of a model take. Layers are taken to be alike."""

    layer: PartCost
    embedding: PartCost
    head: PartCost
    source: Literal["estimate", "measurement"] = "estimate"

    def of_stage(self, layout: StageLayout) -> PartCost:
        cost = self.layer * len(layout.layers)
        cost += self.embedding * layout.embedding
        return cost + self.head * layout.head

    def by_stage(self, layouts: Sequence[StageLayout]) -> Costs:
        """For ``simulate``."""
        stages = [self.of_stage(layout) for layout in layouts]
        return Costs(
            [stage.forward for stage in stages],
            [stage.input_gradient for stage in stages],
            [stage.weight_gradient for stage in stages],
        )


def estimate_part_costs(config: Config) -> PartCosts:
    """Multiply-adds of the products, those of int8 discounted; nothing else is counted."""
    model, precision = config.model, config.precision
    hidden, ffn = model.hidden_size, model.intermediate_size
    kv = model.num_key_value_heads * model.head_dim
    tokens = config.train.micro_batch_size * config.data.seq_length
    is_ternary = model.linear == "ternary"
    has_integers = is_ternary and model.activations != "full"
    forward = TERNARY_FORWARD if has_integers else 1.0
    has_int8_backward = has_integers and precision.ternary_backward == "int8"
    backward = TERNARY_FORWARD if has_int8_backward else 1.0
    columns = tokens * hidden * (hidden + 2 * kv + 2 * ffn)  # q, k, v, gate and up
    rows = tokens * hidden * (hidden + ffn)  # o and down
    weights = columns + rows
    # Causal: a token looks at half of the others; twice, for the scores and for the values.
    attention = tokens * config.data.seq_length * hidden
    layer = PartCost(
        forward * weights + attention, backward * weights + 2 * attention, backward * weights
    )
    if config.train.recompute != "none":
        chosen = config.train.recompute_layers
        share = 1.0 if chosen is None else len(set(chosen)) / model.num_hidden_layers
        # ``full`` repeats products of columns; those of rows are repeated where they are dense.
        is_full = config.train.recompute == "full"
        repeated = attention + forward * (is_full * columns + (not is_ternary) * rows)
        layer += PartCost(input_gradient=share * repeated)
    head = tokens * hidden * model.vocab_size
    # A row for each token to read, a matrix of gradients to fill.
    embedding = PartCost(tokens * hidden, 0, model.vocab_size * hidden)
    return PartCosts(layer, embedding, PartCost(head, head, head))


def balance(placement: Placement, num_layers: int, costs: PartCosts) -> list[int]:
    """Layers on each stage, such that the busiest rank has as little to do as possible, and after
    that its busiest stage."""
    ends = [
        StageLayout(range(0), stage == 0, stage == placement.num_stages - 1)
        for stage in range(placement.num_stages)
    ]
    loads = [costs.of_stage(layout).total for layout in ends]
    ranks = [
        sum(loads[stage] for stage in placement.stages[rank]) for rank in range(placement.ranks)
    ]
    counts = [0] * placement.num_stages
    # Layers are alike, so to give each to whoever has least to do is the best there is.
    for _ in range(num_layers):
        stage = min(
            range(placement.num_stages), key=lambda s: (ranks[placement.rank_of(s)], loads[s], s)
        )
        counts[stage] += 1
        loads[stage] += costs.layer.total
        ranks[placement.rank_of(stage)] += costs.layer.total
    return counts
