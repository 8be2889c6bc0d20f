"""The generators with fused backward passes, and what holds for all: order, peaks, text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabit.pipeline.actions import (
    Backward,
    Exchange,
    Forward,
    InputGradient,
    Message,
    WeightGradient,
)
from megabit.pipeline.placement import Placement
from megabit.pipeline.schedules import alternate, forward_only
from megabit.pipeline.simulate import Costs, peak_activations, simulate
from tests.pipeline.cases import CHUNKS, generate, of_chunk, sizes


def test_gpipe_as_text() -> None:
    assert str(generate("gpipe", 2, 2)) == "rank 0: F0 F1 BW0 BW1\nrank 1: F0 F1 BW0 BW1"


def test_1f1b_as_text() -> None:
    assert str(generate("1f1b", 3, 4)) == (
        "rank 0: F0 F1 F2 BW0 F3 BW1 BW2 BW3\n"
        "rank 1: F0 F1 BW0 F2 BW1 F3 BW2 BW3\n"
        "rank 2: F0 BW0 F1 BW1 F2 BW2 F3 BW3"
    )


def test_interleaved_as_text() -> None:
    assert str(generate("interleaved", 2, 4, 2)) == (
        "rank 0: F0 F1 F0.1 F1.1 F2 BW0.1 F3 BW1.1 F2.1 BW0 F3.1 BW1 BW2.1 BW3.1 BW2 BW3\n"
        "rank 1: F0 F1 F0.1 BW0.1 F1.1 BW1.1 F2 BW0 F3 BW1 F2.1 BW2.1 F3.1 BW3.1 BW2 BW3"
    )


def test_interleaved_with_a_smaller_last_group_as_text() -> None:
    assert str(generate("interleaved", 2, 3, 2)) == (
        "rank 0: F0 F1 F0.1 F1.1 F2 BW0.1 BW1.1 F2.1 BW0 BW1 BW2.1 BW2\n"
        "rank 1: F0 F1 F0.1 BW0.1 F1.1 BW1.1 F2 BW0 BW1 F2.1 BW2.1 BW2"
    )


def test_forward_only_as_text() -> None:
    assert str(forward_only(Placement.loop(2, 2), 3)) == (
        "rank 0: F0 F1 F0.1 F1.1 F2 F2.1\nrank 1: F0 F1 F0.1 F1.1 F2 F2.1"
    )
    assert str(forward_only(Placement.v(2), 3)) == (
        "rank 0: F0 F1 F2 F0.1 F1.1 F2.1\nrank 1: F0 F0.1 F1 F1.1 F2 F2.1"
    )


@settings(deadline=None, max_examples=60)
@given(sizes())
def test_each_chunk_runs_the_microbatches_in_order(size: tuple[str, int, int, int]) -> None:
    """So the gradients of every weight add up in the same order whatever the schedule."""
    schedule = generate(*size)
    _, ranks, microbatches, chunks = size
    for rank in range(ranks):
        for chunk in range(chunks):
            for kinds in ((Forward,), (InputGradient, Backward), (WeightGradient, Backward)):
                assert of_chunk(schedule, rank, chunk, *kinds) == [*range(microbatches)]


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
def test_peak_activations(ranks: int, microbatches: int, chunks: int) -> None:
    assert peak_activations(generate("gpipe", ranks, microbatches)) == [microbatches] * ranks
    assert peak_activations(generate("1f1b", ranks, microbatches)) == [
        min(microbatches, ranks - rank) for rank in range(ranks)
    ]
    peaks = peak_activations(generate("interleaved", ranks, microbatches, chunks))
    limit = ranks + (ranks - 1) / chunks
    assert max(peaks) <= min(microbatches, limit) + 1e-9
    if microbatches >= 2 * ranks and microbatches % ranks == 0:
        expected = [limit - 2 * rank / chunks for rank in range(ranks)]
        assert peaks == pytest.approx(expected)  # thirds are not exact


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
def test_interleaved_goes_in_groups(ranks: int, microbatches: int, chunks: int) -> None:
    """Of p microbatches, the last group being smaller: chunk by chunk, and backwards likewise."""
    groups = [range(i, min(i + ranks, microbatches)) for i in range(0, microbatches, ranks)]
    up = [Forward(i, chunk) for group in groups for chunk in range(chunks) for i in group]
    down = [
        Backward(i, chunk) for group in groups for chunk in reversed(range(chunks)) for i in group
    ]
    schedule = generate("interleaved", ranks, microbatches, chunks)
    for rank in range(ranks):
        computes = schedule.computes(rank)
        assert [compute for compute in computes if isinstance(compute, Forward)] == up
        assert [compute for compute in computes if isinstance(compute, Backward)] == down
    evaluation = forward_only(Placement.loop(ranks, chunks), microbatches)
    assert all(evaluation.computes(rank) == up for rank in range(ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_forward_only_there_and_back(ranks: int) -> None:
    """On a V, groups would leave ranks idle for up to half of the time; here, until the first
    microbatch comes back, and about as long at the end."""
    placement, microbatches = Placement.v(ranks), 64
    schedule = forward_only(placement, microbatches)
    for rank in range(ranks):
        for chunk in range(2):
            assert of_chunk(schedule, rank, chunk, Forward) == [*range(microbatches)]
    unit = simulate(schedule, Costs.even(placement, 2, 2, 2))
    assert unit.duration <= 2 * microbatches + 2 * ranks - 2


@pytest.mark.parametrize("name", [name for name in CHUNKS if CHUNKS[name] == [1]])
def test_one_stage_on_each_rank_is_what_these_can(name: str) -> None:
    with pytest.raises(ValueError, match="must have 1 stage on each rank, not 2"):
        generate(name, 2, 4, 2)


def test_alternate() -> None:
    forwards, backwards = [Forward(0), Forward(1)], [Backward(0), Backward(1)]
    assert alternate(forwards, backwards, 0) == [Forward(0), Backward(0), Forward(1), Backward(1)]
    assert alternate(forwards, backwards, 1) == [Forward(0), Forward(1), Backward(0), Backward(1)]
    assert alternate(forwards, backwards, 9) == forwards + backwards


def test_rank_numbers_are_aligned() -> None:
    lines = str(forward_only(Placement.loop(11), 1)).splitlines()
    assert lines[9] == "rank  9: F0"
    assert lines[10] == "rank 10: F0"


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Forward(3), "F3"),
        (Forward(3, 1), "F3.1"),
        (Backward(3), "BW3"),
        (InputGradient(3), "B3"),
        (WeightGradient(3, 2), "W3.2"),
        (
            Exchange((Message("activation", 3, 0, 2),), (Message("gradient", 1, 1, 2),)),
            "[send a3→2, recv g1.1←2]",
        ),
    ],
)
def test_actions_print(action: object, text: str) -> None:
    assert str(action) == text
