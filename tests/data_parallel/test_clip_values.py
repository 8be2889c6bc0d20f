"""Clipping by value: single elements of the sum over all ranks, wherever they lie."""

import pytest
import torch

from megabit.launch import run_ranks
from tests.data_parallel.small import SmallRun, config_of, hyperparameters, make_mesh
from tests.training.tiny import Owned, logical, owned

LIMIT = 0.004
STAGES = (0, 1, 2)


def gradients(limit: float | None) -> list[tuple[Owned, Owned]]:
    """Of the first step and each ``zero_stage``: gradients, and the weights that they lead to."""
    results = []
    for stage in STAGES:
        run = SmallRun.create(config_of(stage, "precision.compute=float64"), make_mesh())
        run.backward(0)
        if limit is not None:
            run.optimizer.clip_values(limit)
        kept = owned(run.optimizer, "gradient")
        run.optimizer.step(1.0, *hyperparameters(0))
        results.append((kept, owned(run.optimizer)))
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_elements_are_cut_to_the_limit(world_size: int) -> None:
    plain = run_ranks(lambda: gradients(None), world_size)
    clipped = run_ranks(lambda: gradients(LIMIT), world_size)
    for number, stage in enumerate(STAGES):
        whole, cut = (logical(rank[number][0] for rank in ranks) for ranks in (plain, clipped))
        weights, others = (logical(rank[number][1] for rank in r) for r in (plain, clipped))
        count = 0
        for name, gradient in whole.items():
            assert torch.equal(cut[name], gradient.clamp(-LIMIT, LIMIT)), (stage, name)
            count += int((gradient.abs() > LIMIT).sum())
        numel = sum(gradient.numel() for gradient in whole.values())
        assert 0.02 * numel < count < 0.5 * numel  # some, not all
        assert any(not torch.equal(weights[name], others[name]) for name in weights)
