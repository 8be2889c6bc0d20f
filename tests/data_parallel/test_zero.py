"""The ZeRO optimizer against a training loop in plain torch that shares no code with it."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from tests.data_parallel.small import (
    CLIP,
    STEPS,
    PlainRun,
    SmallRun,
    config_of,
    initial,
    make_mesh,
    plain_ternary,
)
from tests.training.tiny import Owned, logical, owned

Case = tuple[int, str]
"""zero_stage, and what computes or travels."""
CASES: list[Case] = list(product((0, 1, 2), ("float32", "float64", "bfloat16")))


class Trained(NamedTuple):
    """What a rank has after all steps."""

    norms: list[float]
    masters: Owned
    exp_avg: Owned
    exp_avg_sq: Owned
    codes: dict[str, Tensor]
    scales: dict[str, float]
    replicas: dict[str, Tensor]
    updates: int


def train(case: Case) -> Trained:
    zero_stage, kind = case
    key = "precision.gradients" if kind == "bfloat16" else "precision.compute"
    run = SmallRun.create(config_of(zero_stage, f"{key}={kind}"), make_mesh())
    norms = [run.step(step) for step in range(STEPS)]
    codes, optimizer = run.codes(), run.optimizer
    optimizer.publisher.settle()
    return Trained(
        norms,
        owned(optimizer),
        owned(optimizer, "exp_avg"),
        owned(optimizer, "exp_avg_sq"),
        codes,
        {f"{name}.weight": layer.ternary().scale.item() for name, layer in run.layers().items()},
        {name: p.detach().clone() for name, p in run.model.named_parameters() if not p.is_meta},
        optimizer.updates,
    )


@functools.cache
def plain(dtype: torch.dtype) -> tuple[PlainRun, list[float]]:
    run = PlainRun.create(dtype)
    return run, [run.step(step) for step in range(STEPS)]


def largest_difference(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    assert own.keys() == reference.keys()
    return max((own[name] - reference[name]).abs().max().item() for name in reference)


def test_the_plain_run_is_a_hard_one() -> None:
    """Codes change, gradients are clipped and all weights move, so that equality says something."""
    run, norms = plain(torch.float32)
    before = {name: plain_ternary(initial()[name])[1] for name in run.codes()}
    changed = {name: (codes != before[name]).float().mean() for name, codes in run.codes().items()}
    assert min(changed.values()) > 0.05
    assert min(norms) < CLIP < max(norms)
    assert all((run.weights[name] != value).any() for name, value in initial().items())


@dataclass(frozen=True)
class Close:
    """How far a run may be from the plain one."""

    norm: float
    """Of each step's gradient, relative."""
    weight: float
    """The largest difference of a master weight; gains are near 1."""
    moment: float
    """The largest difference of a first moment, relative to the largest first moment."""
    codes: float
    """Share of them that may differ."""


CLOSE = {
    # Sums of up to 96 products in another order, each rounded to 2^-24. Over 20 steps such a
    # difference may move an activation to the next of its 255 values, and then all weights a
    # little: seen are 1e-7 without and 7e-5 with one.
    "float32": Close(norm=1e-4, weight=2e-4, moment=1e-2, codes=0),
    # The same at 2^-53, where that does not happen.
    "float64": Close(norm=1e-14, weight=1e-14, moment=1e-13, codes=0),
    # Each rank's gradients are rounded to 2^-9 before they are added. AdamW divides a gradient by
    # its own size, so a weight is off by that share of the learning rate (4e-3) in a step, and by
    # all of it where ranks' gradients cancel; codes that flip then change the gradients of others.
    "bfloat16": Close(norm=5e-2, weight=4e-2, moment=0.2, codes=0.03),
}


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_a_straight_through_estimator_and_adamw(world_size: int) -> None:
    ranks = run_ranks(lambda: [train(case) for case in CASES], world_size)
    results = {case: [rank[i] for rank in ranks] for i, case in enumerate(CASES)}
    for case in CASES:
        check(case, results[case], world_size)
    for kind in CLOSE:  # what is sharded adds up in the same order as what is not
        whole, parts = (logical(r.masters for r in results[stage, kind]) for stage in (0, 1))
        assert all(torch.equal(whole[name], part) for name, part in parts.items())


def check(case: Case, results: Sequence[Trained], world_size: int) -> None:
    """One case against the plain run, and its ranks against each other."""
    _, kind = case
    # A world of one sends no gradients, so their format on the wire changes nothing.
    close = CLOSE["float32" if kind == "bfloat16" and world_size == 1 else kind]
    run, norms = plain(torch.float64 if kind == "float64" else torch.float32)
    masters = logical(r.masters for r in results)
    assert largest_difference(masters, run.weights) <= close.weight, case
    for moment, of_ranks in (
        ("exp_avg", [r.exp_avg for r in results]),
        ("exp_avg_sq", [r.exp_avg_sq for r in results]),
    ):
        reference = run.moment(moment)
        size = max(x.abs().max().item() for x in reference.values())
        assert largest_difference(logical(of_ranks), reference) <= close.moment * size, case

    expected = run.codes()
    differing = sum(int((results[0].codes[n] != codes).sum()) for n, codes in expected.items())
    assert differing <= close.codes * sum(codes.numel() for codes in expected.values()), case

    for result in results:
        assert result.updates == STEPS
        assert result.norms == results[0].norms
        assert result.norms == pytest.approx(norms, rel=close.norm), case
        # One step in, nothing but the rounding of what was sent can differ.
        assert result.norms[0] == pytest.approx(norms[0], rel=min(close.norm, 2**-9)), case
        assert result.codes.keys() == expected.keys()
        for name, codes in result.codes.items():
            assert torch.equal(codes, results[0].codes[name]), (case, name)
            gamma, own = plain_ternary(masters[name])
            assert torch.equal(codes, own.to(torch.int8)), (case, name)
            # γ is made of integer sums, here of a sum in fp64.
            assert result.scales[name] == pytest.approx(gamma.item(), rel=1e-12)
        assert result.replicas.keys() == masters.keys() - expected.keys()
        assert all(torch.equal(x, masters[name]) for name, x in result.replicas.items()), case
