"""Non-negative least squares finds what was planted."""

import pytest
import torch

from megabit.plan.calibrate import fit_rates
from megabit.plan.fit import non_negative, relative_error
from megabit.plan.part_samples import Sample


def test_planted_constants_are_found() -> None:
    generator = torch.Generator().manual_seed(1)
    scales = torch.tensor([1e9, 1e7, 1.0, 1e6], dtype=torch.float64)
    rows = torch.rand(30, 4, generator=generator, dtype=torch.float64) * scales
    planted = torch.tensor([2e-12, 3e-10, 1e-3, 0.0], dtype=torch.float64)
    target = (rows @ planted).tolist()
    found = non_negative(rows.tolist(), target)
    assert found == pytest.approx(planted.tolist(), rel=1e-6, abs=1e-16)
    assert relative_error(rows.tolist(), found, target) < 1e-9


def test_what_would_be_negative_is_zero() -> None:
    rows = [[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]
    found = non_negative(rows, [3.0, 2.0, 1.0])  # exactly 4 − x
    assert found[1] == 0
    assert found[0] > 0
    # The gradient of the relative error is zero in the one that is left.
    residuals = [(found[0] - y) / y / y for y in (3.0, 2.0, 1.0)]
    assert sum(residuals) == pytest.approx(0, abs=1e-9)


def test_noise_does_not_carry_constants_far() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.rand(60, 3, generator=generator, dtype=torch.float64) + 0.05
    planted = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    noise = 1 + 0.02 * torch.randn(60, generator=generator, dtype=torch.float64)
    found = non_negative(rows.tolist(), (rows @ planted * noise).tolist())
    assert found == pytest.approx(planted.tolist(), rel=0.1)


def test_an_unknown_that_never_occurs_is_zero() -> None:
    assert non_negative([[1.0, 0.0], [2.0, 0.0]], [3.0, 6.0]) == pytest.approx([3.0, 0.0])


def test_parts_do_not_bend_each_other() -> None:
    layers = [Sample("layer forward", {"forward bytes": n}, 1e-10 * n) for n in (1e6, 2e6)]
    heads = [Sample("head forward", {"loss bytes": n}, 3e-10 * n) for n in (1e6, 2e6)]
    rates = fit_rates([*layers, *heads])
    assert rates.seconds["forward bytes"] == pytest.approx(1e-10)
    assert rates.seconds["loss bytes"] == pytest.approx(3e-10)
    assert max(rates.errors.values()) < 1e-9
