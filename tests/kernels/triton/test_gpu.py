"""The operations as dispatch hands them to Triton equal the plain ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megabit_kernels import (
    Int8Weight,
    TernaryWeight,
    glu_rms_norm_quantize,
    gpu,
    input_gradient,
    int8_input_gradient,
    int8_linear,
    int8_weight_gradients,
    plain,
    quantize_activation,
    rms_norm_quantize,
    ternary_linear,
    ternary_matmul,
)
from megabit_kernels.conversion import Layout
from tests.kernels.triton.operands import normal

FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(*shape, seed=sum(shape), dtype=dtype)


@pytest.fixture(params=["triton", "triton_split_k"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(("m", "k", "n"), [(1, 256, 64), (5, 300, 70), (3, 1, 1), (0, 4, 4)])
def test_products(m: int, k: int, n: int, name: str) -> None:
    x_q, x_scale = quantize_activation(randn(m, k))
    weight = TernaryWeight.from_latent(randn(n, k), layout="planes")
    acc = ternary_matmul(x_q, weight, name)
    assert torch.equal(acc.double(), x_q.double() @ weight.codes().double().t())
    for dtype in FLOATS:
        expected = ternary_linear(x_q, x_scale, weight, dtype, "torch_fp32")
        assert torch.equal(ternary_linear(x_q, x_scale, weight, dtype, name), expected)


def test_the_int8_head() -> None:
    x_q, x_scale = quantize_activation(randn(3, 130))
    values, scale = quantize_activation(randn(70, 130))
    head = Int8Weight(values, "int8", (70, 130), scale.flatten())
    for dtype in FLOATS:
        expected = int8_linear(x_q, x_scale, head, dtype, "torch_fp32")
        assert torch.equal(int8_linear(x_q, x_scale, head, dtype, "triton"), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantizers(dtype: torch.dtype) -> None:
    x, up, gain = randn(4, 130, dtype=dtype), randn(4, 130, dtype=dtype) + 1, randn(130)
    calls: list[Callable[[str], tuple[Tensor, Tensor]]] = [
        lambda name: quantize_activation(x, implementation=name),
        lambda name: quantize_activation(
            x, 2 * x.abs().amax(1, keepdim=True).to(torch.promote_types(dtype, torch.float32)), name
        ),
        lambda name: rms_norm_quantize(x, gain, 1e-5, name),
        lambda name: glu_rms_norm_quantize(x, up, gain, 1e-5, "relu2", name),
    ]
    for call in calls:
        x_q, scale = call("triton")
        expected_q, expected_scale = call("torch")
        # A norm's rstd may differ in its last bit, for its sum is added in another order; in bf16
        # the plain norm also rounds before it quantizes, which keeps 8 bits.
        tolerance = 1e-2 if dtype == torch.bfloat16 else 3e-7
        torch.testing.assert_close(scale, expected_scale, rtol=tolerance, atol=0)
        difference = (x_q.int() - expected_q.int()).abs()
        assert int(difference.max()) <= 1
        assert scale.dtype == expected_scale.dtype


@pytest.mark.parametrize("layout", ["planes", "packed", "int8", "panels"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_ternarize(dtype: torch.dtype, layout: Layout) -> None:
    weight = randn(5, 300, dtype=dtype)
    scale = weight.abs().mean()
    expected = plain.ternarize(weight, scale, layout)
    assert torch.equal(gpu.ternarize(weight, scale, layout), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["planes", "int8", "packed"])
def test_gradients(layout: Layout, dtype: torch.dtype) -> None:
    grad, weight = randn(4, 70), TernaryWeight.from_latent(randn(70, 130), layout=layout)
    x_q, x_scale = quantize_activation(randn(4, 130))
    dx = input_gradient(grad, weight, dtype, "triton")
    dw = gpu.weight_gradient(grad, x_q, x_scale, dtype)
    # bf16 keeps 8 bits of operands and of dX; fp32 takes the plain way.
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-6
    exact_dx = (grad.double() @ weight.codes().double()) * weight.scale
    exact_dw = (grad * x_scale).double().t() @ x_q.double()
    for ours, exact in [(dx, exact_dx), (dw, exact_dw)]:
        assert float((ours.double() - exact).abs().max() / exact.abs().max()) < bound


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(9, 65, 40), (1, 3, 1), (0, 5, 4), (40, 130, 66)])
def test_int8_gradients(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    grad, weight = randn(m, n, dtype=dtype), TernaryWeight.from_latent(randn(n, k), layout="planes")
    x_q, x_scale = quantize_activation(randn(m, k))
    expected = int8_input_gradient(grad, weight, 7, "torch")
    assert torch.equal(int8_input_gradient(grad, weight, 7, "triton"), expected)
    expected_dws = int8_weight_gradients([grad, -grad], x_q, x_scale, 7, "torch")
    dws = int8_weight_gradients([grad, -grad], x_q, x_scale, 7, "triton")
    assert all(torch.equal(*pair) for pair in zip(dws, expected_dws, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_cross_entropy(dtype: torch.dtype) -> None:
    logits, targets = 10 * randn(5, 70, dtype=dtype), torch.tensor([0, 3, 69, 5, 1])
    loss, normalizer = gpu.cross_entropy(logits, targets)
    expected, expected_normalizer = plain.cross_entropy(logits, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(normalizer, expected_normalizer)
    grad: Any = torch.linspace(-1, 1, 5, dtype=loss.dtype)
    torch.testing.assert_close(
        gpu.cross_entropy_gradient(grad, logits, targets, normalizer),
        plain.cross_entropy_gradient(grad, logits, targets, normalizer),
    )
