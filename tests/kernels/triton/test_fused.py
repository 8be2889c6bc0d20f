"""The kernels that quantize, ternarize and take losses, in Triton's interpreter, against torch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from megabit_kernels import layouts, numerics, packing
from megabit_kernels.triton.cross_entropy import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_forward,
)
from megabit_kernels.triton.norm_quantize import (
    QuantizedNorm,
    glu_rms_norm_quantize,
    rms_norm_quantize,
)
from megabit_kernels.triton.quantize import Quantized, quantize_activation
from megabit_kernels.triton.ternarize import (
    PIECE,
    Output,
    absmean_scale,
    sum_of_magnitudes,
    ternarize,
)

# What a GPU computes silently, numpy mentions: the interpreter is numpy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(0, 5), (3, 0), (1, 1), (3, 7), (5, 129), (3, 9001)]
EPS = 1e-5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Equal bits; NaN equals NaN."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def assert_quantized(result: Quantized | QuantizedNorm, x: Tensor, absmax: Tensor) -> None:
    scale = numerics.activation_scale(absmax)
    x_q = numerics.quantize_activation(x, scale)
    assert_same(result.x_q, x_q)
    assert_same(result.scale, scale)
    assert_same(result.row_sum, x_q.sum(-1, dtype=torch.int32))


# Quantization alone: the bits of the definition.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_activations_are_quantized_as_defined(m: int, k: int, dtype: torch.dtype) -> None:
    x = random(m, k, dtype=dtype)
    absmax = numerics.absmax(x)
    assert_quantized(quantize_activation(x), x, absmax)
    assert_quantized(quantize_activation(x, absmax), x, absmax)
    wider = 1.5 * absmax  # of a token whose other columns are elsewhere
    assert_quantized(quantize_activation(x, wider), x, wider)


def test_the_widest_token_is_quantized_as_defined() -> None:
    x = random(1, numerics.MAX_EXACT_K, dtype=torch.bfloat16)
    assert_quantized(quantize_activation(x), x, numerics.absmax(x))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(-20, 60))
def test_quotients_at_a_tie_round_as_those_of_a_division(seed: int, exponent: int) -> None:
    """x within three steps of every half-integer multiple of s, where the last bit decides."""
    generator = torch.Generator().manual_seed(seed)
    absmax = (1 + torch.rand(4, 1, generator=generator)) * 2.0**exponent
    scale = numerics.activation_scale(absmax)
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
    x = random(3, 5000, dtype=dtype)
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
    x = random(40, 30)
    for view in (x[:, :7], x[::3], x[:, ::2], x.t(), x[:1].expand(4, 30)):
        assert_quantized(quantize_activation(view), view, numerics.absmax(view))


@pytest.mark.parametrize("k", [4095, 4096, 4097, 8191, 8192, 8193, 12_300])
def test_no_column_is_lost_between_blocks(k: int) -> None:
    x, gain = random(2, k, seed=k), random(k)
    assert_quantized(quantize_activation(x), x, numerics.absmax(x))
    assert_normed(rms_norm_quantize(x, gain, EPS), x, gain)


# Norms. The order of Σx² is the kernel's own, so codes are checked under its rstd.


def assert_normed(result: QuantizedNorm, x: Tensor, gain: Tensor) -> None:
    wide = x.float()
    # Both sums have a relative error of a few 2^-24, halved by the root; two more roundings.
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    torch.testing.assert_close(result.rstd, rstd, rtol=2**-21, atol=0, equal_nan=True)
    y = ((wide * gain.float()) * result.rstd).to(x.dtype)
    assert_quantized(result, y, numerics.absmax(y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), [shape for shape in SHAPES if 0 not in shape])
def test_a_norm_is_quantized_as_defined(m: int, k: int, dtype: torch.dtype) -> None:
    x, gain = 3 * random(m, k, dtype=dtype), random(k, seed=1)
    for g in (gain, gain.bfloat16()):
        assert_normed(rms_norm_quantize(x, g, EPS), x, g)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_norm_is_at_most_one_code_from_the_definition(dtype: torch.dtype) -> None:
    """rstd may differ in its last bit, and a value next to a tie then rounds to its other side."""
    x, gain = random(20, 2560, dtype=dtype), random(2560, seed=1)
    y = numerics.rms_norm(x, gain, EPS)
    x_q = numerics.quantize_activation(y, numerics.activation_scale(numerics.absmax(y)))
    difference = (rms_norm_quantize(x, gain, EPS).x_q.int() - x_q.int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() < 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_keeps_what_is_not_finite_in_its_token(bad: float) -> None:
    x, gain = random(3, 300), random(300, seed=1)
    x[1, 299] = bad
    result = rms_norm_quantize(x, gain, EPS)
    assert_normed(result, x, gain)
    assert not result.x_q[1].any()
    assert result.scale[1].isnan()


def test_a_zero_token_stays_zero_in_a_norm() -> None:
    result = rms_norm_quantize(torch.zeros(2, 10), random(10), EPS)
    assert not result.x_q.any()
    assert (result.scale == numerics.activation_scale(torch.tensor(0.0))).all()


@pytest.mark.parametrize(("m", "k"), [(0, 5), (3, 0)])
def test_norms_of_nothing(m: int, k: int) -> None:
    x, gain = torch.zeros(m, k), torch.zeros(k)
    for result in (
        rms_norm_quantize(x, gain, EPS),
        glu_rms_norm_quantize(x, x, gain, EPS, "relu2"),
    ):
        assert_quantized(result, x, numerics.absmax(x))
        assert result.rstd.shape == (m, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 129), (2, 4099), (2, 9001)])
def test_relu2_units_are_quantized_as_defined(m: int, k: int, dtype: torch.dtype) -> None:
    gate, up = random(m, k, dtype=dtype), random(m, k, seed=1, dtype=dtype)
    gain = random(k, seed=2)
    unit = numerics.gated_linear_unit(gate, up, "relu2")
    assert_normed(glu_rms_norm_quantize(gate, up, gain, EPS, "relu2"), unit, gain)


@pytest.mark.parametrize(
    # An exponential in its last bit, of fp32 or, after rounding, of bf16; then a few roundings.
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)],
)
def test_silu_units_are_at_most_one_code_from_the_definition(
    dtype: torch.dtype, tolerance: float
) -> None:
    gate, up = 3 * random(5, 5000, dtype=dtype), random(5, 5000, seed=1, dtype=dtype)
    gain = random(5000, seed=2)
    result = glu_rms_norm_quantize(gate, up, gain, EPS, "silu")
    unit = numerics.gated_linear_unit(gate, up, "silu")
    y = ((unit.float() * gain) * result.rstd).to(dtype)
    scale = numerics.activation_scale(numerics.absmax(y))
    torch.testing.assert_close(result.scale, scale, rtol=tolerance, atol=0)
    x_q = numerics.quantize_activation(y, scale)
    assert (result.x_q.int() - x_q.int()).abs().max() <= 1
    assert_same(result.row_sum, result.x_q.sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("activation", ["relu2", "silu"])
def test_a_unit_keeps_what_is_not_finite_in_its_token(activation: str) -> None:
    gate, up, gain = random(4, 300), random(4, 300, seed=1), random(300, seed=2)
    gate[1, 299], up[2, 3] = math.nan, math.inf
    result = glu_rms_norm_quantize(gate, up, gain, EPS, activation)
    assert result.scale.isfinite().flatten().tolist() == [True, False, False, True]
    assert not result.x_q[1:3].any()
    alone = glu_rms_norm_quantize(gate[::3], up[::3], gain, EPS, activation)
    assert_same(result.x_q[::3], alone.x_q)


def test_gate_and_up_may_be_halves_of_one_tensor() -> None:
    both, gain = random(3, 200), random(100, seed=1)
    gate, up = both.chunk(2, dim=1)
    ours = glu_rms_norm_quantize(gate, up, gain, EPS, "relu2")
    assert_normed(ours, numerics.gated_linear_unit(gate, up, "relu2"), gain)


# Weights.

OUTPUTS: tuple[Output, ...] = ("int8", "planes", "bf16", "packed")


def assert_ternarized(weight: Tensor, scale: Tensor) -> None:
    codes = numerics.ternarize(weight.float(), scale.float())
    int8, planes, bf16, packed = ternarize(weight, scale, OUTPUTS)
    assert_same(int8, codes)
    assert_same(bf16, codes.bfloat16())
    assert_same(planes, layouts.to_planes(codes))
    assert_same(packed, packing.pack(codes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k"), [(0, 5), (3, 0), (1, 1), (3, 7), (16, 256), (17, 255), (33, 257), (20, 3456)]
)
def test_weights_are_ternarized_as_defined(n: int, k: int, dtype: torch.dtype) -> None:
    weight = random(n, k, dtype=dtype) * 0.02
    scale = numerics.absmean_scale(weight) if weight.numel() else torch.tensor(1.0)
    assert_ternarized(weight, scale)
    assert_ternarized(weight, scale.to(dtype))


def test_only_what_is_asked_for_is_made() -> None:
    weight, scale = random(5, 300), torch.tensor(0.7)
    everything = dict(zip(OUTPUTS, ternarize(weight, scale, OUTPUTS), strict=True))
    for output in OUTPUTS:
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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_shows_in_the_scale(bad: float) -> None:
    weight = random(4, 300)
    weight[2, 5] = bad
    scale = absmean_scale(weight)
    assert_same(scale, torch.tensor(bad))
    assert not any(t.any() for t in ternarize(weight, scale, ("int8",)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (PIECE // 256, 256), (3, 70_001)])
def test_the_scale_is_exact_where_its_sum_is(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Multiples of 2^-6 below 4 add up exactly in fp64, in any order."""
    weight = ((random(*shape).clamp(-4, 4) * 64).round() / 64).to(dtype)
    assert sum_of_magnitudes(weight) == weight.double().abs().sum()
    scale = absmean_scale(weight)
    assert scale.shape == ()
    assert_same(scale, numerics.absmean_scale(weight))
    assert_same(absmean_scale(weight.flip(0).movedim(0, -1)), scale)


def test_a_weight_may_be_a_view() -> None:
    weight, scale = random(60, 50), torch.tensor(0.7)
    for view in (weight.t(), weight[:, 3:20], weight[::2]):
        assert_ternarized(view, scale)


# Cross-entropy. fp64 is the reference: fp32 exponentials and sums are good to some 2^-24, relative
# to a loss of up to 20. A gradient in bf16 has 8 bits.

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def reference_loss(logits: Tensor, targets: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(leaf, targets.long(), reduction="none")
    loss.backward(grad.double())
    assert leaf.grad is not None
    return loss.detach().float(), leaf.grad.to(logits.dtype)


def assert_loss(logits: Tensor, targets: Tensor, in_place: bool = False) -> None:
    grad = random(len(logits), seed=9)
    loss, d_logits = reference_loss(logits, targets, grad)
    leaf = logits.detach().clone().requires_grad_()
    ours = cross_entropy(leaf * 1, targets, in_place)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=2e-6)
    ours.backward(grad)
    assert leaf.grad is not None
    tolerance = TOLERANCE[logits.dtype]
    torch.testing.assert_close(leaf.grad, d_logits, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "v"), [(0, 7), (1, 1), (3, 37), (4, 4096), (2, 4097), (2, 20_001)])
def test_losses_and_gradients_are_those_of_torch(
    t: int, v: int, dtype: torch.dtype, in_place: bool
) -> None:
    targets = torch.randint(0, v, (t,), generator=torch.Generator().manual_seed(1))
    assert_loss(4 * random(t, v, dtype=dtype), targets, in_place)
    assert_loss(4 * random(t, v, dtype=dtype), targets.int(), in_place)


def test_large_logits_cost_no_precision() -> None:
    logits = random(3, 5000) + torch.tensor([[-1024.0], [0], [4096]])
    logits = (logits * 1024).round() / 1024  # the shift by the maximum is then exact
    assert_loss(logits, torch.tensor([0, 4999, 4500]))


def test_masked_logits_have_no_probability() -> None:
    logits = random(3, 9000)
    logits[:, :5000] = -math.inf  # the first block holds nothing else
    assert_loss(logits, torch.tensor([5000, 8999, 7000]))


def test_logits_may_be_a_view() -> None:
    logits, targets = random(30, 20), torch.arange(5)
    for view in (logits[:5], logits[:5, 3:], logits.t()[:5], logits[:1].expand(5, 20)):
        grad = random(5, seed=9)
        loss, d_logits = reference_loss(view, targets, grad)
        ours, normalizer = cross_entropy_forward(view, targets)
        torch.testing.assert_close(ours, loss, rtol=1e-6, atol=2e-6)
        d_ours = cross_entropy_backward(grad, view, targets, normalizer)
        torch.testing.assert_close(d_ours, d_logits, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("target", [-100, -1, 6, 2**40])
def test_a_target_outside_the_vocabulary_gives_nan_in_its_token(target: int) -> None:
    logits, targets = random(3, 6).requires_grad_(), torch.tensor([5, target, 0])
    loss = cross_entropy(logits, targets)
    assert loss.isnan().tolist() == [False, True, False]
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isnan().all(1).tolist() == [False, True, False]
    assert logits.grad[::2].isfinite().all()


def test_a_logit_that_is_nan_gives_nan_in_its_token() -> None:
    logits = random(3, 6)
    logits[1, 2] = math.nan
    loss, _ = cross_entropy_forward(logits, torch.tensor([0, 1, 2]))
    assert loss.isnan().tolist() == [False, True, False]


def test_a_gradient_in_place_takes_the_logits_memory_once() -> None:
    logits = random(3, 6).requires_grad_() * 1
    logits.retain_grad()
    kept = logits.detach()
    before = kept.clone()
    loss = cross_entropy(logits, torch.tensor([0, 1, 2]), in_place=True).sum()
    loss.backward(retain_graph=True)
    _, d_logits = reference_loss(before, torch.tensor([0, 1, 2]), torch.ones(3))
    torch.testing.assert_close(kept, d_logits, rtol=2e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# The user's mistakes.


def loss_gradient(logits: Tensor, grad: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    targets = torch.zeros(len(logits), dtype=torch.int64)
    _, normalizer = cross_entropy_forward(logits, targets)
    grad = torch.ones(len(logits)) if grad is None else grad
    return cross_entropy_backward(grad, logits, targets, normalizer, out)


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
        (lambda x: sum_of_magnitudes(x.half()), TypeError, "weight is torch.float16"),
        (lambda x: cross_entropy(x, torch.zeros(3).long()), ValueError, "targets has shape"),
        (lambda x: cross_entropy(x, torch.zeros(4)), TypeError, "targets is torch.float32"),
        (lambda x: cross_entropy(x.half(), torch.zeros(4).long()), TypeError, "logits is"),
        (lambda x: cross_entropy(x[:, :0], torch.zeros(4).long()), ValueError, "V > 0"),
        (lambda x: loss_gradient(x, grad=torch.ones(3)), ValueError, "grad has shape"),
        (lambda x: loss_gradient(x, grad=torch.ones(4).double()), TypeError, "grad is"),
        (lambda x: loss_gradient(x, out=x.t()), ValueError, "out: contiguous"),
        (
            lambda x: cross_entropy(x[:, ::2], torch.zeros(4).long(), in_place=True),
            ValueError,
            "logits is not contiguous",
        ),
    ],
)
def test_a_mistake_is_named(call, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call(random(4, 8))
