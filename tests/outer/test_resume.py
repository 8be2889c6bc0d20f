"""What the outer optimizer keeps is all that a run needs to go on, at any layout of its islands."""

import functools

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from tests.outer.islands import IslandRun, Weights, assert_same, outer_config
from tests.training.tiny import Owned, logical, owned

STEPS = 15
"""Of three rounds."""
CODED = ("outer.wire=int8", "communication.block=16")
MOMENTS = ("master", "exp_avg", "exp_avg_sq")
OUTER = ("outer_anchor", "outer_momentum", "outer_error")


@pytest.mark.parametrize("at", [6, 8])
@pytest.mark.parametrize("settings", [(), CODED, ("outer.fragments=3",)])
def test_in_the_middle_of_a_round(settings: tuple[str, ...], at: int) -> None:
    config = outer_config(2, *settings)

    def train() -> tuple[Weights, Weights]:
        whole = IslandRun.create(config).train(at)
        resumed = IslandRun.create(config)
        optimizer = resumed.small.optimizer
        optimizer.begin_restore(whole.small.optimizer.updates)
        for own, saved in (
            (optimizer.pieces(), whole.small.optimizer.pieces()),
            (resumed.outer.pieces(), whole.outer.pieces()),
        ):
            for to, source in zip(own, saved, strict=True):
                assert to.name == source.name
                assert to.tensors.keys() == source.tensors.keys()
                for kind, values in to.tensors.items():
                    values.copy_(source.tensors[kind])
        optimizer.publish()
        resumed.steps = at
        return whole.train(STEPS - at).weights(), resumed.train(STEPS - at).weights()

    for whole, resumed in run_ranks(train, 2):
        assert_same(whole, resumed)


Saved = dict[str, Owned]
"""By kind."""
Whole = dict[str, dict[str, Tensor]]
"""Logical tensors of an island by kind and name."""


def save(run: IslandRun) -> Saved:
    """What this rank writes, with each element once over the ranks of its island."""
    pieces = [*run.outer.pieces(owned=True)]
    kept = {k: [(p.name, p, p.tensors[k].clone()) for p in pieces] for k in OUTER}
    return {**{kind: owned(run.small.optimizer, kind) for kind in MOMENTS}, **kept}


def restore(run: IslandRun, whole: Whole, step: int) -> None:
    optimizer = run.small.optimizer
    optimizer.begin_restore(step)
    for piece in (*optimizer.pieces(), *run.outer.pieces()):
        for kind, values in piece.tensors.items():
            values.copy_(whole[kind][piece.name][piece.index])
    optimizer.publish()
    run.steps = step


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_at_another_layout(zero_stage: int) -> None:
    """Islands of two DP ranks go on as islands of one. In fp64: they add gradients in another
    order. Errors of the wire, and which island has them, go with logical rows."""
    settings = (*CODED, "outer.fragments=2", "precision.compute=float64")
    config = outer_config(2, *settings, zero_stage=zero_stage)
    at = 8

    def begin() -> tuple[Saved, Owned]:
        run = IslandRun.create(config).train(at)
        return save(run), owned(run.train(STEPS - at).small.optimizer)

    wide = run_ranks(begin, 4)
    islands: list[Whole] = [
        {kind: logical(rank[0][kind] for rank in island) for kind in (*MOMENTS, *OUTER)}
        for island in (wide[:2], wide[2:])
    ]
    for name in islands[0]["outer_anchor"]:
        for kind in ("outer_anchor", "outer_momentum"):
            assert torch.equal(islands[0][kind][name], islands[1][kind][name])
    errors = [island["outer_error"] for island in islands]
    assert any(not torch.equal(error, errors[1][name]) for name, error in errors[0].items())

    def go_on() -> Owned:
        run = IslandRun.create(config)
        restore(run, islands[run.mesh.outer.rank], at)
        return owned(run.train(STEPS - at).small.optimizer)

    for rank, island in zip(run_ranks(go_on, 2), (wide[:2], wide[2:]), strict=True):
        expected = logical(of_rank[1] for of_rank in island)
        for name, weight in logical([rank]).items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-12)


def test_another_beginning() -> None:
    """Weights that come from elsewhere are what the first round begins with."""
    config = outer_config(2, "outer.wire=int8")

    def train(begins: bool) -> tuple[Tensor, Tensor]:
        run = IslandRun.create(config)
        for master in run.small.optimizer.masters:
            master.weights.detach().mul_(0.5)
        run.small.optimizer.publish()
        if begins:
            run.outer.begin()
        before = [piece.tensors["master"].clone() for piece in run.small.optimizer.pieces()]
        run.train(5)
        after = [piece.tensors["master"] for piece in run.small.optimizer.pieces()]
        moved = [(a - b).abs().max() for a, b in zip(after, before, strict=True)]
        return torch.stack(moved).max(), torch.stack([b.abs().max() for b in before]).max()

    (moved, _), _ = run_ranks(functools.partial(train, True), 2)
    (lost, largest), _ = run_ranks(functools.partial(train, False), 2)
    # Five steps of AdamW move a weight by 0.02; a wrong anchor by as much as the weight itself.
    assert moved < 0.1 * largest < lost
