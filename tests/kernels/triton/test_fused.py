"""The kernels that quantize, ternarize and take losses, against torch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from megabit_kernels import layouts, numerics, packing
from megabit_kernels.triton.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
)
from megabit_kernels.triton.norm_quantize import (
    glu_rms_norm_quantize,
    rms_norm_quantize,
)
from megabit_kernels.triton.quantize import Quantized, quantize_activation
from megabit_kernels.triton.ternarize import CodeFormat, ternarize
from tests.kernels.triton.operands import integers, normal, uniform

# What a GPU computes silently, numpy mentions: the interpreter is numpy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(0, 5), (3, 0), (1, 1), (3, 7), (5, 129), (3, 9001)]
EPS = 1e-5


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Equal bits; NaN equals NaN."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def activation_scale(absmax: Tensor) -> Tensor:
    """The CPU's: on a GPU torch multiplies by 1/127 where it is told to divide by 127."""
    return numerics.activation_scale(absmax.cpu()).to(absmax.device)


def assert_quantized(result: Quantized, x: Tensor, absmax: Tensor) -> None:
    scale = activation_scale(absmax)
    assert_same(result.x_q, numerics.quantize_activation(x, scale))
    assert_same(result.scale, scale)


# Quantization alone: the bits of the definition.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_activations_are_quantized_as_defined(m: int, k: int, dtype: torch.dtype) -> None:
    x = normal(m, k, dtype=dtype)
    absmax = numerics.absmax(x)
    assert_quantized(quantize_activation(x), x, absmax)
    assert_quantized(quantize_activation(x, absmax), x, absmax)
    wider = 1.5 * absmax  # of a token whose other columns are elsewhere
    assert_quantized(quantize_activation(x, wider), x, wider)


def test_the_widest_token_is_quantized_as_defined() -> None:
    x = normal(1, numerics.MAX_EXACT_K, dtype=torch.bfloat16)
    assert_quantized(quantize_activation(x), x, numerics.absmax(x))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(-20, 60))
def test_quotients_at_a_tie_round_as_those_of_a_division(seed: int, exponent: int) -> None:
    """x within three steps of every half-integer multiple of s, where the last bit decides."""
    absmax = (1 + uniform(4, 1, seed=seed)) * 2.0**exponent
    scale = activation_scale(absmax)
    tie = (torch.arange(-128, 128) + 0.5) * scale
    steps = torch.arange(-3, 4, dtype=torch.int32)
    x = (tie.view(torch.int32).unsqueeze(-1) + steps).view(torch.float32).flatten(1)
    assert_quantized(quantize_activation(x, absmax), x, absmax)


def test_what_exceeds_a_given_absmax_is_clamped() -> None:
    inf = math.inf
    x = torch.tensor([[1e38, -1e38, 127.5, -128.5, inf, -inf, math.nan, 0.5, 1.5, -0.0]])
    for absmax in (torch.tensor([[127.0]]), torch.tensor([[1e-30]])):
        assert_quantized(quantize_activation(x, absmax), x, absmax)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_has_zero_codes_and_spoils_no_other(
    bad: float, dtype: torch.dtype
) -> None:
    x = normal(3, 5000, dtype=dtype)
    x[1, 4999] = bad
    result = quantize_activation(x)
    assert_quantized(result, x, numerics.absmax(x))
    assert not result.x_q[1].any()
    assert not result.scale[1].isfinite()


def test_zero_tiny_and_huge_tokens() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[0.0, -0.0, 0.0], [1e-40, -1e-6, 1e-5], [largest, -largest, largest / 4]])
    assert_quantized(quantize_activation(x), x, numerics.absmax(x))


def test_rows_and_columns_may_lie_apart() -> None:
    x = normal(40, 30)
    for view in (x[:, :7], x[::3], x[:, ::2], x.t(), x[:1].expand(4, 30)):
        assert_quantized(quantize_activation(view), view, numerics.absmax(view))


@pytest.mark.parametrize("k", [4095, 4096, 4097, 8191, 8192, 8193, 12_300])
def test_no_column_is_lost_between_blocks(k: int) -> None:
    x, gain = normal(2, k, seed=k), normal(k)
    assert_quantized(quantize_activation(x), x, numerics.absmax(x))
    assert_normed(rms_norm_quantize(x, gain, EPS), x, gain)


# Norms. The order of Σx² is the kernel's own, so its rstd may be a neighbour of the best one.


def assert_normed(result: Quantized, x: Tensor, gain: Tensor) -> None:
    """Each token has the bits of the definition under an rstd near the one of fp64.

    Σx² has a relative error of a few 2^-24, halved by the root; then come two more roundings.
    """
    wide = x.float()
    best = torch.rsqrt(wide.double().square().mean(-1, keepdim=True) + EPS).float()
    found = torch.zeros(len(x), 1, dtype=torch.bool)
    for steps in range(-4, 5):
        rstd = (best.view(torch.int32) + steps).view(torch.float32)
        y = ((wide * gain.float()) * rstd).to(x.dtype)
        scale = activation_scale(numerics.absmax(y))
        codes_equal = result.x_q == numerics.quantize_activation(y, scale)
        scale_equal = torch.isclose(result.scale, scale, rtol=0, atol=0, equal_nan=True)
        found |= codes_equal.all(1, keepdim=True) & scale_equal
    assert found.all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), [shape for shape in SHAPES if 0 not in shape])
def test_a_norm_is_quantized_as_defined(m: int, k: int, dtype: torch.dtype) -> None:
    x, gain = 3 * normal(m, k, dtype=dtype), normal(k, seed=1)
    for g in (gain, gain.bfloat16()):
        assert_normed(rms_norm_quantize(x, g, EPS), x, g)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_norm_is_at_most_one_code_from_the_definition(dtype: torch.dtype) -> None:
    """rstd may differ in its last bit, and a value next to a tie then rounds to its other side."""
    x, gain = normal(20, 2560, dtype=dtype), normal(2560, seed=1)
    y = numerics.rms_norm(x, gain, EPS)
    x_q = numerics.quantize_activation(y, activation_scale(numerics.absmax(y)))
    difference = (rms_norm_quantize(x, gain, EPS).x_q.int() - x_q.int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() < 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_keeps_what_is_not_finite_in_its_token(bad: float) -> None:
    x, gain = normal(3, 300), normal(300, seed=1)
    x[1, 299] = bad
    result = rms_norm_quantize(x, gain, EPS)
    assert_normed(result, x, gain)
    assert not result.x_q[1].any()
    assert result.scale[1].isnan()


def test_a_zero_token_stays_zero_in_a_norm() -> None:
    result = rms_norm_quantize(torch.zeros(2, 10), normal(10), EPS)
    assert not result.x_q.any()
    assert (result.scale == activation_scale(torch.tensor(0.0))).all()


@pytest.mark.parametrize(("m", "k"), [(0, 5), (3, 0)])
def test_norms_of_nothing(m: int, k: int) -> None:
    x, gain = torch.zeros(m, k), torch.zeros(k)
    for result in (
        rms_norm_quantize(x, gain, EPS),
        glu_rms_norm_quantize(x, x, gain, EPS, "relu2"),
    ):
        assert_quantized(result, x, numerics.absmax(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 129), (2, 4099), (2, 9001)])
def test_relu2_units_are_quantized_as_defined(m: int, k: int, dtype: torch.dtype) -> None:
    gate, up = normal(m, k, dtype=dtype), normal(m, k, seed=1, dtype=dtype)
    gain = normal(k, seed=2)
    unit = numerics.gated_linear_unit(gate, up, "relu2")
    assert_normed(glu_rms_norm_quantize(gate, up, gain, EPS, "relu2"), unit, gain)


@pytest.mark.parametrize(
    # A GPU's exponential of x is good to |x| · 2^-24; bf16 is to 2^-8. A few roundings follow.
    ("dtype", "tolerance"),
    [(torch.float32, 4e-6), (torch.bfloat16, 2e-2)],
)
def test_silu_units_are_at_most_one_code_from_the_definition(
    dtype: torch.dtype, tolerance: float
) -> None:
    gate, up = 3 * normal(5, 5000, dtype=dtype), normal(5, 5000, seed=1, dtype=dtype)
    gain = normal(5000, seed=2)
    result = glu_rms_norm_quantize(gate, up, gain, EPS, "silu")
    unit = numerics.gated_linear_unit(gate, up, "silu")
    y = numerics.rms_norm(unit, gain, EPS)
    scale = activation_scale(numerics.absmax(y))
    torch.testing.assert_close(result.scale, scale, rtol=tolerance, atol=0)
    x_q = numerics.quantize_activation(y, scale)
    assert (result.x_q.int() - x_q.int()).abs().max() <= 1


@pytest.mark.parametrize("activation", ["relu2", "silu"])
def test_a_unit_keeps_what_is_not_finite_in_its_token(activation: str) -> None:
    gate, up, gain = normal(4, 300), normal(4, 300, seed=1), normal(300, seed=2)
    gate[1, 299], up[2, 3] = math.nan, math.inf
    result = glu_rms_norm_quantize(gate, up, gain, EPS, activation)
    assert result.scale.isfinite().flatten().tolist() == [True, False, False, True]
    assert not result.x_q[1:3].any()
    alone = glu_rms_norm_quantize(gate[::3], up[::3], gain, EPS, activation)
    assert_same(result.x_q[::3], alone.x_q)


def test_gate_and_up_may_be_halves_of_one_tensor() -> None:
    both, gain = normal(3, 200), normal(100, seed=1)
    gate, up = both.chunk(2, dim=1)
    ours = glu_rms_norm_quantize(gate, up, gain, EPS, "relu2")
    assert_normed(ours, numerics.gated_linear_unit(gate, up, "relu2"), gain)


# Weights.

FORMATS: tuple[CodeFormat, ...] = ("int8", "planes", "bf16", "packed")


def assert_ternarized(weight: Tensor, scale: Tensor) -> None:
    codes = numerics.ternarize(weight.float(), scale.float())
    int8, planes, bf16, packed = ternarize(weight, scale, FORMATS)
    assert_same(int8, codes)
    assert_same(bf16, codes.bfloat16())
    assert_same(planes, layouts.to_planes(codes))
    assert_same(packed, packing.pack(codes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k"), [(0, 5), (3, 0), (1, 1), (3, 7), (16, 256), (17, 255), (33, 257), (20, 3456)]
)
def test_weights_are_ternarized_as_defined(n: int, k: int, dtype: torch.dtype) -> None:
    weight = normal(n, k, dtype=dtype) * 0.02
    scale = numerics.absmean_scale(weight) if weight.numel() else torch.tensor(1.0)
    assert_ternarized(weight, scale)
    assert_ternarized(weight, scale.to(dtype))


def test_only_what_is_asked_for_is_made() -> None:
    weight, scale = normal(5, 300), torch.tensor(0.7)
    everything = dict(zip(FORMATS, ternarize(weight, scale, FORMATS), strict=True))
    for output in FORMATS:
        (alone,) = ternarize(weight, scale, (output,))
        assert_same(alone, everything[output])
    assert ternarize(weight, scale, ()) == ()


@settings(deadline=None)
@given(st.floats(2.0**-17, 2.0**100, width=32), st.sampled_from(DTYPES))
def test_a_code_needs_no_division(gamma: float, dtype: torch.dtype) -> None:
    """The weights next to ±γ/2, where the definition's quotient comes closest to its tie."""
    scale = torch.tensor(gamma)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    half = (scale / 2).to(dtype).view(bits)
    magnitude = (half + torch.arange(-2, 3, dtype=bits)).view(dtype)
    assert_ternarized(torch.stack([magnitude, -magnitude]), scale)


def test_a_weight_may_be_a_view() -> None:
    weight, scale = normal(60, 50), torch.tensor(0.7)
    for view in (weight.t(), weight[:, 3:20], weight[::2]):
        assert_ternarized(view, scale)


# Cross-entropy. fp64 is the reference: fp32 exponentials and sums are good to some 2^-24, relative
# to a loss of up to 20. A gradient in bf16 has 8 bits.

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def reference_loss(logits: Tensor, targets: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(leaf, targets.long(), reduction="none")
    loss.backward(grad.double())
    assert leaf.grad is not None
    return loss.detach().float(), leaf.grad.to(logits.dtype)


def assert_loss(logits: Tensor, targets: Tensor) -> None:
    grad = normal(len(logits), seed=9)
    loss, d_logits = reference_loss(logits, targets, grad)
    ours, normalizer = cross_entropy_forward(logits, targets)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=2e-6)
    d_ours = cross_entropy_backward(grad, logits, targets, normalizer)
    torch.testing.assert_close(d_ours, d_logits, rtol=TOLERANCE[logits.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "v"), [(0, 7), (1, 1), (3, 37), (4, 4096), (2, 4097), (2, 20_001)])
def test_losses_and_gradients_are_those_of_torch(t: int, v: int, dtype: torch.dtype) -> None:
    targets = integers(0, v, t, seed=1)
    assert_loss(4 * normal(t, v, dtype=dtype), targets)
    assert_loss(4 * normal(t, v, dtype=dtype), targets.int())


def test_large_logits_cost_no_precision() -> None:
    logits = normal(3, 5000) + torch.tensor([[-1024.0], [0], [4096]])
    logits = (logits * 1024).round() / 1024  # the shift by the maximum is then exact
    assert_loss(logits, torch.tensor([0, 4999, 4500]))


def test_masked_logits_have_no_probability() -> None:
    logits = normal(3, 9000)
    logits[:, :5000] = -math.inf  # the first block holds nothing else
    assert_loss(logits, torch.tensor([5000, 8999, 7000]))


def test_logits_may_be_a_view() -> None:
    logits, targets = normal(30, 20), torch.arange(5)
    for view in (logits[:5], logits[:5, 3:], logits.t()[:5], logits[:1].expand(5, 20)):
        assert_loss(view, targets)


@pytest.mark.parametrize("target", [-100, -1, 6, 2**40])
def test_a_target_outside_the_vocabulary_gives_nan_in_its_token(target: int) -> None:
    logits, targets = normal(3, 6), torch.tensor([5, target, 0])
    loss, normalizer = cross_entropy_forward(logits, targets)
    assert loss.isnan().tolist() == [False, True, False]
    d_logits = cross_entropy_backward(torch.ones(3), logits, targets, normalizer)
    assert d_logits.isnan().all(1).tolist() == [False, True, False]
    assert d_logits[::2].isfinite().all()


def test_a_logit_that_is_nan_gives_nan_in_its_token() -> None:
    logits = normal(3, 6)
    logits[1, 2] = math.nan
    loss, _ = cross_entropy_forward(logits, torch.tensor([0, 1, 2]))
    assert loss.isnan().tolist() == [False, True, False]


# The user's mistakes.


def loss_gradient(grad: Tensor, logits: Tensor) -> Tensor:
    targets = torch.zeros(len(logits), dtype=torch.int64)
    _, normalizer = cross_entropy_forward(logits, targets)
    return cross_entropy_backward(grad, logits, targets, normalizer)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: quantize_activation(x[0]), ValueError, r"x has shape \(8,\): \[M, K\]"),
        (lambda x: quantize_activation(x.double()), TypeError, "x is torch.float64"),
        (lambda x: quantize_activation(x, x), ValueError, "absmax has shape"),
        (lambda x: quantize_activation(x, x[:, :1].bfloat16()), TypeError, "absmax is"),
        (
            lambda x: quantize_activation(x[:, :1].expand(4, 131_073)),
            ValueError,
            "K = 131073: products are exact up to K = 131072",
        ),
        (lambda x: rms_norm_quantize(x, x[0, :3], EPS), ValueError, r"gain has .*\[8\] is wanted"),
        (lambda x: rms_norm_quantize(x, x[0].double(), EPS), TypeError, "gain is torch.float64"),
        (lambda x: glu_rms_norm_quantize(x, x[:2], x[0], EPS, "silu"), ValueError, "up is"),
        (
            lambda x: glu_rms_norm_quantize(x, x, x[0], EPS, "gelu"),
            ValueError,
            "activation is 'gelu': relu2 or silu",
        ),
        (lambda x: ternarize(x[0], x[0, 0], ("int8",)), ValueError, "weight has shape"),
        (lambda x: ternarize(x.half(), x[0, 0], ("int8",)), TypeError, "weight is torch.float16"),
        (lambda x: ternarize(x, x[0], ("int8",)), ValueError, "scale has shape"),
        (lambda x: ternarize(x, x[0, 0].double(), ("int8",)), TypeError, "scale is"),
        (lambda x: ternarize(x, x[0, 0], ("int4",)), ValueError, r"outputs is \('int4',\)"),
        (lambda x: ternarize(x, x[0, 0], ("int8", "int8")), ValueError, "at most once"),
        (
            lambda x: cross_entropy_forward(x, torch.zeros(3).long()),
            ValueError,
            "targets has shape",
        ),
        (lambda x: cross_entropy_forward(x, torch.zeros(4)), TypeError, "targets is torch.float32"),
        (lambda x: cross_entropy_forward(x.half(), torch.zeros(4).long()), TypeError, "logits is"),
        (lambda x: cross_entropy_forward(x[:, :0], torch.zeros(4).long()), ValueError, "V > 0"),
        (lambda x: loss_gradient(torch.ones(3), x), ValueError, "grad has shape"),
        (lambda x: loss_gradient(torch.ones(4).double(), x), TypeError, "grad is"),
    ],
)
def test_a_mistake_is_named(call, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call(normal(4, 8))
