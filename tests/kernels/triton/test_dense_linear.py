"""The dense product in Triton: values against fp64, and bits that only token and weight decide."""

import math

import pytest
import torch

from megabit_kernels import gpu, plain_attention
from megabit_kernels.triton.dense_linear import dense_linear
from tests.kernels.triton.operands import normal

# What a GPU computes silently, numpy mentions: the interpreter is numpy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("t", "n", "k"), [(1, 1, 1), (3, 130, 64), (33, 257, 100), (2, 5, 0), (0, 3, 4), (4, 0, 4)]
)
def test_values(t: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = normal(t, k, dtype=dtype), normal(n, k, seed=1, dtype=dtype)
    y = dense_linear(x, weight)
    assert y.dtype == dtype
    exact = x.double() @ weight.double().t()
    # At most K roundings in fp32, each relative to the sum of magnitudes, and one to the result.
    magnitude = x.double().abs() @ weight.double().abs().t()
    bound = k * EPSILON[torch.float32] * magnitude + EPSILON[dtype] * exact.abs()
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_change_no_bit(dtype: torch.dtype) -> None:
    x, weight = normal(70, 200, dtype=dtype), normal(150, 200, seed=1, dtype=dtype)
    whole = dense_linear(x, weight)
    for begin, end in ((0, 1), (1, 3), (17, 50), (31, 33), (69, 70)):
        assert torch.equal(dense_linear(x[begin:end], weight), whole[begin:end])
    order = torch.randperm(70, generator=torch.Generator("cpu").manual_seed(2)).to(x.device)
    assert torch.equal(dense_linear(x[order], weight), whole[order])
    # A rank of many has some rows of the weight.
    assert torch.equal(dense_linear(x, weight[37:120]), whole[:, 37:120])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_token(bad: float) -> None:
    x, weight = normal(5, 40), normal(9, 40, seed=1)
    clean = dense_linear(x, weight)
    x[2, 39] = bad
    spoilt = dense_linear(x, weight)
    assert not spoilt[2].isfinite().any()
    assert torch.equal(spoilt[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_operands_may_lie_apart() -> None:
    x, weight = normal(40, 6), normal(40, 9, seed=1)
    assert torch.equal(
        dense_linear(x.t(), weight.t()), dense_linear(x.t().contiguous(), weight.t())
    )


def test_what_the_kernel_does_not_compute_torch_does() -> None:
    x, weight = normal(3, 8, dtype=torch.float64), normal(4, 8, seed=1, dtype=torch.float64)
    assert torch.equal(gpu.dense_linear(x, weight), plain_attention.dense_linear(x, weight))
    with pytest.raises(TypeError, match=r"x is torch.float64"):
        dense_linear(x, weight)
    with pytest.raises(TypeError, match=r"weight is torch.float64: torch.float32 is wanted"):
        dense_linear(x.float(), weight)
    with pytest.raises(ValueError, match=r"weight has shape \(4, 8\): \[4, 7\] is wanted"):
        dense_linear(x.float()[:, :7], weight.float())
