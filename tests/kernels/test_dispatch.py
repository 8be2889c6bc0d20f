"""The integer product: every implementation on this machine equals an int64 oracle, bit for bit."""

import pytest
import torch
from torch import Tensor

from megabit_kernels import (
    TernaryWeight,
    dispatch,
    implementations,
    numerics,
    quantize_activation,
    ternary_linear,
    ternary_matmul,
)
from megabit_kernels.conversion import Layout
from megabit_kernels.numerics import MAX_EXACT_K

ONE = torch.tensor(1.0)
HERE = implementations("ternary_matmul", "cpu")
LAYOUTS: tuple[Layout, ...] = ("packed", "planes", "panels", "int8")


@pytest.fixture(params=[None, *HERE])
def name(request: pytest.FixtureRequest) -> str | None:
    """Each implementation in turn, and the one that dispatch chooses."""
    return request.param


def assert_exact(x_q: Tensor, codes: Tensor, name: str | None) -> None:
    acc = ternary_matmul(x_q, TernaryWeight.from_codes(codes, ONE), name)
    assert acc.dtype == torch.int32
    assert torch.equal(acc.long(), x_q.long() @ codes.long().t())


def random_operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + 100 * k + 10_000 * n)
    x_q = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
    return x_q, torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)


def test_there_are_several_to_compare() -> None:
    assert HERE[-1] == "torch_fp32"
    assert len(HERE) > 1


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (17, 64, 32),
        (1, 64, 32),
        (17, 64, 1),
        (17, 1, 32),
        (1, 1, 1),
        (5, 63, 7),
        (33, 257, 65),
        (128, 768, 256),
        (0, 64, 32),
        (5, 64, 0),
        (5, 0, 32),
    ],
)
def test_random_operands(m: int, k: int, n: int, name: str | None) -> None:
    assert_exact(*random_operands(m, k, n), name)


@pytest.mark.parametrize("k", [1, 7, 64, 1001, MAX_EXACT_K])
def test_the_largest_sums(k: int, name: str | None) -> None:
    """All of one sign: at the widest K, −128 · K is −2^24, the last integer that fp32 counts to."""
    x_q = torch.tensor([[-128], [127], [0]], dtype=torch.int8).repeat(1, k)
    codes = torch.tensor([[1], [-1], [0]], dtype=torch.int8).repeat(1, k)
    assert_exact(x_q, codes, name)
    x_q[:, ::3] = -127  # sums that are not powers of two
    assert_exact(x_q, codes, name)


def test_views_that_are_not_contiguous(name: str | None) -> None:
    x_q, codes = random_operands(18, 66, 34)
    assert_exact(x_q[:, ::2], codes[:, ::2], name)  # every second column
    assert_exact(x_q[::2], codes[::3], name)  # some rows
    assert_exact(x_q[1:, 1:], codes[1:, 1:], name)  # an odd beginning
    assert_exact(x_q.t().contiguous().t(), codes.t().contiguous().t(), name)  # transposed storage
    assert_exact(x_q[:1].expand(18, -1), codes[:, :1].expand(-1, 66), name)  # strides of 0


@pytest.mark.parametrize("stride", [0, 1, 8, 64])
def test_any_stride_of_a_dimension_of_one(stride: int, name: str | None) -> None:
    """It has no meaning, but torch._int_mm reads it (pytorch#195066): ``w[:, :1].t()`` has 1."""
    x_q, codes = random_operands(9, 64, 16)
    one_token = x_q.flatten().as_strided((1, 64), (stride, 1))
    one_output = codes.flatten().as_strided((1, 64), (stride, 1))
    assert_exact(one_token, codes, name)
    assert_exact(x_q, one_output, name)


def test_operands_are_left_alone(name: str | None) -> None:
    x_q, codes = random_operands(8, 64, 16)
    weight = TernaryWeight.from_codes(codes, ONE)
    before = x_q.clone(), weight.data.clone()
    ternary_matmul(x_q, weight, name)
    assert torch.equal(x_q, before[0])
    assert torch.equal(weight.data, before[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_in_any_layout(layout: Layout, name: str | None) -> None:
    x_q, codes = random_operands(5, 300, 70)
    weight = TernaryWeight.from_codes(codes, ONE, layout)
    acc = ternary_matmul(x_q, weight, name)
    assert torch.equal(acc.long(), x_q.long() @ codes.long().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_scaled_product_has_the_bits_of_the_numerics(
    dtype: torch.dtype, name: str | None
) -> None:
    x = torch.randn(37, 130, dtype=dtype) * torch.logspace(-20, 20, 37).unsqueeze(1).to(dtype)
    x_q, x_scale = quantize_activation(x)
    weight = TernaryWeight.from_latent(torch.randn(70, 130, dtype=numerics.stats_dtype(dtype)))
    y = ternary_linear(x_q, x_scale, weight, dtype, name)
    acc = (x_q.long() @ weight.codes().long().t()).to(torch.int32)
    assert torch.equal(y, numerics.dequantize_product(acc, x_scale, weight.scale, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_spoils_its_own_row_only(
    bad: float, dtype: torch.dtype, name: str | None
) -> None:
    x = torch.randn(5, 70).to(dtype)
    weight = TernaryWeight.from_latent(torch.randn(66, 70))
    clean = ternary_linear(*quantize_activation(x), weight, dtype, name)
    x[2, 7] = bad
    x_q, x_scale = quantize_activation(x)
    y = ternary_linear(x_q, x_scale, weight, dtype, name)
    assert not x_q[2].any()
    assert not x_scale[2].isfinite().any()
    assert y[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], clean[others])


def test_what_dispatch_chooses_reads_the_layout_that_the_weight_has() -> None:
    device = torch.device("cpu")
    for m in (1, 64):
        row = dispatch.select("ternary_matmul", device, m, 64, 64, dispatch.best_layout(device))
        assert row.name == HERE[0]
        assert row.layout == dispatch.best_layout(device)
    assert dispatch.select("ternary_matmul", device, 1, 64, 64, "int8").layout == "int8"


def test_an_unknown_implementation_is_refused() -> None:
    x_q, codes = random_operands(1, 64, 16)
    with pytest.raises(ValueError, match=r"'fast': ternary_matmul has native, .*torch_fp32"):
        ternary_matmul(x_q, TernaryWeight.from_codes(codes, ONE), "fast")


def test_bad_operands_are_refused() -> None:
    x_q, codes = random_operands(2, 64, 16)
    weight = TernaryWeight.from_codes(codes, ONE)
    with pytest.raises(TypeError, match=r"x_q is torch\.float32: torch\.int8 is wanted"):
        ternary_matmul(x_q.float(), weight)
    with pytest.raises(ValueError, match=r"x_q has shape \(2, 63\): \[M, 64\] is wanted"):
        ternary_matmul(x_q[:, 1:], weight)
    with pytest.raises(ValueError, match=r"x_q has shape \(64,\): \[M, 64\] is wanted"):
        ternary_matmul(x_q[0], weight)
    wide = torch.zeros(1, MAX_EXACT_K + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="K = 131073: at most 131072"):
        ternary_matmul(wide, TernaryWeight.from_codes(wide, ONE, "int8"))
