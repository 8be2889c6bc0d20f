"""Gradients of a ternary layer against float64.

Whole numbers in, every sum is exact and the result is known to the bit. Other inputs are compared
within the roundings that the definition allows. Triton's interpreter multiplies in fp32 where a GPU
has bf16 tensor cores; both take the same operands, exact in bf16.
"""

import pytest
import torch
from torch import Tensor

from megabit_kernels.layouts import to_planes
from megabit_kernels.triton import products
from megabit_kernels.triton.config import Choice, TileConfig
from tests.kernels.triton.operands import activations, integers, normal, ternary, uniform

BF16 = 2.0**-8  # largest relative error of a rounding to bf16
FP32 = 2.0**-24  # ... to fp32

SHAPES = [(1, 1, 1), (5, 3, 7), (32, 64, 256), (19, 37, 501), (70, 33, 300)]
CHOICES: list[Choice] = [TileConfig(16, 16, 64), TileConfig(32, 16, 128), "cublas"]
every_choice = pytest.mark.parametrize("choice", CHOICES, ids=["small", "wide", "cublas"])
every_layout = pytest.mark.parametrize("layout", ["codes", "planes"])


def whole(m: int, n: int) -> Tensor:
    """Numbers −8 to 8, few bits so that even cuBLAS's path rounds no sum of these sizes."""
    return integers(-8, 9, m, n).bfloat16()


def laid_out(codes: Tensor, layout: str) -> Tensor:
    return codes if layout == "codes" else to_planes(codes)


@every_layout
@pytest.mark.parametrize("choice", CHOICES[:2], ids=["small", "wide"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_input_gradient_of_whole_numbers_is_exact(
    m: int, n: int, k: int, choice: Choice, layout: str
) -> None:
    dy, codes, w_scale = whole(m, n), ternary(n, k), torch.tensor(0.7)
    dx = products.input_gradient(dy, laid_out(codes, layout), k, w_scale, choice)
    assert torch.equal(dx, ((dy.float() @ codes.float()) * w_scale).bfloat16())


@every_layout
@every_choice
def test_the_input_gradient_is_close_to_float64(choice: Choice, layout: str) -> None:
    m, n, k = 19, 300, 270
    dy, codes, w_scale = normal(m, n, dtype=torch.bfloat16), ternary(n, k), torch.tensor(0.03)
    dx = products.input_gradient(dy, laid_out(codes, layout), k, w_scale, choice)
    expected = dy.double() @ codes.double() * w_scale.double()
    magnitude = dy.double().abs() @ codes.double().abs() * w_scale.double()
    # fp32 sums of n terms, then one rounding to bf16; cuBLAS's path rounds twice.
    bound = n * FP32 * magnitude + 2.01 * BF16 * expected.abs()
    assert ((dx.double() - expected).abs() <= bound).all()


@every_choice
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_weight_gradient_of_whole_numbers_is_exact(
    m: int, n: int, k: int, dtype: torch.dtype, choice: Choice
) -> None:
    dy, x_q = whole(m, n), activations(m, k)
    x_scale = torch.tensor([1.0, 0.5, 0.25])[
        torch.arange(m) % 3, None
    ]  # products with powers of two are exact
    dw = products.weight_gradient(dy, x_q, x_scale, dtype, choice)
    assert dw.dtype == dtype
    assert torch.equal(dw, ((dy.float() * x_scale).t() @ x_q.float()).to(dtype))


@every_choice
def test_the_weight_gradient_is_close_to_float64(choice: Choice) -> None:
    m, n, k = 200, 33, 70
    dy, x_q = normal(m, n, dtype=torch.bfloat16), activations(m, k)
    x_scale = uniform(m, 1, seed=2) / 127
    dw = products.weight_gradient(dy, x_q, x_scale, torch.float32, choice)
    scaled = dy.double() * x_scale.double()
    # Each term is rounded with dY · s to bf16, and the sum of m terms in fp32.
    bound = (1.01 * BF16 + m * FP32) * (scaled.abs().t() @ x_q.double().abs())
    assert ((dw.double() - scaled.t() @ x_q.double()).abs() <= bound).all()


@every_choice
@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_an_empty_operand_gives_empty_or_zero_gradients(
    m: int, n: int, k: int, choice: Choice
) -> None:
    dy, codes, x_q = normal(m, n, dtype=torch.bfloat16), ternary(n, k), activations(m, k)
    for weight in (codes, to_planes(codes)):
        dx = products.input_gradient(dy, weight, k, torch.ones(()), choice)
        assert torch.equal(dx, torch.zeros(m, k).bfloat16())
    dw = products.weight_gradient(dy, x_q, torch.ones(m, 1), torch.float32, choice)
    assert torch.equal(dw, torch.zeros(n, k))


@every_choice
def test_strides_do_not_matter(choice: Choice) -> None:
    dy, codes, x_q = whole(20, 14).t()[::2], ternary(9, 20).t(), activations(9, 7).t()
    dx = products.input_gradient(dy, codes, 9, torch.ones(()), choice)
    assert torch.equal(dx, (dy.float() @ codes.float()).bfloat16())
    dw = products.weight_gradient(dy, x_q, torch.ones(7, 1), torch.float32, choice)
    assert torch.equal(dw, dy.float().t() @ x_q.float())


def test_what_a_kernel_cannot_take_is_refused_by_name() -> None:
    dy, codes, x_q, config = (
        normal(3, 4, dtype=torch.bfloat16),
        ternary(4, 5),
        activations(3, 5),
        CHOICES[0],
    )
    with pytest.raises(TypeError, match=r"dy is torch\.float32: torch\.bfloat16 is wanted"):
        products.input_gradient(dy.float(), codes, 5, torch.ones(()), config)
    with pytest.raises(ValueError, match=r"weight has shape \(4, 5\): \[4, 6\] is wanted"):
        products.input_gradient(dy, codes, 6, torch.ones(()), config)
    with pytest.raises(ValueError, match=r"w_scale has shape \(4,\): \[\] is wanted"):
        products.input_gradient(dy, codes, 5, torch.ones(4), config)
    with pytest.raises(ValueError, match=r"x_q has shape \(3, 5\): \[2, 5\] is wanted"):
        products.weight_gradient(dy[:2], x_q, torch.ones(2, 1), torch.float32, config)
    with pytest.raises(ValueError, match=r"x_scale has shape \(3,\): \[3, 1\] is wanted"):
        products.weight_gradient(dy, x_q, torch.ones(3), torch.float32, config)
