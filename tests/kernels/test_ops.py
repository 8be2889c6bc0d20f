"""The torch custom ops: traced, compiled and differentiated like torch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megabit_kernels import (
    Int8Weight,
    TernaryWeight,
    bit_linear,
    cross_entropy,
    input_gradient,
    numerics,
    quantize_activation,
    rms_norm_quantize,
    ternary_linear,
    ternary_matmul,
    weight_gradients,
)
from megabit_kernels.conversion import Layout

OPS = torch.ops.megabit


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def operands(layout: Layout = "int8") -> tuple[Tensor, Tensor, TernaryWeight]:
    x_q, x_scale = quantize_activation(randn(5, 70))
    return x_q, x_scale, TernaryWeight.from_latent(randn(66, 70), layout=layout)


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each op with arguments for it."""
    x_q, x_scale, weight = operands()
    panels = weight.to_layout("panels")
    head = Int8Weight.from_float(randn(66, 70))
    strided = randn(70, 5).t()
    x, grad, gain = randn(5, 70), randn(5, 66), randn(70)
    targets = torch.tensor([0, 3, 69, 5, 1])
    bit = (weight.data, weight.scale, "int8", 70, torch.float32)
    linear = (x_q, x_scale, panels.data, weight.scale, "panels", 66, torch.bfloat16)
    return {
        "quantize_activation": (OPS.quantize_activation, (x, None)),
        "quantize_activation with absmax": (
            OPS.quantize_activation,
            (x, numerics.absmax(x)),
        ),
        "rms_norm_quantize": (OPS.rms_norm_quantize, (x, gain, 1e-5)),
        "glu_rms_norm_quantize": (OPS.glu_rms_norm_quantize, (x, x, gain, 1e-5, "relu2")),
        "ternary_matmul": (OPS.ternary_matmul, (x_q, panels.data, "panels", 66)),
        "ternary_linear": (OPS.ternary_linear, linear),
        "int8_linear": (
            OPS.int8_linear,
            (x_q, x_scale, head.data, head.scale, head.layout, 66, torch.float32),
        ),
        "quantize_activation of a transposed view": (OPS.quantize_activation, (strided, None)),
        "rms_norm_quantize of a transposed view": (OPS.rms_norm_quantize, (strided, gain, 1e-5)),
        "cross_entropy_gradient of a transposed view": (
            OPS.cross_entropy_gradient,
            (randn(5), strided, targets, OPS.cross_entropy(strided, targets)[1]),
        ),
        "weight_gradient of a transposed view": (
            OPS.weight_gradient,
            (randn(66, 5).t(), x_q, x_scale, torch.float32),
        ),
        "abs_sum": (OPS.abs_sum, (randn(66, 70), 10_000)),
        "square_sum": (OPS.square_sum, (randn(66, 70), 8.0, 10_000)),
        "absmean_scale": (OPS.absmean_scale, (randn(66, 70),)),
        "lay_out": (OPS.lay_out, (weight.data, "panels")),
        "lay_out int8": (OPS.lay_out, (weight.data, "int8")),
        "ternarize": (OPS.ternarize, (randn(66, 70), weight.scale, "panels")),
        "unpack": (OPS.unpack, (panels.data, "panels", 66, 70, torch.float32)),
        "unpack int8": (OPS.unpack, (weight.data, "int8", 66, 70, torch.int8)),
        "input_gradient": (OPS.input_gradient, (grad, *bit)),
        "weight_gradient": (OPS.weight_gradient, (grad, x_q, x_scale, torch.float32)),
        "int8_input_gradient": (OPS.int8_input_gradient, (grad, *bit[:-1], 3)),
        "int8_weight_gradients": (OPS.int8_weight_gradients, ([grad, grad], x_q, x_scale, 3)),
        "cross_entropy": (OPS.cross_entropy, (randn(5, 70).requires_grad_(), targets)),
        "cross_entropy_gradient": (
            OPS.cross_entropy_gradient,
            (randn(5), x, targets, OPS.cross_entropy(x, targets)[1]),
        ),
        "bit_linear": (
            OPS.bit_linear,
            (randn(5, 70).requires_grad_(), randn(66, 70).requires_grad_()),
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_torch_accepts_the_op(name: str) -> None:
    """Schema, fake implementation, autograd registration and tracing, by torch's own checks."""
    op, arguments = calls()[name]
    torch.library.opcheck(op.default, arguments)


def test_every_op_is_checked() -> None:
    registered = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("megabit::")
    }
    assert registered == {name.split(" ")[0] for name in calls()}


@pytest.mark.parametrize("name", calls())
def test_an_unknown_implementation_is_refused_by_every_op_that_takes_one(name: str) -> None:
    op, arguments = calls()[name]
    names = [argument.name for argument in op.default._schema.arguments]
    if "implementation" in names:
        given = dict(zip(names, arguments, strict=False)) | {"implementation": "fast"}
        with pytest.raises(ValueError, match=r"implementation 'fast': \w+ has "):
            op(**given)
    else:
        assert name.split(" ")[0] in {"lay_out", "unpack", "bit_linear"}


def test_an_implementation_for_another_device_is_refused() -> None:
    x_q, _, weight = operands()
    with pytest.raises(ValueError, match="implementation 'cublas_int8': it is for cuda, not cpu"):
        ternary_matmul(x_q, weight, "cublas_int8")


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (randn(2, 15), randn(4, 16), r"x has shape \(2, 15\): \[2, 16\] is wanted"),
        (randn(2, 1), randn(4, 16), r"x has shape \(2, 1\): \[2, 16\] is wanted"),
        (randn(2, 16), randn(16), r"weight has shape \(16,\): 2 dimensions are wanted"),
        (randn(2, 16).to("meta"), randn(4, 16), "x is on meta: cpu is wanted"),
        (torch.empty(0, 131_073), torch.empty(0, 131_073), "K = 131073: at most 131072"),
    ],
)
def test_bit_linear_refuses_what_does_not_fit(x: Tensor, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bit_linear(x, weight)


def test_scales_and_statistics_must_have_their_shape() -> None:
    x_q, x_scale, weight = operands()
    for bad in (x_scale.flatten(), x_scale.t(), x_scale[:1], x_scale.expand(5, 66)):
        with pytest.raises(ValueError, match=r"x_scale has shape .*: \[5, 1\] is wanted"):
            ternary_linear(x_q, bad, weight, torch.float32)
        with pytest.raises(ValueError, match=r"x_scale has shape .*: \[5, 1\] is wanted"):
            weight_gradients([randn(5, 66)], x_q, bad, torch.float32)
    with pytest.raises(ValueError, match=r"absmax has shape \(5,\): \[5, 1\] is wanted"):
        quantize_activation(randn(5, 70), randn(5))
    with pytest.raises(ValueError, match=r"gain has shape \(1,\): \[70\] is wanted"):
        rms_norm_quantize(randn(5, 70), randn(1), 1e-5)
    with pytest.raises(ValueError, match=r"grad has shape \(5, 7\): \[5, 66\] is wanted"):
        input_gradient(randn(5, 7), weight, torch.float32)
    with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
        ternary_linear(x_q, x_scale, weight, torch.int8)


def test_what_has_no_gradient_is_cut_off() -> None:
    x = randn(5, 70).requires_grad_()
    _, _, weight = operands()
    y = ternary_linear(*quantize_activation(x), weight, torch.float32)
    assert not y.requires_grad
    assert not rms_norm_quantize(x, randn(70), 1e-5)[1].requires_grad


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
def test_an_empty_batch_or_an_empty_input(shape: tuple[int, ...]) -> None:
    x = randn(*shape).requires_grad_()
    weight = randn(32, shape[-1]).requires_grad_()
    y = bit_linear(x, weight)
    assert y.shape == (*shape[:-1], 32)
    assert not y.any()
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 64), (2, 3, 130), (130,)])
def test_bit_linear_is_the_textbook_layer(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype).requires_grad_()
    weight = randn(66, shape[-1]).requires_grad_()
    y = bit_linear(x, weight)
    upstream = randn(*y.shape, dtype=dtype)
    y.backward(upstream)

    textbook_x = x.detach().float().requires_grad_()
    textbook_weight = weight.detach().clone().requires_grad_()
    expected = numerics.fake_quantized_linear(textbook_x.view(-1, shape[-1]), textbook_weight)
    expected.backward(upstream.float().view_as(expected))
    assert y.dtype == x.dtype
    assert x.grad is not None
    assert textbook_x.grad is not None
    # The textbook rounds each product and, in fp32, each addition; bf16 keeps 8 bits.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in [
        (y, expected),
        (x.grad, textbook_x.grad),
        (weight.grad, textbook_weight.grad),
    ]:
        assert theirs is not None
        scale = theirs.abs().max()
        difference = (ours.float().view_as(theirs) - theirs).abs().max()
        assert difference <= tolerance * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cross_entropy_is_that_of_torch(dtype: torch.dtype) -> None:
    logits = (randn(5, 70, dtype=dtype) * 30).requires_grad_()
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    targets = torch.tensor([0, 3, 69, 5, 1])
    upstream = randn(5, dtype=wide.dtype)
    losses = cross_entropy(logits, targets)
    expected = torch.nn.functional.cross_entropy(wide, targets, reduction="none")
    losses.backward(upstream)
    expected.backward(upstream)
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(logits.grad, wide.grad.to(dtype))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_only_wanted_gradients_are_computed(frozen: str) -> None:
    x, weight = randn(4, 64).requires_grad_(frozen != "x"), randn(32, 64)
    weight.requires_grad_(frozen != "weight")
    bit_linear(x, weight).sum().backward()
    assert (x.grad is None) == (frozen == "x")
    assert (weight.grad is None) == (frozen == "weight")


def test_compiled_without_a_graph_break_it_has_the_same_bits() -> None:
    weight = randn(32, 64).requires_grad_()
    frozen = TernaryWeight.from_latent(randn(32, 32))

    def model(x: Tensor) -> Tensor:
        hidden = bit_linear(x, weight).relu()
        return ternary_linear(*quantize_activation(hidden.detach()), frozen, x.dtype) + hidden

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = randn(4, 64)
    expected = model(x)
    expected.sum().backward()
    assert weight.grad is not None
    gradient, weight.grad = weight.grad, None
    y = compiled(x)
    y.sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(weight.grad, gradient)
