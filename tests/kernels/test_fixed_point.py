"""Sums that no order and no split changes, against Python's exact fractions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megabit_kernels import abs_sum, implementations, native, numerics, square_sum

HERE = implementations("abs_sum", "cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float64]
LARGE = 2.0**16

each_isa = pytest.mark.parametrize("isa", native.isas() or ["not built"])


def randn(*shape: int, spread: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Magnitudes from 2^-30·spread to 2^5·spread, and some zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-28, 3, shape, generator=generator) * spread
    return (x * (torch.rand(*shape, generator=generator) > 0.1)).to(dtype)


def fraction_lanes(weight: Tensor, numel: int) -> list[int]:
    """By the words of the docstring; ``round`` of a fraction is to nearest, ties to even."""
    magnitudes = [abs(Fraction(w)) for w in weight.double().flatten().tolist()]
    bits = math.ceil(math.log2(numel))
    return [
        sum(round(w * Fraction(2) ** (62 - bits)) for w in magnitudes if w < 1),
        sum(round(w * Fraction(2) ** (32 - bits)) for w in magnitudes if w >= 1),
    ]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", [4096, 5000, 1 << 27, 1 << 34])
@pytest.mark.parametrize("name", HERE)
def test_magnitudes_by_the_definition(name: str, numel: int, dtype: torch.dtype) -> None:
    weight = randn(64, 64, dtype=dtype)
    weight[0, :3] = torch.tensor([1.0, -1.0, LARGE * 0.99])
    lanes = abs_sum(weight, numel, name)
    assert lanes.dtype == torch.int64
    assert lanes.tolist() == fraction_lanes(weight, numel)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", HERE)
def test_squares_by_the_definition(name: str, dtype: torch.dtype) -> None:
    x = randn(3000, spread=1e-9, dtype=dtype)
    largest = 3 * float(x.abs().max())
    exponent = math.frexp(largest)[1]
    # fp64 holds the square of an fp32 number exactly, and rounds that of an fp64 one, once.
    squares = [Fraction(math.ldexp(v, -exponent) ** 2) for v in x.double().tolist()]
    expected = sum(round(square * 2 ** (62 - 13)) for square in squares)  # 5000 < 2^13
    assert int(square_sum(x, largest, 5000, name)) == expected


@pytest.mark.parametrize("name", HERE)
@given(cuts=st.lists(st.integers(0, 9000), max_size=6), seed=st.integers(0, 100))
def test_pieces_add_up_in_any_order(name: str, cuts: list[int], seed: int) -> None:
    weight = randn(100, 90)
    generator = torch.Generator().manual_seed(seed)
    shuffled = weight.flatten()[torch.randperm(9000, generator=generator)]
    pieces = shuffled.tensor_split(sorted(cuts))  # some of them empty
    largest = float(weight.abs().max())
    magnitudes = sum(abs_sum(piece, 9000, name) for piece in pieces)
    assert torch.equal(magnitudes, abs_sum(weight, 9000, name))
    squares = sum(square_sum(piece, largest, 9000, name) for piece in pieces)
    assert torch.equal(squares, square_sum(weight, largest, 9000, name))


@each_isa
@pytest.mark.parametrize("shape", [(0,), (1,), (4095,), (4097,), (70_001,), (3, 5, 7)])
def test_the_native_sums_are_the_plain_ones(isa: str, shape: tuple[int, ...]) -> None:
    kernels, numel = native.require(), 1 << 20
    for spread in (1.0, 1e-20, 1e-40):
        weight = randn(*shape, spread=spread)
        if spread == 1.0 and weight.numel() > 100:
            weight.view(-1)[99] = 1000.5
        expected = numerics.fixed_point_abs_sum(weight, numel)
        assert torch.equal(kernels.abs_sum(weight, numel, isa), expected)
        largest = max(1e-45, float(weight.abs().amax())) if weight.numel() else 1.0
        squares = numerics.fixed_point_square_sum(weight, largest, numel)
        assert torch.equal(kernels.square_sum(weight, largest, numel, isa), squares)
    strided = randn(40, 50).t()[::2]
    assert torch.equal(
        kernels.abs_sum(strided, numel, isa), numerics.fixed_point_abs_sum(strided, numel)
    )


@pytest.mark.parametrize("name", HERE)
def test_the_largest_sums_fit(name: str) -> None:
    for numel in (1, 3, 4096):
        below_one = torch.full((numel,), math.nextafter(1, 0), dtype=torch.float64)
        for value, lane in ((below_one.float() - 2**-24, 0), (below_one, 0), (LARGE - 1, 1)):
            weight = torch.as_tensor(value).expand(numel)
            lanes = abs_sum(weight, numel, name)
            assert lanes[1 - lane] == 0
            gamma = numerics.weight_scale(lanes, numel, torch.float64)
            assert gamma.item() == pytest.approx(float(weight[0]), rel=1e-7)
        total = square_sum(torch.full((numel,), -3.0), 3.0, numel, name)
        norm = numerics.norm_from_fixed_point(total, 3.0, numel)
        assert norm == pytest.approx(3 * math.sqrt(numel), rel=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, LARGE, -3e38])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", HERE)
def test_what_cannot_be_counted_makes_the_scale_infinite(
    name: str, dtype: torch.dtype, bad: float
) -> None:
    weight, good = randn(50, 100, dtype=dtype), randn(1000, dtype=dtype)
    weight[3, 4] = weight[49, 99] = bad
    lanes = abs_sum(weight, 6000, name)
    assert lanes.tolist() == [0, 1 << 49]
    for pieces in (1, 2, 16_384, 32_767):  # whatever the others hold
        total = pieces * lanes + abs_sum(good, 6000, name)
        assert numerics.weight_scale(total, 6000, torch.float32).item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scale_is_the_mean(dtype: torch.dtype) -> None:
    weight = randn(300, 500, dtype=dtype) * 0.02
    exact = sum(abs(Fraction(w)) for w in weight.double().flatten().tolist()) / weight.numel()
    gamma = numerics.absmean_scale(weight)
    assert gamma.dtype == dtype
    # Each element is off by half of 2^-44 at most; γ, of about 4e-3, is rounded once more.
    bound = 2.0**-45 + float(exact) * torch.finfo(dtype).eps / 2
    assert abs(gamma.item() - float(exact)) <= bound


def test_a_norm() -> None:
    for scale in (1e-30, 1.0, 1e30):
        x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * scale
        largest = float(x.abs().max())
        norm = numerics.norm_from_fixed_point(square_sum(x, largest, 10_000), largest, 10_000)
        assert norm == pytest.approx(float(x.double().norm()), rel=1e-12)
    tiny = torch.tensor([3e-320, 4e-320], dtype=torch.float64)
    assert numerics.norm_from_fixed_point(square_sum(tiny, 4e-320, 2), 4e-320, 2) == 0
    huge = torch.full((100,), 1e308, dtype=torch.float64)
    assert numerics.norm_from_fixed_point(square_sum(huge, 1e308, 100), 1e308, 100) == math.inf


@pytest.mark.parametrize("b", [20, 30, 37])
@pytest.mark.parametrize("ratio", [10.0, 1e3, 1e5])
def test_what_rounding_does_to_a_norm(b: int, ratio: float) -> None:
    """As if ``x`` were a part of 2^b numbers like it, of which the largest is 1: the mean square is
    off by 2^(b-61) of the largest's at most. With many numbers that are tiny beside the largest
    that is more than the mean square itself (docs/numerics.md)."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (x / x.square().mean().sqrt() / ratio).clamp(-1, 1)
    mean = int(square_sum(x, 1.0, 2**b)) / numerics.small_units(2**b) / len(x)
    scaled = mean * 4.0  # units are of numbers below 2
    exact = float(x.square().mean())
    assert abs(scaled - exact) <= 2.0 ** (b - 61)
    if (b, ratio) == (37, 1e5):
        assert scaled < 0.01 * exact


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_a_norm_that_needs_no_sum(name: str, largest: float) -> None:
    total = square_sum(torch.tensor([largest, 0.0]), largest, 2, name)
    assert total == 0
    norm = numerics.norm_from_fixed_point(total, largest, 2)
    assert norm == largest or (math.isnan(norm) and math.isnan(largest))


def test_a_piece_is_not_larger_than_the_whole() -> None:
    with pytest.raises(ValueError, match="weight has 5 elements: a piece of 4 is wanted"):
        abs_sum(torch.zeros(5), 4)
    with pytest.raises(TypeError, match=r"x is torch\.int8: floating point is wanted"):
        square_sum(torch.zeros(5, dtype=torch.int8), 1.0, 5)
