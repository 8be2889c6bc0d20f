"""Fragments: what meets when, and that it is the same model's tensors at any layout."""

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.outer.diloco import DiLoCo
from megabit.outer.fragments import assign_fragments, is_due, sizes_of_all_stages
from tests.data_parallel.small import NUM_ELEMENTS, SHAPES
from tests.outer.islands import IslandRun, Weights, assert_same_model, outer_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(("fragments", "inner_steps"), [(1, 1), (1, 20), (4, 20), (3, 10), (7, 7)])
def test_each_meets_once_in_a_round_evenly_spread(fragments: int, inner_steps: int) -> None:
    for begin in (0, 13):
        steps = range(begin, begin + inner_steps)
        met = [[s for s in steps if is_due(s, f, fragments, inner_steps)] for f in range(fragments)]
        assert all(len(times) == 1 for times in met)
        times = sorted(of[0] for of in met)
        gaps = [b - a for a, b in zip(times, [*times[1:], times[0] + inner_steps], strict=True)]
        assert max(gaps) - min(gaps) <= 1


def test_the_first_fragment_meets_when_all_would() -> None:
    assert [s for s in range(1, 61) if is_due(s, 0, 4, 20)] == [20, 40, 60]


def test_assignment_is_even() -> None:
    """A decoder of 12 layers: within a percent; and a tensor too large for it stays alone."""
    layer = {"q": 64, "k": 32, "v": 32, "o": 64, "gate": 192, "up": 192, "down": 192, "norm": 1}
    sizes = {f"layers.{i}.{name}": size for i in range(12) for name, size in layer.items()}

    def totals(sizes: dict[str, int], fragments: int) -> list[int]:
        assigned = assign_fragments(sizes, fragments)
        assert assigned.keys() == sizes.keys()
        return [sum(s for n, s in sizes.items() if assigned[n] == f) for f in range(fragments)]

    even = totals(sizes, 4)
    assert max(even) < 1.01 * sum(even) / 4
    with_embedding = totals({**sizes, "embedding": 20_000}, 4)
    assert sorted(with_embedding)[:3] == sorted(totals(sizes, 3))
    assert max(with_embedding) == 20_000
    reordered = dict(reversed(sizes.items()))
    assert assign_fragments(reordered, 4) == assign_fragments(sizes, 4)


def test_all_stages_know_all_tensors() -> None:
    """Names of any length; a tied embedding is on two stages."""
    own = [{"embedding": 10, "a": 1}, {"embedding": 10, "a very long name": 2, "c": 3}]

    def merged() -> dict[str, int]:
        pipeline: Axis = ParallelMesh.create(1, 2, CPU).pp
        return sizes_of_all_stages(own[pipeline.rank], pipeline, CPU)

    assert run_ranks(merged, 2) == [own[0] | own[1]] * 2
    assert sizes_of_all_stages(own[1], Axis.single("pp"), CPU) == own[1]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_meeting_changes_its_fragment_only(zero_stage: int) -> None:
    """In each round every tensor meets once, and islands have the same of what has just met."""
    config = outer_config(2, "outer.fragments=3", zero_stage=zero_stage)

    def train() -> list[tuple[dict[str, Tensor], set[str]]]:
        run = IslandRun.create(config)
        meetings = []
        for _ in range(10):
            run.inner_step()
            before = masters(run)
            met = run.outer.after_step(run.steps)
            after = masters(run)
            changed = {name for name, x in after.items() if not torch.equal(x, before[name])}
            assert met is bool(changed)
            if met:
                meetings.append((after, changed))
        return meetings

    ranks = run_ranks(train, 4)
    rounds = [ranks[0][:3], ranks[0][3:]]
    for meetings in rounds:
        names = [name for _, changed in meetings for name in changed]
        assert sorted(names) == sorted(SHAPES)
    for own, other in zip(ranks[0], ranks[2], strict=True):  # the same place in both islands
        assert own[1] == other[1]
        for name, weights in own[0].items():
            assert torch.equal(weights, other[0][name]) == (name in own[1])


def masters(run: IslandRun) -> dict[str, Tensor]:
    """Rows by name: all that the rank holds."""
    rows: dict[str, list[Tensor]] = {}
    for piece in run.small.optimizer.pieces():
        rows.setdefault(piece.name, []).append(piece.tensors["master"].flatten())
    return {name: torch.cat(parts) for name, parts in rows.items()}


def test_a_round_has_the_same_bytes_and_a_lower_peak() -> None:
    def sent(fragments: int) -> list[float]:
        run = IslandRun.create(outer_config(2, f"outer.fragments={fragments}"))
        counts = []
        for _ in range(5):
            before = run.sent()
            run.step()
            counts.append(run.sent() - before)
        return counts

    whole, parts = (run_ranks(lambda f=f: sent(f), 2)[0] for f in (1, 3))
    # Each message of an odd number of weights is filled up by one.
    assert sum(parts) == pytest.approx(sum(whole), abs=4 * len(SHAPES))
    assert sum(whole) == pytest.approx(4 * NUM_ELEMENTS, abs=4 * len(SHAPES))
    assert [count > 0 for count in parts] == [False, True, False, True, True]
    assert max(parts) < 0.5 * max(whole)


def test_more_fragments_than_tensors() -> None:
    """Those without any send nothing, and nothing goes wrong."""

    def train() -> tuple[list[bool], Weights]:
        config = outer_config(2, "outer.inner_steps=12", "outer.fragments=12")
        run = IslandRun.create(config)
        met = [run.step() for _ in range(12)]
        assert isinstance(run.outer, DiLoCo)
        assert [] in run.outer.fragments
        run.outer.conclude(12)
        return met, run.weights()

    ranks = run_ranks(train, 2)
    assert all(rank[0] == [True] * 12 for rank in ranks)
    assert_same_model(ranks[0][1], ranks[1][1])
