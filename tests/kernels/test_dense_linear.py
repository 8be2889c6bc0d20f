"""The dense product of the head: right values, and bits that no other row or column changes."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from megabit_kernels import dense_linear, native, native_attention, plain_attention

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [
    *[(1, 1, 1), (3, 5, 15), (7, 30, 16), (12, 97, 31), (5, 48, 64)],
    *[(13, 49, 100), (50, 61, 515), (2, 25, 2049)],
]
"""M, N, K around tiles of up to 6 × 4, tasks of 24 or 48 rows of a weight, words of 16 or 32."""

WAYS = [*native.isas(), "torch"]
MULTIPLIES_BFLOAT16 = "avx512bf16"
"""The instruction set that multiplies bf16 as it is, and so has sums of its own."""

each_way = pytest.mark.parametrize("way", WAYS)


def product(way: str) -> Callable[[Tensor, Tensor], Tensor]:
    if way == "torch":
        return plain_attention.dense_linear
    return partial(native_attention.dense_linear, native.require(), isa=way)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def operands(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    return (
        torch.randn(m, k, generator=generator).to(dtype),
        torch.randn(n, k, generator=generator).to(dtype),
    )


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_values(way: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    x, weight = operands(m, n, k, dtype)
    y = product(way)(x, weight)
    assert y.dtype == dtype
    # Each of K additions in fp32 rounds by half a unit of the sum so far at most; then one more
    # rounding to the dtype of the result.
    sizes = x.double().abs() @ weight.double().abs().t()
    bound = sizes * k * 2**-24 + y.double().abs() * torch.finfo(dtype).eps
    assert ((y.double() - x.double() @ weight.double().t()).abs() <= bound + 1e-30).all()


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_sums_of_integers_are_exact(way: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(m + n + k)
    x = torch.randint(-8, 9, (m, k), generator=generator)
    weight = torch.randint(-8, 9, (n, k), generator=generator)
    y = product(way)(x.to(dtype), weight.to(dtype))
    assert torch.equal(y, (x @ weight.t()).to(dtype))


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        (way, dtype)
        for way in WAYS
        for dtype in (torch.bfloat16, torch.float16)
        if (way, dtype) != (MULTIPLIES_BFLOAT16, torch.bfloat16)
    ],
)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_narrow_numbers_are_computed_as_wide_ones(
    way: str, dtype: torch.dtype, m: int, n: int, k: int
) -> None:
    x, weight = operands(m, n, k, dtype)
    wide = product(way)(x.float(), weight.float())
    assert torch.equal(product(way)(x, weight), wide.to(dtype))


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_other_rows_and_columns_change_no_bit(
    way: str, dtype: torch.dtype, m: int, n: int, k: int
) -> None:
    x, weight = operands(m, n, k, dtype)
    y = product(way)(x, weight)
    for row in range(m):
        assert torch.equal(product(way)(x[row : row + 1], weight)[0], y[row])
    for first, last in ((0, n // 2), (n // 2, n), (n // 3, n - 1)):
        for rows in (slice(0, m), slice(m // 2, m)):
            part = product(way)(x[rows], weight[first:last])
            assert torch.equal(part, y[rows, first:last])


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
def test_threads_change_no_bit(way: str, dtype: torch.dtype) -> None:
    x, weight = operands(20, 300, 700, dtype)
    y = product(way)(x, weight)
    torch.set_num_threads(2)
    assert torch.equal(product(way)(x, weight), y)


@pytest.mark.skipif(len(native.isas()) < 3, reason="one set of vector instructions at most")
@pytest.mark.parametrize("dtype", FLOATS)
def test_instruction_sets_with_fused_multiply_add_agree(dtype: torch.dtype) -> None:
    x, weight = operands(13, 49, 515, dtype)
    other_bits = {"portable"} | ({MULTIPLIES_BFLOAT16} if dtype == torch.bfloat16 else set())
    best, *others = [isa for isa in native.isas() if isa not in other_bits]
    for isa in others:
        assert torch.equal(product(isa)(x, weight), product(best)(x, weight)), isa


@pytest.mark.skipif(MULTIPLIES_BFLOAT16 not in WAYS, reason="needs AVX512-BF16")
def test_subnormal_numbers_are_zero_where_bfloat16_is_multiplied() -> None:
    x = torch.full((7, 33), 2.0**-127, dtype=torch.bfloat16)
    weight = torch.full((5, 33), 2.0**100, dtype=torch.bfloat16)
    for a, b in ((x, weight), (weight, x)):
        assert not product(MULTIPLIES_BFLOAT16)(a, b).any()


@each_way
def test_more_rows_than_are_widened_at_a_time(way: str) -> None:
    """x is taken in portions of 2^21 numbers."""
    x, weight = operands(70, 2, 40_000)
    y = product(way)(x, weight)
    assert torch.equal(product(way)(x[60:], weight), y[60:])


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_stays_in_its_row_or_column(way: str, dtype: torch.dtype) -> None:
    x, weight = operands(9, 30, 37, dtype)
    clean = product(way)(x, weight)
    x[4, 36], weight[7, 0] = math.nan, math.inf
    y = product(way)(x, weight)
    assert y[4].isnan().all()
    assert not y[:, 7].isfinite().any()
    rows, columns = torch.arange(9) != 4, torch.arange(30) != 7
    assert torch.equal(y[rows][:, columns], clean[rows][:, columns])


@each_way
def test_nothing_to_do(way: str) -> None:
    for m, n, k in ((0, 3, 5), (3, 0, 5), (0, 0, 0)):
        assert product(way)(torch.ones(m, k), torch.ones(n, k)).shape == (m, n)
    assert torch.equal(product(way)(torch.ones(3, 0), torch.ones(2, 0)), torch.zeros(3, 2))


def test_what_people_call() -> None:
    x, weight = operands(3, 4, 5, torch.float64)
    # fp64 sums of five terms
    torch.testing.assert_close(dense_linear(x, weight), x @ weight.t(), rtol=1e-14, atol=1e-14)
    with pytest.raises(TypeError, match=r"weight is torch.float32"):
        dense_linear(x, weight.float())
    with pytest.raises(ValueError, match=r"weight has shape \(4, 4\)"):
        dense_linear(x, weight[:, 1:])
