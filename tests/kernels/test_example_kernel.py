"""``examples/kernels/two_masks.py`` is an implementation like any other: exact, and chosen by name
or by its place in the table."""

import runpy
from pathlib import Path

import pytest
import torch

from megabit_kernels import (
    TernaryWeight,
    dispatch,
    implementations,
    quantize_activation,
    ternary_linear,
    ternary_matmul,
)
from megabit_kernels.dispatch import Implementation
from megabit_kernels.numerics import MAX_EXACT_K

FILE = Path(__file__).parents[2] / "examples/kernels/two_masks.py"
ONE = torch.tensor(1.0)


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    """The example in front of all others, as a row in ``dispatch.py`` would be."""
    own: Implementation = runpy.run_path(str(FILE))["ROW"]
    others = dispatch.TABLE["ternary_matmul"]
    monkeypatch.setitem(dispatch.TABLE, "ternary_matmul", (own, *others))
    return own


@pytest.mark.parametrize(("m", "k", "n"), [(17, 64, 32), (1, 1, 1), (5, 257, 7), (0, 64, 4)])
def test_it_equals_an_int64_oracle(row: Implementation, m: int, k: int, n: int) -> None:
    generator = torch.Generator().manual_seed(m + k + n)
    x_q = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
    codes = torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)
    acc = ternary_matmul(x_q, TernaryWeight.from_codes(codes, ONE), row.name)
    assert acc.dtype == torch.int32
    assert torch.equal(acc.long(), x_q.long() @ codes.long().t())


def test_the_largest_sums(row: Implementation) -> None:
    x_q = torch.tensor([[-128], [127]], dtype=torch.int8).repeat(1, MAX_EXACT_K)
    codes = torch.tensor([[1], [-1]], dtype=torch.int8).repeat(1, MAX_EXACT_K)
    acc = ternary_matmul(x_q, TernaryWeight.from_codes(codes, ONE), row.name)
    assert torch.equal(acc.long(), x_q.long() @ codes.long().t())


def test_it_is_what_computes_now_and_changes_no_bit(
    row: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(32, 64, generator=generator)
    x_q, scale = quantize_activation(torch.randn(5, 64, generator=generator))
    assert implementations("ternary_matmul", "cpu")[0] == "two_masks"
    own = ternary_linear(x_q, scale, TernaryWeight.from_latent(latent), torch.float32)
    monkeypatch.undo()
    assert "two_masks" not in implementations("ternary_matmul", "cpu")
    shipped = ternary_linear(x_q, scale, TernaryWeight.from_latent(latent), torch.float32)
    assert torch.equal(own, shipped)
