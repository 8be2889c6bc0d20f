"""Gradients in int8, stochastically rounded: all implementations round alike, and without bias."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megabit_kernels import (
    TernaryWeight,
    implementations,
    input_gradient,
    int8_input_gradient,
    int8_weight_gradients,
    native,
    quantize_activation,
    stochastic,
    weight_gradients,
)
from megabit_kernels.conversion import Layout
from megabit_kernels.numerics import MAX_EXACT_K

HERE = implementations("int8_input_gradient", "cpu")
SIZES = [
    (1, 1, 1),
    (0, 5, 3),
    (5, 0, 3),
    (5, 3, 0),
    (3, 7, 5),
    (64, 64, 64),
    (65, 257, 66),
    (33, 1100, 130),
    (130, 66, 1030),
]
LAYOUTS: tuple[Layout, ...] = ("panels", "int8", "packed", "planes")

each_isa = pytest.mark.parametrize("isa", native.isas() or ["not built"])
each_here = pytest.mark.parametrize("name", HERE)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Magnitudes of many orders, as gradients have them."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (x * 10.0 ** torch.randint(-6, 0, shape, generator=generator)).to(dtype)


def operands(m: int, n: int, k: int) -> tuple[Tensor, TernaryWeight, Tensor, Tensor]:
    """dY, a weight, x_q and its scale."""
    return randn(m, n), TernaryWeight.from_latent(randn(n, k)), *quantize_activation(randn(m, k))


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Equal bits; NaN equals NaN."""
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


# Rounding.


def test_noise_by_hand() -> None:
    """One number of it in Python's integers."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    key = stochastic.key_of(2**63 - 1, 3)
    start = mixed((7 + key) % 2**32)
    flip = mixed((start + (key >> 32)) % 2**32)
    expected = (mixed((start + 11) % 2**32) ^ flip) >> 8
    assert int(stochastic.noise(key, 8, 12, torch.device("cpu"))[7, 11]) == expected


def test_noise_is_uniform_and_without_order() -> None:
    """4·10⁶ numbers; each statistic within five standard deviations."""
    shape = 2000, 2000
    u = stochastic.noise(stochastic.key_of(0, 0), *shape, torch.device("cpu")).double() / 2**24
    count = u.numel()
    assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * count)
    histogram = torch.histc(u, 64, 0, 1)
    assert float((histogram - count / 64).abs().max()) < 5 * math.sqrt(count / 64)
    centred = u - 0.5
    others = [
        stochastic.noise(stochastic.key_of(seed, stream), *shape, torch.device("cpu")) / 2**24
        for seed, stream in ((0, 1), (1, 0))
    ]
    pairs = [
        (centred[1:], centred[:-1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred, centred.t()),
        *((centred, other - 0.5) for other in others),
    ]
    for a, b in pairs:
        assert abs(float((a * b).mean()) * 12) < 5 / math.sqrt(a.numel())


@each_isa
@pytest.mark.parametrize(("m", "n"), [(m, n) for m, n, _ in SIZES])
def test_the_native_rounding_is_the_plain_one(isa: str, m: int, n: int) -> None:
    kernels, key = native.require(), stochastic.key_of(m, n)
    x, row_scale = randn(m, n), randn(m, 1)
    if min(m, n) > 2:
        x[1] = 0
        x[:, 2] = 0
        x[2, 0] = math.nan
        x[0, 1] = -math.inf
        x[m - 1] *= 1e-38  # subnormal numbers, below the smallest scale
    for view in (x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, ::2]):
        for ours, theirs in zip(
            kernels.round_rows(view, key, isa), stochastic.quantize_rows(view, key), strict=True
        ):
            assert_same(ours, theirs)
        for ours, theirs in zip(
            kernels.round_columns(view, row_scale, key, isa),
            stochastic.quantize_columns(view, row_scale, key),
            strict=True,
        ):
            assert_same(ours, theirs)


def test_numbers_on_a_step_stay_there() -> None:
    x = torch.arange(-127, 128).float().unsqueeze(0)
    for seed in range(50):
        x_q, scale = stochastic.quantize_rows(x, stochastic.key_of(seed, 0))
        assert scale.item() == 1
        assert torch.equal(x_q.float(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_range_is_never_left(dtype: torch.dtype) -> None:
    """Though the largest number divided by its own scale may be a little above 127."""
    x = randn(5000, 1, dtype=dtype)
    for seed in range(20):
        x_q, _ = stochastic.quantize_rows(x, stochastic.key_of(seed, 0))
        assert x_q.abs().eq(127).logical_or(x.abs() < 1e-30).all()


@each_isa
@pytest.mark.parametrize(("n", "k"), [(n, k) for _, n, k in SIZES])
def test_transposes(isa: str, n: int, k: int) -> None:
    kernels = native.require()
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)
    values = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    transposed = kernels.transpose_panels(kernels.pack_panels(codes), n, k, isa)
    assert torch.equal(transposed, kernels.pack_int8(codes.t()))
    assert torch.equal(kernels.pack_int8_transposed(values, isa), kernels.pack_int8(values.t()))


def test_a_value_that_an_int8_weight_has_not_is_refused() -> None:
    values = torch.zeros(5, 70, dtype=torch.int8)
    values[4, 69] = -128
    with pytest.raises(ValueError, match="weight holds -128"):
        native.require().pack_int8_transposed(values)


# Gradients.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@each_here
def test_input_gradients_are_exact_products(
    name: str, m: int, n: int, k: int, layout: Layout
) -> None:
    grad, weight, *_ = operands(m, n, k)
    grad_q, scale = stochastic.quantize_rows(grad, stochastic.key_of(5, 0))
    acc = (grad_q.double() @ weight.codes().double()).float()
    dx = int8_input_gradient(grad, weight.to_layout(layout), 5, name)
    assert torch.equal(dx, acc * (scale * weight.scale))


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@each_here
def test_weight_gradients_are_exact_products(name: str, m: int, n: int, k: int) -> None:
    grad, _, x_q, x_scale = operands(m, n, k)
    grads = [grad, randn(m, n + 1), grad]
    dws = int8_weight_gradients(grads, x_q, x_scale, 5, name)
    for i, (own, dw) in enumerate(zip(grads, dws, strict=True)):
        z_t, scale = stochastic.quantize_columns(own, x_scale, stochastic.key_of(5, 1 + i))
        assert torch.equal(dw, (z_t.double() @ x_q.double()).float() * scale)
    if min(m, n, k) > 2:
        assert not torch.equal(dws[0], dws[2])  # each has noise of its own
    assert int8_weight_gradients([], x_q, x_scale, 5, name) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@each_here
def test_gradients_of_other_types(name: str, dtype: torch.dtype) -> None:
    grad, weight, x_q, x_scale = operands(20, 70, 66)
    grad, stats = grad.to(dtype), torch.promote_types(dtype, torch.float32)
    dx = int8_input_gradient(grad, weight, 5, name)
    assert_same(dx, int8_input_gradient(grad.to(stats), weight, 5, "torch"))
    (dw,) = int8_weight_gradients([grad], x_q, x_scale, 5, name)
    assert_same(dw, int8_weight_gradients([grad.to(stats)], x_q, x_scale, 5, "torch")[0])
    assert dx.dtype == dw.dtype == stats


@each_here
def test_gradients_that_are_not_contiguous(name: str) -> None:
    grad, weight, x_q, x_scale = operands(40, 70, 66)
    for view in (grad.t().contiguous().t(), torch.cat([grad, grad], 1)[:, :70]):
        assert not view.is_contiguous()
        assert_same(
            int8_input_gradient(view, weight, 5, name), int8_input_gradient(grad, weight, 5, name)
        )
        ours, theirs = (int8_weight_gradients([g], x_q, x_scale, 5, name) for g in (view, grad))
        assert_same(ours[0], theirs[0])


@each_here
def test_the_longest_sums(name: str) -> None:
    """±127 · 127 all of one sign, as many as are allowed: 2.11·10⁹, just below 2^31."""
    ones = torch.ones(MAX_EXACT_K, 2)
    x_q = torch.full((MAX_EXACT_K, 3), -127, dtype=torch.int8)
    (dw,) = int8_weight_gradients([ones], x_q, torch.ones(MAX_EXACT_K, 1), 5, name)
    exact = torch.full((2, 3), -127 * 127 * MAX_EXACT_K).float()
    assert torch.equal(dw, exact * (torch.tensor(1.0) / torch.tensor(127.0)))


@pytest.mark.parametrize("what", ["dX", "dW"])
@each_here
def test_the_mean_over_seeds_is_the_exact_gradient(name: str, what: str) -> None:
    """1000 seeds. A gradient is a sum of independent errors, each of at most one step of variance
    1/4, so the mean's standard deviation is known; no element is off by more than five of it."""
    grad, weight, x_q, x_scale = operands(30, 40, 20)
    grad[:, 0] = 3.0  # beside which all others are far below half a step
    seeds = 1000
    codes, gamma = weight.codes().double(), weight.scale.double()
    if what == "dX":
        exact = input_gradient(grad.double(), weight, torch.float64)
        step = grad.abs().amax(1, keepdim=True).double() / 127 * gamma
        deviation = 0.5 * step * codes.square().sum(0).sqrt()
        samples = (int8_input_gradient(grad, weight, seed, name) for seed in range(seeds))
    else:
        z = grad.double() * x_scale.double()
        exact = z.t() @ x_q.double()
        step = z.abs().amax(0).unsqueeze(1) / 127
        deviation = 0.5 * step * x_q.double().square().sum(0).sqrt()
        samples = (
            int8_weight_gradients([grad], x_q, x_scale, seed, name)[0] for seed in range(seeds)
        )
    total = torch.zeros_like(exact)
    for sample in samples:
        total += sample
    # fp32 rounds the scales and each sample: 2^-22 of the largest.
    allowed = 5 * deviation / math.sqrt(seeds) + 2.0**-22 * exact.abs().max()
    assert bool(((total / seeds - exact).abs() <= allowed).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@each_here
def test_what_is_not_finite_stays_visible(name: str, bad: float) -> None:
    """A row of dX, a row of dW; nothing else is touched by it."""
    grad, weight, x_q, x_scale = operands(20, 70, 66)
    spoiled = grad.clone()
    spoiled[7, 9] = bad
    dx, dx_bad = (int8_input_gradient(g, weight, 5, name) for g in (grad, spoiled))
    assert dx_bad[7].isnan().all()
    dx_bad[7] = dx[7]
    assert torch.equal(dx_bad, dx)
    dw, dw_bad = (int8_weight_gradients([g], x_q, x_scale, 5, name)[0] for g in (grad, spoiled))
    assert dw_bad[9].isnan().all()
    dw_bad[9] = dw[9]
    assert torch.equal(dw_bad, dw)
    bad_scale = x_scale.clone()
    bad_scale[3] = bad  # of a token that was not finite in the forward pass
    assert int8_weight_gradients([grad], x_q, bad_scale, 5, name)[0].isnan().all()


@each_here
def test_rows_of_zeros(name: str) -> None:
    grad, weight, x_q, x_scale = operands(20, 70, 66)
    grad[3] = 0
    grad[:, 5] = 0
    assert not int8_input_gradient(grad, weight, 5, name)[3].any()
    (dw,) = int8_weight_gradients([grad], x_q, x_scale, 5, name)
    assert not dw[5].any()
    assert dw.isfinite().all()


@each_here
def test_the_error_is_that_of_int8(name: str) -> None:
    """Of gradients that are normally distributed, 1 % or so."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(256, 300, generator=generator)
    _, weight, x_q, x_scale = operands(256, 300, 200)
    exact = input_gradient(grad, weight, torch.float32)
    dx = int8_input_gradient(grad, weight, 5, name)
    assert float((dx - exact).norm() / exact.norm()) < 0.015
    (exact,) = weight_gradients([grad], x_q, x_scale, torch.float32)
    (dw,) = int8_weight_gradients([grad], x_q, x_scale, 5, name)
    assert float((dw - exact).norm() / exact.norm()) < 0.03


def test_threads_do_not_change_a_bit() -> None:
    grad, weight, x_q, x_scale = operands(300, 1300, 1000)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        dws = int8_weight_gradients([grad], x_q, x_scale, 5)
        results.append([int8_input_gradient(grad, weight, 5), *dws])
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_wrong_arguments_are_named() -> None:
    grad, weight, x_q, x_scale = operands(3, 7, 5)
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "grad has shape", lambda: int8_input_gradient(grad[:, 1:], weight, 0)),
        (ValueError, "seed is -1", lambda: int8_input_gradient(grad, weight, -1)),
        (ValueError, "seed is", lambda: int8_weight_gradients([grad], x_q, x_scale, 2**63)),
        (TypeError, "x_q is", lambda: int8_weight_gradients([grad], x_q.int(), x_scale, 0)),
        (ValueError, "x_scale has", lambda: int8_weight_gradients([grad], x_q, x_scale[1:], 0)),
        (ValueError, "grad has", lambda: int8_weight_gradients([grad[1:]], x_q, x_scale, 0)),
    ]
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()
    tokens = MAX_EXACT_K + 1
    with pytest.raises(ValueError, match="M = 131073"):
        int8_weight_gradients(
            [], torch.zeros(tokens, 1, dtype=torch.int8), torch.ones(tokens, 1), 0
        )
