"""The outer step against torch's SGD."""

import pytest
import torch

from megabit.outer.outer_step import outer_step


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.4, 0.0)])
def test_it_is_sgd_with_nesterov_momentum(lr: float, momentum: float) -> None:
    """Of the outer gradient anchor − mean; in fp64, to tell other algebra from another order."""
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    plain = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([plain], lr, momentum, nesterov=momentum > 0)
    buffer = torch.zeros_like(anchor)
    for _ in range(5):
        mean = anchor + 0.1 * torch.randn(anchor.shape, generator=generator, dtype=torch.float64)
        plain.grad = plain.detach() - mean
        sgd.step()
        outer_step(anchor, mean, buffer, lr, momentum)
        torch.testing.assert_close(anchor, plain.detach(), rtol=0, atol=1e-14)


def test_neutral_is_the_mean_itself() -> None:
    anchor, mean = torch.randn(100), torch.randn(100)
    momentum = torch.randn(100)
    outer_step(anchor, mean, momentum, 1.0, 0.0)
    assert torch.equal(anchor, mean)


def test_it_does_not_matter_how_weights_are_cut() -> None:
    """Parts of odd lengths, which vector instructions leave a rest of."""
    anchor, mean, momentum = torch.randn(3, 1001).unbind()
    parts = [x.clone() for x in (anchor, mean, momentum)]
    outer_step(anchor, mean, momentum, 0.7, 0.9)
    for begin, end in ((0, 3), (3, 100), (100, 617), (617, 1001)):
        outer_step(*(part[begin:end] for part in parts), lr=0.7, momentum_factor=0.9)
    assert torch.equal(parts[0], anchor)
    assert torch.equal(parts[2], momentum)
