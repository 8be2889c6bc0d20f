"""Layouts by measured speed: what is moved, and what is not."""

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from megabit.config import ModelConfig
from megabit.inference.messages import Stats
from megabit.inference.rebalance import (
    CALLS,
    LEAST_GAIN,
    StageTimes,
    StepCosts,
    estimate_step_costs,
    propose_layers,
)

MODEL = ModelConfig(vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=12)
NO_HEAD = StepCosts(layer=1.0, head=0.0)


def seconds_of(layers: Sequence[int], slowness: Sequence[float], costs: StepCosts) -> list[float]:
    return [s * c for s, c in zip(slowness, costs.of_stages(layers), strict=True)]


def test_a_stage_that_is_half_as_fast_gets_half_as_many_layers() -> None:
    seconds = seconds_of((6, 6), (1, 2), NO_HEAD)
    assert propose_layers((6, 6), seconds, NO_HEAD) == (8, 4)
    seconds = seconds_of((4, 4, 4), (1, 2, 1), NO_HEAD)
    assert propose_layers((4, 4, 4), seconds, NO_HEAD) == (5, 2, 5)
    # And there it is at rest.
    for layers, slowness in (((8, 4), (1, 2)), ((5, 2, 5), (1, 2, 1))):
        assert propose_layers(layers, seconds_of(layers, slowness, NO_HEAD), NO_HEAD) is None


def test_the_head_stays_where_it_is() -> None:
    costs = StepCosts(layer=1.0, head=4.0)
    assert propose_layers((6, 6), seconds_of((6, 6), (1, 1), costs), costs) == (8, 4)
    # A head that takes longer than all layers: the last stage gets none.
    costs = StepCosts(layer=1.0, head=20.0)
    assert propose_layers((6, 6), seconds_of((6, 6), (1, 1), costs), costs) == (12, 0)


def test_no_layout_is_better_than_the_one_proposed() -> None:
    generator = random.Random(0)
    moved = 0
    for _ in range(100):
        layers = [generator.randint(1, 5) for _ in range(3)]
        slowness = [generator.uniform(0.5, 3) for _ in range(3)]
        costs = StepCosts(layer=1.0, head=generator.uniform(0, 5))
        seconds = seconds_of(layers, slowness, costs)
        total = sum(layers)
        best = min(
            max(seconds_of((a, b, total - a - b), slowness, costs))
            for a, b in product(range(total + 1), repeat=2)
            if a + b <= total
        )
        found = propose_layers(layers, seconds, costs)
        if found is None:
            assert best >= (1 - LEAST_GAIN) * max(seconds)
        else:
            moved += 1
            assert sum(found) == total
            assert max(seconds_of(found, slowness, costs)) == pytest.approx(best)
    assert 20 < moved < 100


def test_what_wins_little_is_left_alone() -> None:
    # 11 instead of 12 layers on the slower stage would be the best, and win 1 %.
    seconds = [12.0, 12.5]
    assert propose_layers((12, 12), seconds, NO_HEAD) is None
    assert propose_layers((12, 12), [12.0, 15.0], NO_HEAD) == (13, 11)


@pytest.mark.parametrize(
    ("layers", "seconds"), [((12,), [5.0]), ((6, 6), [0.0, 5.0]), ((12, 0), [5.0, 1.0])]
)
def test_where_nothing_is_known_nothing_is_proposed(
    layers: tuple[int, ...], seconds: list[float]
) -> None:
    assert propose_layers(layers, seconds, NO_HEAD) is None


def test_costs_are_those_of_reading_or_of_multiplying() -> None:
    one = estimate_step_costs(MODEL, 1, 1)
    # At one token weights are only read: 2 bits each in layers, fp32 in the head.
    kv = MODEL.num_key_value_heads * MODEL.head_dim
    weights = 2 * 256 * (256 + kv) + 3 * 256 * 512
    assert one.head / (one.layer - CALLS) == pytest.approx((4 * 256 * 1024) / (weights / 4))
    assert estimate_step_costs(MODEL, 4, 4) == one
    many = estimate_step_costs(MODEL, 512, 512)
    assert many.head / (many.layer - CALLS) == pytest.approx((256 * 1024) / (weights / 4))
    # Logits of a prompt are taken of its last token only.
    assert estimate_step_costs(MODEL, 512, 1).head == one.head
    assert estimate_step_costs(MODEL, 1, 1, dense_bytes=2).head == one.head / 2


def reports(
    layers: Sequence[int],
    slowness: Iterator[Sequence[float]],
    steps: int = 10,
) -> Iterator[Stats]:
    """An engine's reports of decoding 4 tokens at a time."""
    costs = estimate_step_costs(MODEL, 4, 4)
    total, stats = [0.0] * len(layers), 0
    for now in slowness:
        yield Stats(
            steps=stats,
            generation_tokens=4 * stats,
            stage_seconds=tuple(total),
        )
        stats += steps
        taken = seconds_of(layers, now, costs)
        total = [a + steps * b for a, b in zip(total, taken, strict=True)]


def test_a_slow_stage_is_seen_after_enough_steps() -> None:
    times = StageTimes(MODEL, (6, 6), least_steps=100)
    found = [times.add(stats) for stats in reports((6, 6), iter([(1.0, 3.0)] * 30))]
    assert found[:10] == [None] * 10
    layers = found[10]
    assert layers is not None
    assert layers[1] < 6
    assert found[10:] == [layers] * 20


def test_noise_moves_nothing() -> None:
    generator = random.Random(1)
    at_rest = (6, 6)
    costs = estimate_step_costs(MODEL, 4, 4)
    speeds = (1.0, costs.of_stages(at_rest)[0] / costs.of_stages(at_rest)[1])  # equally long
    noisy = ([s * generator.lognormvariate(0, 0.3) for s in speeds] for _ in range(300))
    times = StageTimes(MODEL, at_rest, least_steps=500)
    assert {times.add(stats) for stats in reports(at_rest, noisy)} == {None}


def test_a_stage_that_was_slow_for_a_moment_moves_nothing() -> None:
    costs = estimate_step_costs(MODEL, 4, 4)
    even = costs.of_stages((6, 6))[0] / costs.of_stages((6, 6))[1]
    moment = [(1.0, even)] * 8 + [(9.0, even)] * 2 + [(1.0, even)] * 30
    times = StageTimes(MODEL, (6, 6), least_steps=100)
    assert {times.add(stats) for stats in reports((6, 6), iter(moment))} == {None}


def test_the_layout_that_was_proposed_is_kept() -> None:
    layers: tuple[int, ...] = (6, 6)
    seen = [layers]
    for start in range(4):
        generator = random.Random(start)
        slowness = (
            [1.0 * generator.lognormvariate(0, 0.1), 2.5 * generator.lognormvariate(0, 0.1)]
            for _ in range(40)
        )
        times = StageTimes(MODEL, layers, least_steps=200)
        found = [f for f in map(times.add, reports(layers, slowness)) if f is not None]
        layers = found[-1] if found else layers
        seen.append(layers)
    assert seen[1] != (6, 6)
    assert seen[1:] == [seen[1]] * 4


def test_an_idle_engine_and_one_stage() -> None:
    times = StageTimes(MODEL, (6, 6), least_steps=1)
    idle = Stats(steps=5, stage_seconds=(1.0, 2.0))
    assert [times.add(idle) for _ in range(5)] == [None] * 5
    alone = StageTimes(MODEL, (12,), least_steps=1)
    found = [alone.add(stats) for stats in reports((12,), iter([(1.0,)] * 20))]
    assert found == [None] * 20
    assert times.add(Stats(steps=9)) is None  # before the first report of ranks


def test_it_needs_no_torch() -> None:
    code = "import sys, megabit.inference.rebalance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
