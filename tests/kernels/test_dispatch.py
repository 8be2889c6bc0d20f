"""The integer product: every way of computing it equals an int64 oracle, bit for bit."""

import pytest
import torch
from torch import Tensor

from megabit_kernels import dispatch, ternary_matmul
from megabit_kernels.dispatch import MAX_EXACT_K


@pytest.fixture(params=["int_mm", "fp32"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes each way in turn, whichever one this machine would choose."""
    monkeypatch.setattr(dispatch, "_int_mm_is_fast", lambda *_: request.param == "int_mm")


def assert_exact(x_q: Tensor, codes: Tensor) -> None:
    acc = ternary_matmul(x_q, codes)
    assert acc.dtype == torch.int32
    assert torch.equal(acc.long(), x_q.long() @ codes.long().t())


def random_operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + 100 * k + 10_000 * n)
    x_q = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
    return x_q, torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)


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
    ],
)
def test_random_operands(m: int, k: int, n: int) -> None:
    assert_exact(*random_operands(m, k, n))


@pytest.mark.parametrize("k", [1, 7, 64, 1001, MAX_EXACT_K])
def test_the_largest_sums(k: int) -> None:
    """All of one sign: at the widest K, −128 · K is −2^24, the last integer that fp32 counts to."""
    x_q = torch.tensor([[-128], [127], [0]], dtype=torch.int8).repeat(1, k)
    codes = torch.tensor([[1], [-1], [0]], dtype=torch.int8).repeat(1, k)
    assert_exact(x_q, codes)
    x_q[:, ::3] = -127  # sums that are not powers of two
    assert_exact(x_q, codes)


def test_views_that_are_not_contiguous() -> None:
    x_q, codes = random_operands(18, 66, 34)
    assert_exact(x_q[:, ::2], codes[:, ::2])  # every second column
    assert_exact(x_q[::2], codes[::3])  # some rows
    assert_exact(x_q[1:, 1:], codes[1:, 1:])  # an odd beginning
    assert_exact(x_q.t().contiguous().t(), codes.t().contiguous().t())  # transposed storage
    assert_exact(x_q[:1].expand(18, -1), codes[:, :1].expand(-1, 66))  # strides of 0


@pytest.mark.parametrize("stride", [0, 1, 8, 64])
def test_any_stride_of_a_dimension_of_one(stride: int) -> None:
    """It has no meaning, but torch._int_mm reads it (pytorch#195066): ``w[:, :1].t()`` has 1."""
    x_q, codes = random_operands(9, 64, 16)
    one_token = x_q.flatten().as_strided((1, 64), (stride, 1))
    one_output = codes.flatten().as_strided((1, 64), (stride, 1))
    assert_exact(one_token, codes)
    assert_exact(x_q, one_output)


def test_operands_are_left_alone() -> None:
    x_q, codes = random_operands(8, 64, 16)
    before = x_q.clone(), codes.clone()
    ternary_matmul(x_q, codes)
    assert torch.equal(x_q, before[0])
    assert torch.equal(codes, before[1])


def test_too_wide_an_input_is_refused() -> None:
    wide = torch.zeros(1, MAX_EXACT_K + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="131073 exceeds 131072"):
        ternary_matmul(wide, wide)
