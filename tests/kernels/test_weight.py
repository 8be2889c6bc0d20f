"""Weights keep their codes in every layout, and refuse what is not ternary."""

import warnings

import pytest
import torch
from torch import Tensor

from megabit_kernels import (
    Int8Weight,
    TernaryWeight,
    implementations,
    int8_linear,
    numerics,
    packing,
    quantize_activation,
    ternary_linear,
)
from megabit_kernels.conversion import Layout
from megabit_kernels.dispatch import best_layout

LAYOUTS: tuple[Layout, ...] = ("packed", "planes", "panels", "int8")
SHAPES = [(64, 256), (70, 130), (1, 1), (3456, 17), (0, 5), (5, 0)]


def random_codes(n: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(n + k)
    return torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_any_layout_becomes_any_other(
    first: Layout, second: Layout, shape: tuple[int, int]
) -> None:
    codes, scale = random_codes(*shape), torch.tensor(0.25)
    weight = TernaryWeight.from_codes(codes, scale, first).to_layout(second)
    assert (weight.layout, weight.shape, weight.scale) == (second, shape, scale)
    assert torch.equal(weight.codes(), codes)
    assert torch.equal(weight.packed(), packing.pack(codes))
    again = TernaryWeight.from_packed(weight.packed(), shape[1], scale, first)
    assert torch.equal(again.data, TernaryWeight.from_codes(codes, scale, first).data)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_codes_are_exact_in_any_dtype(layout: Layout, dtype: torch.dtype) -> None:
    codes = random_codes(70, 130)
    dense = TernaryWeight.from_codes(codes, torch.tensor(0.25), layout).dense(dtype)
    assert dense.dtype == dtype
    assert torch.equal(dense, codes.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_latent_weight_is_ternarized_by_the_numerics(layout: Layout, dtype: torch.dtype) -> None:
    latent = torch.randn(70, 130, generator=torch.Generator().manual_seed(0), dtype=dtype)
    latent[3, :40] = torch.linspace(-2, 2, 40, dtype=dtype) * numerics.absmean_scale(latent)
    weight = TernaryWeight.from_latent(latent, layout=layout)
    codes, scale = numerics.absmean_ternarize(latent)
    assert torch.equal(weight.codes(), codes)
    assert torch.equal(weight.scale, scale)
    # Values at exactly half of γ are ties, which go to the even code, 0.
    ties = torch.tensor([[0.5, -0.5, 0.75, -0.75]], dtype=dtype)
    tied = TernaryWeight.from_latent(ties, torch.tensor(1.0, dtype=dtype), layout)
    assert tied.codes().tolist() == [[0, 0, 1, -1]]


def test_the_best_layout_holds_four_codes_in_a_byte_where_a_kernel_reads_them() -> None:
    weight = TernaryWeight.from_codes(random_codes(640, 2560), torch.tensor(1.0))
    assert weight.layout == best_layout(torch.device("cpu"))
    assert weight.nbytes == 640 * 2560 // (1 if weight.layout == "int8" else 4)


def test_a_weight_is_no_part_of_the_graph() -> None:
    latent = torch.nn.Parameter(torch.randn(8, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = TernaryWeight.from_latent(latent)
    assert not weight.scale.requires_grad


def test_an_empty_weight_has_the_smallest_scale() -> None:
    weight = TernaryWeight.from_latent(torch.empty(8, 0))
    assert weight.scale == torch.tensor(numerics.MIN_SCALE)
    y = ternary_linear(torch.empty(2, 0, dtype=torch.int8), torch.ones(2, 1), weight, torch.float32)
    assert not y.any()


def test_what_is_not_ternary_is_refused() -> None:
    scale = torch.tensor(1.0)
    with pytest.raises(ValueError, match="layout 'foo': one of packed, planes, panels, int8"):
        TernaryWeight.from_codes(random_codes(4, 4), scale, "foo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout 'foo': one of packed, planes, panels, int8"):
        TernaryWeight.from_latent(torch.ones(4, 4), layout="foo")  # type: ignore[arg-type]
    for bad in (torch.ones(1), torch.ones(4), torch.tensor(1)):
        with pytest.raises(ValueError, match=r"scale is torch\.\w+ .*: γ is one number"):
            TernaryWeight.from_codes(random_codes(4, 4), bad)
    with pytest.raises(ValueError, match="codes must hold −1, 0 and 1 only, not 2"):
        TernaryWeight.from_codes(torch.tensor([[2]], dtype=torch.int8), scale)
    with pytest.raises(TypeError, match=r"codes must be torch\.int8"):
        TernaryWeight.from_codes(torch.ones(1, 1), scale)
    with pytest.raises(ValueError, match="weight must have 2 dimensions"):
        TernaryWeight.from_latent(torch.ones(4))
    with pytest.raises(ValueError, match="packed holds code 3"):
        TernaryWeight.from_packed(torch.tensor([[255]], dtype=torch.uint8), 4, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 300), (17, 130, 70), (3, 1, 1), (0, 5, 7)])
def test_an_int8_head_scales_each_row_by_itself(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(m)
    weight = torch.randn(n, k, generator=generator) * torch.logspace(-8, 8, n).unsqueeze(1)
    x_q, x_scale = quantize_activation(torch.randn(m, k, generator=generator))
    values, scale = numerics_of_rows(weight)
    acc = (x_q.long() @ values.long().t()).to(torch.int32)
    expected = numerics.dequantize_product(acc, x_scale, scale, dtype)

    head = Int8Weight.from_float(weight)
    assert torch.equal(head.scale, scale)
    assert torch.equal(int8_linear(x_q, x_scale, head, dtype), expected)
    rows = Int8Weight(values, "int8", (n, k), scale)
    for name in implementations("int8_linear", "cpu"):
        for held in (head, rows, Int8Weight.from_float(weight, "int8")):
            assert torch.equal(int8_linear(x_q, x_scale, held, dtype, name), expected)


def test_the_largest_int8_sums_are_exact() -> None:
    x_q = torch.full((2, 5000), -128, dtype=torch.int8)
    head = Int8Weight.from_float(torch.tensor([[1.0], [-1.0]]).repeat(1, 5000))
    y = int8_linear(x_q, torch.ones(2, 1), head, torch.float32)
    expected = torch.tensor([-128 * 127 * 5000, 128 * 127 * 5000]).float() * head.scale
    assert torch.equal(y, expected.expand(2, 2))


def numerics_of_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = numerics.activation_scale(numerics.absmax(weight))
    return numerics.quantize_activation(weight, scale), scale.flatten()
