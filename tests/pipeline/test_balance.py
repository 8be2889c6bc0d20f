"""Layers on stages by what they cost: as even as can be, embedding and head included."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabit.config import Config, load_config
from megabit.pipeline.balance import PartCost, PartCosts, balance, estimate_part_costs
from megabit.pipeline.layout import stage_layouts
from megabit.pipeline.placement import Placement

PLACEMENTS = [
    *(Placement.loop(ranks, chunks) for ranks in (1, 2, 3, 4) for chunks in (1, 2)),
    *(Placement.v(ranks) for ranks in (1, 2, 3)),
    Placement.loop(2, 3),
]


def compositions(total: int, parts: int) -> Iterator[list[int]]:
    """All ways to lay ``total`` layers over ``parts`` stages, empty ones too."""
    if parts == 1:
        yield [total]
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield [first, *rest]


def busiest(placement: Placement, counts: list[int], costs: PartCosts) -> tuple[float, float]:
    """What the rank that has most to do has, and the largest stage, one part after the other."""
    stages = [
        counts[stage] * costs.layer.total
        + (costs.embedding.total if stage == 0 else 0)
        + (costs.head.total if stage == len(counts) - 1 else 0)
        for stage in range(len(counts))
    ]
    ranks = [sum(stages[stage] for stage in chunks) for chunks in placement.stages]
    return max(ranks), max(stages)


# Whole numbers, so that sums are exact in any order.
part_costs = st.builds(
    PartCost, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9).map(lambda n: n + 1)
)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(PLACEMENTS),
    st.integers(0, 6),
    st.builds(PartCosts, part_costs, part_costs, part_costs),
)
def test_no_other_layout_is_more_even(
    placement: Placement, num_layers: int, costs: PartCosts
) -> None:
    """The busiest rank has the least that it can have, and after that the largest stage."""
    counts = balance(placement, num_layers, costs)
    assert sum(counts) == num_layers
    assert len(counts) == placement.num_stages
    others = compositions(num_layers, placement.num_stages)
    assert busiest(placement, counts, costs) == min(
        busiest(placement, other, costs) for other in others
    )


def plain(layer: float = 1, embedding: float = 0, head: float = 0) -> PartCosts:
    return PartCosts(PartCost(layer), PartCost(embedding), PartCost(head))


def test_equal_layers_are_laid_evenly() -> None:
    assert balance(Placement.loop(4), 8, plain()) == [2, 2, 2, 2]
    assert balance(Placement.loop(2, 2), 8, plain()) == [2, 2, 2, 2]
    assert balance(Placement.loop(3), 7, plain(head=0.5)) == [3, 2, 2]


def test_the_head_and_the_embedding_take_the_place_of_layers() -> None:
    assert balance(Placement.loop(4), 10, plain(head=2)) == [3, 3, 3, 1]
    assert balance(Placement.loop(4), 10, plain(embedding=2)) == [1, 3, 3, 3]
    assert balance(Placement.loop(4), 8, plain(embedding=2, head=2)) == [1, 3, 3, 1]
    assert balance(Placement.loop(2), 4, plain(head=100)) == [4, 0]


def test_both_ends_are_on_the_first_rank_of_a_v() -> None:
    """Which has fewer layers by what both cost. On a loop they are on two ranks."""
    costs = plain(embedding=2, head=2)
    for placement, expected in ((Placement.v(3), [1, 5, 5]), (Placement.loop(3, 2), [3, 5, 3])):
        counts = balance(placement, 11, costs)
        assert [sum(counts[stage] for stage in chunks) for chunks in placement.stages] == expected


# Estimates.


def estimate(*chosen: str) -> PartCosts:
    return estimate_part_costs(config_of(*chosen))


def config_of(*chosen: str) -> Config:
    return load_config(["model.num_hidden_layers=16", *chosen])


def test_the_estimate_by_hand() -> None:
    """Multiply-adds of a dense model; T 2·8, H 16, F 48, KV rows 8, vocabulary 100."""
    costs = estimate(
        *("model.hidden_size=16", "model.intermediate_size=48", "model.num_attention_heads=4"),
        *("model.num_key_value_heads=2", "model.vocab_size=100", "model.linear=dense"),
        *("data.seq_length=8", "train.micro_batch_size=2", "train.global_batch_size=2"),
    )
    products = 16 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 48)
    attention = 16 * 8 * 16  # a causal half of scores and of values
    assert costs.layer == PartCost(products + attention, products + 2 * attention, products)
    head = 16 * 16 * 100
    assert costs.head == PartCost(head, head, head)
    assert costs.embedding == PartCost(16 * 16, 0, 16 * 100)


def test_integer_products_cost_less() -> None:
    dense, ternary, int8 = (
        estimate(*chosen).layer
        for chosen in (("model.linear=dense",), (), ("precision.ternary_backward=int8",))
    )
    assert ternary.forward < dense.forward
    assert ternary.input_gradient == dense.input_gradient
    assert ternary.weight_gradient == dense.weight_gradient
    assert int8.forward == ternary.forward
    assert int8.input_gradient < ternary.input_gradient
    assert int8.weight_gradient < ternary.weight_gradient


def test_recomputation_is_counted_where_it_happens() -> None:
    """Before the gradient of the input, in the layers that do it; with ``full`` the products of
    columns again, and those of rows where nothing is kept of them."""
    none, selective, full, half = (
        estimate(*chosen).layer
        for chosen in (
            (),
            ("train.recompute=selective",),
            ("train.recompute=full",),
            ("train.recompute=full", f"train.recompute_layers={[*range(8)]}"),
        )
    )
    for layer in (selective, full, half):
        assert layer.forward == none.forward
        assert layer.weight_gradient == none.weight_gradient
    assert none.input_gradient < selective.input_gradient < full.input_gradient
    assert half.input_gradient == (none.input_gradient + full.input_gradient) / 2
    # A dense layer computes everything again.
    none, full = (
        estimate("model.linear=dense", f"train.recompute={chosen}").layer
        for chosen in ("none", "full")
    )
    assert full.input_gradient == none.input_gradient + none.forward


def layers_of(placement: Placement, *chosen: str) -> list[int]:
    config = config_of(*chosen)
    return balance(placement, config.model.num_hidden_layers, estimate_part_costs(config))


def test_a_large_vocabulary_takes_layers_off_the_last_stage() -> None:
    loop = Placement.loop(4)
    assert layers_of(loop, "model.vocab_size=16") == [4, 4, 4, 4]
    sizes = [layers_of(loop, f"model.vocab_size={size}")[-1] for size in (16, 4096, 16_000)]
    assert sizes[0] > sizes[1] > sizes[2]
    *others, last = layers_of(loop, "model.vocab_size=100_000")
    assert last == 0
    assert max(others) - min(others) <= 1
    # On a V they are taken off rank 0, which has both ends.
    counts = layers_of(Placement.v(4), "model.vocab_size=16_000")
    assert counts[0] + counts[7] < min(counts[i] + counts[7 - i] for i in (1, 2, 3))


def test_recomputing_layers_outweigh_the_head() -> None:
    """The more a layer costs, the fewer of them is a head worth."""
    sizes = ("model.vocab_size=32_000", "model.num_hidden_layers=64")
    last = [
        layers_of(Placement.loop(2), *sizes, f"train.recompute={chosen}")[-1]
        for chosen in ("none", "full")
    ]
    assert last[0] < last[1]


def test_costs_of_stages_are_those_of_their_parts() -> None:
    costs = PartCosts(PartCost(1, 2, 4), PartCost(8, 0, 16), PartCost(32, 64, 128))
    layouts = stage_layouts([2, 0, 1])
    by_stage = costs.by_stage(layouts)
    assert by_stage.forward == [2 + 8, 0, 1 + 32]
    assert by_stage.input_gradient == [4, 0, 2 + 64]
    assert by_stage.weight_gradient == [8 + 16, 0, 4 + 128]
    assert costs.of_stage(layouts[0]).total == 2 * 7 + 24
    assert costs.of_stage(stage_layouts([3])[0]).total == pytest.approx(21 + 24 + 224)
