"""The simulator against published formulas and against figures by hand."""

import pytest

from megabit.pipeline.actions import Forward, InputGradient, Schedule, WeightGradient
from megabit.pipeline.placement import Placement
from megabit.pipeline.schedules import forward_only
from megabit.pipeline.simulate import Costs, Stuck, peak_activations, simulate
from megabit.pipeline.timeline import Span
from tests.pipeline.cases import generate

# Times of F, B and W of a rank's layers; multiples of 12, so that those of 2, 3 or 4 chunks are
# whole numbers, and sums exact.
TIMES = [(12, 12, 12), (12, 24, 12), (24, 24, 12), (36, 48, 24)]
SIZES = [(1, 1), (1, 5), (2, 2), (2, 6), (3, 3), (4, 4), (4, 8), (4, 16), (8, 8), (8, 24), (16, 32)]


def bubble(name: str, ranks: int, microbatches: int, chunks: int, times: tuple[int, ...]) -> float:
    """The time of a step beyond what a rank computes, in units of F, B and W."""
    schedule = generate(name, ranks, microbatches, chunks)
    timeline = simulate(schedule, Costs.even(schedule.placement, *times))
    ideal = microbatches * sum(times)
    assert timeline.busy == ranks * ideal
    assert timeline.bubble == pytest.approx((timeline.duration - ideal) / ideal, rel=1e-12)
    return timeline.duration - ideal


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(
    name: str, ranks: int, microbatches: int, times: tuple[int, ...]
) -> None:
    """(p−1)/m."""
    assert bubble(name, ranks, microbatches, 1, times) == (ranks - 1) * sum(times)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(p, m) for p, m in SIZES if m % p == 0])
def test_bubble_of_interleaved(
    ranks: int, microbatches: int, chunks: int, times: tuple[int, ...]
) -> None:
    """(p−1)/(mv)."""
    expected = (ranks - 1) * sum(times) / chunks
    assert bubble("interleaved", ranks, microbatches, chunks, times) == expected


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_bubble_of_zb_h1(ranks: int, microbatches: int, times: tuple[int, ...]) -> None:
    """(p−1)(F+B−W)/(m(F+B+W))."""
    forward, input_gradient, weight_gradient = times
    expected = (ranks - 1) * (forward + input_gradient - weight_gradient)
    assert bubble("zb-h1", ranks, microbatches, 1, times) == expected


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_bubble_of_zb_v(ranks: int, microbatches: int) -> None:
    """(p−1)/(6m), for F = B = W."""
    assert bubble("zb-v", ranks, microbatches, 2, (12, 12, 12)) == (ranks - 1) * 36 / 6


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 16])
def test_peak_activations(ranks: int) -> None:
    m = 2 * ranks

    def peak(name: str, chunks: int = 1) -> float:
        return max(peak_activations(generate(name, ranks, m, chunks)))

    assert peak("gpipe") == m
    assert peak("1f1b") == ranks
    assert peak("interleaved", 2) == ranks + (ranks - 1) / 2
    assert peak("interleaved", 4) == ranks + (ranks - 1) / 4
    assert peak("zb-h1") == ranks
    assert peak("zb-v", 2) == ranks
    assert peak("v-half", 2) == (ranks + 2) // 2
    assert peak("v-min", 2) == (ranks + 4) // 3


def test_messages_take_time() -> None:
    """Two microbatches from rank 0 to rank 1, and gradients back, a message taking 10."""
    placement = Placement.loop(2)
    schedule = Schedule(
        placement,
        2,
        [
            [Forward(0), Forward(1), InputGradient(0), WeightGradient(0)],
            [Forward(0), InputGradient(0), Forward(1), WeightGradient(0)],
        ],
    )
    timeline = simulate(schedule, Costs([1, 2], [3, 4], [5, 6], message=10))
    assert timeline.ranks == [
        [
            Span(Forward(0), 0, 1),
            Span(Forward(1), 1, 2),  # while activation 0 travels until 11
            Span(InputGradient(0), 27, 30),  # rank 1 has its gradient at 17
            Span(WeightGradient(0), 30, 35),
        ],
        [
            Span(Forward(0), 11, 13),
            Span(InputGradient(0), 13, 17),
            Span(Forward(1), 17, 19),  # activation 1 arrived at 12
            Span(WeightGradient(0), 19, 25),
        ],
    ]
    assert timeline.duration == 35
    assert timeline.busy == 10 + 14
    assert timeline.bubble == pytest.approx(70 / 24 - 1)


def test_stages_of_one_rank_send_nothing() -> None:
    """On a V the last rank goes on at once from stage p−1 to stage p."""
    schedule = forward_only(Placement.v(2), 1)
    timeline = simulate(schedule, Costs([1] * 4, [1] * 4, [1] * 4, message=10))
    assert [[span.start for span in spans] for spans in timeline.ranks] == [[0, 23], [11, 12]]


@pytest.mark.parametrize(
    ("name", "waits"), [("gpipe", 1 + 1 + 2 + 1 + 2 + 2), ("1f1b", 1 + 1 + 2 + 2)]
)
def test_the_slowest_stage_bounds_the_time(name: str, waits: int) -> None:
    """It computes without a break, but for the stages before it at the start and the end; in GPipe
    it waits for those after it, too, where forwards end and backwards begin."""
    schedule = generate(name, 4, 8)
    costs = Costs(forward=[1, 1, 3, 1], input_gradient=[2, 2, 6, 2], weight_gradient=[0] * 4)
    assert simulate(schedule, costs).duration == 8 * (3 + 6) + waits


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "v-half", "v-min"])
def test_the_slowest_rank_is_a_lower_bound(name: str) -> None:
    schedule = generate(name, 4, 8, 2)
    placement = schedule.placement
    # Rank 2 has two slow stages, whichever those are.
    cost = [3 if placement.rank_of(stage) == 2 else 1 for stage in range(8)]
    timeline = simulate(schedule, Costs(cost, cost, cost))
    busy = sum(span.duration for span in timeline.ranks[2])
    assert busy == 8 * 2 * 9
    assert busy < timeline.duration < busy + 2 * 9 * 4


def test_stuck_ranks_are_named() -> None:
    schedule = Schedule(
        Placement.loop(2), 1, [[InputGradient(0), Forward(0)], [Forward(0), InputGradient(0)]]
    )
    with pytest.raises(Stuck, match="rank 0 cannot run B0; rank 1 cannot run F0") as raised:
        simulate(schedule)
    assert raised.value.waiting == {0: InputGradient(0), 1: Forward(0)}
