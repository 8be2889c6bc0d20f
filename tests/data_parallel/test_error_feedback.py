"""Error feedback: what a codec loses of a gradient is added to the next, so none is lost for ever.

With x_t = g_t + e_(t−1), of which s_t arrives and e_t = x_t − s_t stays (e_0 = 0), all that has
arrived is Σ s = Σ g − e_T. So the mean over T steps is off by |e_T| / T, and e is bounded:

- blocks: |e| ≤ max|x| / (2 · limit) ≤ (max|g| + max|e|) / (2 · limit) in a block, so that
  |e| ≤ max|g| / (2 · limit − 1);
- top-k: what stays of n elements without the k largest has ‖e‖² ≤ (1 − k/n) ‖x‖². With
  q = sqrt(1 − k/n), ‖e‖ ≤ q (‖g‖ + ‖e‖), so that ‖e‖ ≤ q / (1 − q) · ‖g‖.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megabit.data_parallel.codecs import BlockCodec, TopKCodec
from megabit.data_parallel.wire import Codec

STEPS, ROWS, COLUMNS = 400, 3, 260
BLOCK = 128
FP32 = 2.0**-22
"""Of the largest number that is added to another: a few roundings in each step."""


def block_bound(limit: int) -> Callable[[Tensor], Tensor]:
    """The largest error of an element, by element, from gradients ``[steps, rows, columns]``."""

    def bound(gradients: Tensor) -> Tensor:
        blocks = gradients.split(BLOCK, -1)
        largest = [block.abs().amax((0, -1), keepdim=True).expand_as(block) for block in blocks]
        return torch.cat(largest, -1)[0] / (2 * limit - 1)

    return bound


def topk_bound(ratio: float) -> Callable[[Tensor], Tensor]:
    def bound(gradients: Tensor) -> Tensor:
        kept = TopKCodec(ratio).kept(COLUMNS)
        left = math.sqrt(1 - kept / COLUMNS)
        norm = gradients.norm(dim=-1, keepdim=True).amax(0)
        return (left / (1 - left) * norm).expand(ROWS, COLUMNS)

    return bound


CASES: dict[str, tuple[Codec, Callable[[Tensor], Tensor]]] = {
    "int8": (BlockCodec(BLOCK, bits=8), block_bound(127)),
    "int4": (BlockCodec(BLOCK, bits=4), block_bound(7)),
    "topk 0.1": (TopKCodec(0.1), topk_bound(0.1)),
    "topk 0.02": (TopKCodec(0.02), topk_bound(0.02)),
}


def transmit(
    codec: Codec, gradients: Tensor, feeds_back: bool = True
) -> Iterator[tuple[Tensor, Tensor]]:
    """What arrives of each of ``[steps, rows, columns]``, and the error that stays."""
    generator = torch.Generator()
    error = torch.zeros_like(gradients[0])
    for gradient in gradients:
        x = gradient + error if feeds_back else gradient
        arrived = codec.decode(codec.encode(x.unsqueeze(0), None, generator), ROWS, COLUMNS)[0]
        error = x - arrived
        yield arrived, error


def fixed(seed: int) -> Tensor:
    """The same gradient in each step, its elements of unequal magnitude."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(ROWS, COLUMNS, generator=generator) ** 3
    return gradient.expand(STEPS, ROWS, COLUMNS)


def changing(seed: int) -> Tensor:
    """Another gradient in each step, around a fixed one."""
    generator = torch.Generator().manual_seed(100 + seed)
    return fixed(seed) + torch.randn(STEPS, ROWS, COLUMNS, generator=generator)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gradients", [fixed(0), changing(0)], ids=["fixed", "changing"])
def test_the_error_is_bounded_and_the_mean_unbiased(name: str, gradients: Tensor) -> None:
    codec, bound_of = CASES[name]
    bound = bound_of(gradients)
    total = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for step, (arrived, error) in enumerate(transmit(codec, gradients), start=1):
        total += arrived
        assert (error.abs() <= bound * (1 + FP32)).all(), step
        if step % 100 == 0:
            mean = gradients[:step].double().mean(0)
            rounding = FP32 * (gradients.abs().max() + bound)
            assert ((total / step - mean).abs() <= error.abs() / step + rounding).all()


@pytest.mark.parametrize("name", CASES)
def test_without_feedback_the_mean_stays_biased(name: str) -> None:
    """So the test above can fail: a fixed gradient loses the same in each step."""
    codec, gradients = CASES[name][0], fixed(0)

    def bias(feeds_back: bool) -> float:
        total = sum(arrived.double() for arrived, _ in transmit(codec, gradients, feeds_back))
        return float((total / STEPS - gradients[0]).abs().sum() / gradients[0].abs().sum())

    with_feedback, without = bias(True), bias(False)
    assert without > 0.001
    assert with_feedback < without / 10


def descend(codec: Codec, targets: Tensor, rate: float, feeds_back: bool) -> tuple[Tensor, float]:
    """Data-parallel descent of ‖w − target‖² / 2, each rank with a target of its own, so that
    gradients do not vanish at the solution, the mean of all targets.

    Returns:
        How far w ends from it, and max|mean error of ranks| on the way.
    """
    weights, errors, largest = torch.zeros(ROWS, COLUMNS), torch.zeros_like(targets), 0.0
    for _ in range(1200):
        x = weights - targets + errors
        messages = [codec.encode(own.unsqueeze(0), None, torch.Generator()) for own in x]
        arrived = torch.cat([codec.decode(message, ROWS, COLUMNS) for message in messages])
        if feeds_back:
            errors = x - arrived
            largest = max(largest, float(errors.mean(0).abs().max()))
        weights -= rate * arrived.mean(0)
    return (weights - targets.mean(0)).abs(), largest


@pytest.mark.parametrize("name", CASES)
def test_descent_on_several_ranks_ends_where_it_does_uncompressed(name: str) -> None:
    """With e the mean of the ranks' errors, u_t = w_t − rate · e_(t−1) takes the uncompressed step
    but at w_t, so u ends within rate · max|e| of the solution, and w within twice that."""
    codec, rate = CASES[name][0], 0.01
    targets = torch.stack([fixed(seed)[0] for seed in range(4)])
    distance, largest = descend(codec, targets, rate, feeds_back=True)
    # (1 − rate)^1200 = 6e-6 of the way is left.
    rest = 1e-5 * targets.mean(0).abs().max() + 1e-5
    assert (distance <= 2 * rate * largest + rest).all()
    without, _ = descend(codec, targets, rate, feeds_back=False)
    assert without.norm() > 3 * distance.norm()
