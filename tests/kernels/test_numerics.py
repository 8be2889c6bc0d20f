"""The numerics of BitNet b1.58 against scalar formulas in numpy, and their edges."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from megabit_kernels import numerics

DTYPES = (torch.float32, torch.float64)
MIN_SCALE = {torch.float32: np.float32(1e-5), torch.float64: np.float64(1e-5)}


def rounded_to_grid(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Multiples of 2^-10: sums of them are exact in fp64, so no oracle depends on the order."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return (values * 1024).round() / 1024


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_by_the_formula(dtype: torch.dtype) -> None:
    weight = rounded_to_grid(13, 29, dtype=dtype)
    codes, scale = numerics.absmean_ternarize(weight)
    w = weight.numpy()
    gamma = w.dtype.type(np.abs(w.astype(np.float64)).sum() / w.size)
    assert scale.dtype == dtype
    assert scale.item() == gamma
    assert codes.dtype == torch.int8
    assert np.array_equal(codes.numpy(), np.clip(np.rint(w / gamma), -1, 1))
    assert set(codes.unique().tolist()) == {-1, 0, 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_by_the_formula(dtype: torch.dtype) -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(1), dtype=dtype)
    scale = numerics.activation_scale(x.abs().amax(-1, keepdim=True))
    x_q = numerics.quantize_activation(x, scale)
    for row, row_scale, row_q in zip(x.numpy(), scale.numpy(), x_q.numpy(), strict=True):
        s = row.dtype.type(np.abs(row).max()) / row.dtype.type(127)
        assert row_scale[0] == s
        assert row_q.tolist() == np.clip(np.rint(row / s), -128, 127).tolist()
        assert np.abs(row_q).max() == 127  # the whole range is used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_rounded_once(dtype: torch.dtype) -> None:
    acc = torch.tensor([[-(2**24), 3, 0], [2**24 - 1, -1, 7]], dtype=torch.int32)
    s, gamma = torch.tensor([[0.3], [7e-3]]), torch.tensor(0.11)
    y = numerics.dequantize_product(acc, s, gamma, dtype)
    by_numpy = acc.numpy().astype(np.float32) * (s.numpy() * gamma.numpy())
    assert torch.equal(y, torch.from_numpy(by_numpy).to(dtype))
    assert acc.dtype == torch.int32  # the input is not written to
    assert acc[0, 1] == 3


def test_ties_go_to_the_even_integer() -> None:
    one = torch.tensor(1.0)
    weight = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert numerics.ternarize(weight, one).tolist() == [-1, -1, 0, 0, 1, 1]
    x = torch.tensor([[-127.0, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 126.5]])
    scale = numerics.activation_scale(x.abs().amax(-1, keepdim=True))
    assert scale.item() == 1
    assert numerics.quantize_activation(x, scale).tolist() == [[-127, -2, -2, 0, 0, 2, 2, 126]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, -1e-6])
def test_nothing_is_divided_by_zero(dtype: torch.dtype, value: float) -> None:
    """Scales stop at 1e-5, so tiny (subnormal) values become zeros."""
    tiny = torch.full((3, 4), value, dtype=dtype)
    codes, gamma = numerics.absmean_ternarize(tiny)
    assert gamma.item() == MIN_SCALE[dtype]
    assert not codes.any()
    scale = numerics.activation_scale(tiny.abs().amax(-1, keepdim=True))
    assert (scale == float(MIN_SCALE[dtype] / tiny.numpy().dtype.type(127))).all()
    assert numerics.fake_quantized_linear(tiny, tiny).abs().max() == 0


def test_a_zero_token_does_not_change_its_neighbours() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with_zero = x.clone()
    with_zero[1] = 0
    y = numerics.fake_quantized_linear(with_zero, weight)
    assert not y[1].any()
    assert torch.equal(y[[0, 2]], numerics.fake_quantized_linear(x, weight)[[0, 2]])


def test_large_values_do_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[largest, -largest, largest / 4, 0]])
    scale = numerics.activation_scale(x.abs().amax(-1, keepdim=True))
    assert numerics.quantize_activation(x, scale).tolist() == [[127, -127, 32, 0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    """It spoils its whole token (activations) or the whole product (weights), and nothing else.

    The codes themselves are undefined then, but their scale is not finite."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        codes, gamma = numerics.absmean_ternarize(weight)
        scale = numerics.activation_scale(x.abs().amax(-1, keepdim=True))
        acc = numerics.quantize_activation(x, scale).int() @ codes.int().t()
        return numerics.dequantize_product(acc, scale, gamma, x.dtype)

    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    good = product(x, weight)
    x_bad, weight_bad = x.clone(), weight.clone()
    x_bad[1, 2] = weight_bad[3, 4] = bad
    y = product(x_bad, weight)
    assert not y[1].isfinite().any()
    assert torch.equal(y[[0, 2]], good[[0, 2]])
    assert not product(x, weight_bad).isfinite().any()


def test_fake_quantization_by_hand() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((6, 24), (10, 24), (6, 10))
    )
    weight *= 0.2  # below 1, where γ is good to the last few bits of fp64
    x_leaf, weight_leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = numerics.fake_quantized_linear(x_leaf, weight_leaf)
    y.backward(grad)
    x_hat, w_hat = hand_quantized(x.numpy(), weight.numpy())
    dy = grad.numpy()
    # x + (x̂ − x) and sums in another order: a few roundings of 1e-16 on sums of about 10.
    close = {"rtol": 1e-12, "atol": 1e-13}
    np.testing.assert_allclose(y.detach().numpy(), x_hat @ w_hat.T, **close)
    assert x_leaf.grad is not None
    assert weight_leaf.grad is not None
    np.testing.assert_allclose(x_leaf.grad.numpy(), dy @ w_hat, **close)
    np.testing.assert_allclose(weight_leaf.grad.numpy(), dy.T @ x_hat, **close)


def hand_quantized(
    x: NDArray[np.float64], w: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    gamma = max(np.abs(w).mean(), 1e-5)
    s = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-5) / 127
    return np.clip(np.rint(x / s), -128, 127) * s, np.clip(np.rint(w / gamma), -1, 1) * gamma


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Both round a handful of times, in another order: some units in the last place.
    [(torch.float64, 1e-15), (torch.float32, 5e-7), (torch.bfloat16, 8e-3)],
)
def test_rms_norm_is_the_one_of_torch(dtype: torch.dtype, tolerance: float) -> None:
    x, gain = torch.randn(9, 40).to(dtype) * 3, torch.randn(40).to(dtype)
    x[4] = 0
    ours, theirs = numerics.rms_norm(x, gain, 1e-5), F.rms_norm(x, (40,), gain, 1e-5)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(1, 70),
    st.floats(-30, 30),
    st.integers(0, 2**32),
)
def test_the_absmax_of_a_norm_is_known_before_it(
    dtype: torch.dtype, width: int, magnitude: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(5, width, generator=generator) * 2**magnitude).to(dtype)
    gain = torch.randn(width, generator=generator).to(dtype)
    wide = x.to(numerics.stats_dtype(dtype))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    largest = (wide * gain).abs().amax(-1, keepdim=True) * rstd
    normalized = numerics.rms_norm(x, gain, 1e-5)
    assert torch.equal(normalized.abs().amax(-1, keepdim=True), largest.to(dtype))


def test_statistics_are_taken_in_at_least_fp32() -> None:
    assert numerics.stats_dtype(torch.bfloat16) == torch.float32
    assert numerics.stats_dtype(torch.float32) == torch.float32
    assert numerics.stats_dtype(torch.float64) == torch.float64
