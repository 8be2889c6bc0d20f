"""ZB-V, V-Half and V-Min: bubbles and activations as published (arXiv 2405.15362)."""

import pytest

from megabit.pipeline.placement import Placement
from megabit.pipeline.simulate import Costs, peak_activations, simulate
from tests.pipeline.cases import generate

RANKS = range(1, 17)


def test_zb_v_as_text() -> None:
    assert str(generate("zb-v", 2, 3, 2)) == (
        "rank 0: F0 F1 F0.1 B0.1 F2 W0.1 F1.1 B1.1 B0 W1.1 F2.1 B2.1 B1 W0 B2 W2.1 W1 W2\n"
        "rank 1: F0 F0.1 F1 F1.1 B0.1 B0 W0.1 F2 W0 F2.1 B1.1 B1 B2.1 B2 W1.1 W1 W2.1 W2"
    )


def test_v_half_as_text() -> None:
    assert str(generate("v-half", 2, 3, 2)) == (
        "rank 0: F0 F0.1 B0.1 F1 W0.1 F1.1 B1.1 F2 B0 W1.1 W0 F2.1 B2.1 B1 W2.1 B2 W1 W2\n"
        "rank 1: F0 F0.1 B0.1 F1 F1.1 B0 W0.1 B1.1 F2 W0 F2.1 B1 W1.1 B2.1 B2 W1 W2.1 W2"
    )


def test_v_min_as_text() -> None:
    assert str(generate("v-min", 2, 3, 2)) == (
        "rank 0: F0 F0.1 B0.1 F1 W0.1 B0 W0 F1.1 B1.1 F2 W1.1 B1 W1 F2.1 B2.1 W2.1 B2 W2\n"
        "rank 1: F0 F0.1 B0.1 B0 F1 F1.1 W0.1 W0 B1.1 B1 F2 F2.1 W1.1 W1 B2.1 B2 W2.1 W2"
    )


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_and_activations(name: str, ranks: int) -> None:
    """For m ≥ p and F = B = W, in units of one compute of one chunk."""
    activations = {"zb-v": ranks, "v-half": (ranks + 2) // 2, "v-min": (ranks + 4) // 3}[name]
    bubble = {
        "zb-v": ranks - 1,
        "v-half": 3 * ranks - (3 if ranks == 2 else 4),
        "v-min": 4 * ranks - (3 if ranks % 3 == 0 else 5),
    }[name]
    for microbatches in (ranks, ranks + 1, 2 * ranks + 1, 4 * ranks):
        schedule = generate(name, ranks, microbatches, 2)
        timeline = simulate(schedule, Costs.even(Placement.v(ranks), 2, 2, 2))
        assert timeline.duration == 6 * microbatches + (bubble if ranks > 1 else 0)
        assert max(peak_activations(schedule)) == min(activations, microbatches)
        # The paper's figures, which leave out constants.
        if name == "v-half":
            assert timeline.bubble <= ranks / (2 * microbatches)
        if name == "v-min":
            assert timeline.bubble <= 2 * ranks / (3 * microbatches)


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
@pytest.mark.parametrize("ranks", RANKS)
def test_few_microbatches_keep_few_activations(name: str, ranks: int) -> None:
    for microbatches in range(1, ranks):
        assert max(peak_activations(generate(name, ranks, microbatches, 2))) <= microbatches


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_two_stages_on_each_rank_is_what_these_can(name: str, chunks: int) -> None:
    with pytest.raises(ValueError, match=f"must have 2 stages on each rank, not {chunks}"):
        generate(name, 2, 4, chunks)
