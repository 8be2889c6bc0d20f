"""The canonical packed form: every code in its documented bits, and cuts that need no unpacking."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megabit_kernels import packing

SIZES = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 4), (3, 5), (4, 6), (7, 7), (16, 64), (2, 6912)]


def random_codes(n: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(n + 1000 * k)
    return torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)


def test_an_example_in_bits() -> None:
    codes = torch.tensor([[-1, 0, 1, 0, 1], [1, 1, -1, -1, 0]], dtype=torch.int8)
    expected = torch.tensor([[0b01_10_01_00, 0b01_01_01_10], [0b00_00_10_10, 0b01_01_01_01]])
    assert torch.equal(packing.pack(codes), expected.to(torch.uint8))


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_every_code_is_in_its_bits(n: int, k: int) -> None:
    codes = random_codes(n, k)
    packed = packing.pack(codes)
    assert packed.dtype == torch.uint8
    assert packed.shape == (n, packing.packed_width(k)) == (n, (k + 3) // 4)
    column = torch.arange(k)
    fields = packed.int()[:, column // 4] >> 2 * (column % 4) & 3
    assert torch.equal(fields - 1, codes.int())
    packing.check_packed(packed, k)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_unpack_inverts_pack(n: int, k: int) -> None:
    codes = random_codes(n, k)
    unpacked = packing.unpack(packing.pack(codes), k)
    assert unpacked.dtype == torch.int8
    assert unpacked.is_contiguous()
    assert torch.equal(unpacked, codes)


def test_views_that_are_not_contiguous() -> None:
    codes = random_codes(18, 66)
    views = [codes.t(), codes[:, ::2], codes[::3], codes[1:, 1:], codes[:, :1].expand(-1, 9)]
    for view in views:
        packed = packing.pack(view)
        assert torch.equal(packing.unpack(packed, view.shape[1]), view)
        transposed = packed.t().contiguous().t()
        assert torch.equal(packing.unpack(transposed, view.shape[1]), view)


def test_operands_are_left_alone() -> None:
    codes = random_codes(5, 8)
    before = codes.clone()
    packed = packing.pack(codes)
    assert torch.equal(codes, before)
    bytes_before = packed.clone()
    packing.unpack(packed, 8).fill_(7)
    assert torch.equal(packed, bytes_before)


@settings(deadline=None)
@given(data=st.data(), n=st.integers(0, 12), k=st.integers(0, 70))
def test_a_slice_is_the_packed_slice_of_the_codes(data: st.DataObject, n: int, k: int) -> None:
    codes = random_codes(n, k)
    row_edge = st.none() | st.integers(-n - 1, n + 1)
    column_edge = st.none() | st.just(k) | st.integers(0, k // 4).map(lambda byte: 4 * byte)
    rows = slice(data.draw(row_edge), data.draw(row_edge))
    columns = slice(data.draw(column_edge), data.draw(column_edge))
    part = packing.slice_packed(packing.pack(codes), k, rows, columns)
    expected = codes[rows, columns]
    assert torch.equal(part, packing.pack(expected))
    packing.check_packed(part, expected.shape[1])


def test_a_slice_is_a_view() -> None:
    packed = packing.pack(random_codes(8, 16))
    packing.slice_packed(packed, 16, slice(2, 4), slice(4, 8)).fill_(0b01010101)
    assert torch.equal(packing.unpack(packed, 16)[2:4, 4:8], torch.zeros(2, 4, dtype=torch.int8))


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (slice(None), slice(2, 8), "columns 2:8 cut a byte.*multiple of 4 or K = 10"),
        (slice(None), slice(0, 9), "columns 0:9 cut a byte"),
        (slice(None), slice(None, None, 2), "columns must be a slice with step 1, not 2"),
        (slice(None, None, -1), slice(None), "rows must be a slice with step 1, not -1"),
    ],
)
def test_slices_that_cannot_be(rows: slice, columns: slice, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packing.slice_packed(packing.pack(random_codes(6, 10)), 10, rows, columns)


def test_the_wrong_k_is_refused() -> None:
    packed = packing.pack(random_codes(3, 9))
    for k in (8, 13, -3):
        with pytest.raises(ValueError, match=f"packed has 3 bytes a row; K = {k} columns need"):
            packing.unpack(packed, k)


def test_the_wrong_kind_of_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"codes must be torch.int8, not torch.float32"):
        packing.pack(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"codes must have 2 dimensions, not shape \(4,\)"):
        packing.pack(torch.zeros(4, dtype=torch.int8))
    with pytest.raises(TypeError, match=r"packed must be torch.uint8, not torch.int8"):
        packing.unpack(torch.zeros(2, 1, dtype=torch.int8), 4)
    with pytest.raises(ValueError, match=r"packed must have 2 dimensions, not shape \(\)"):
        packing.unpack(torch.zeros((), dtype=torch.uint8), 4)


@pytest.mark.parametrize("bad", [-128, -2, 2, 127])
def test_codes_from_outside_are_checked(bad: int) -> None:
    codes = random_codes(4, 5)
    packing.check_codes(codes)
    codes[2, 3] = bad
    with pytest.raises(ValueError, match=f"codes must hold −1, 0 and 1 only, not {bad}"):
        packing.check_codes(codes)


def test_bytes_from_outside_are_checked() -> None:
    """Of the 256 bytes, the 3⁴ that hold no code 3 are valid."""
    every = torch.arange(256, dtype=torch.uint8).view(256, 1)
    valid = (packing.unpack(every, 4) < 2).all(1)
    assert valid.sum() == 81
    packing.check_packed(every[valid], 4)
    for byte in every[~valid]:
        with pytest.raises(ValueError, match="packed holds code 3"):
            packing.check_packed(byte.view(1, 1), 4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_filling_of_the_last_byte_is_checked(k: int) -> None:
    packed = packing.pack(random_codes(3, 8 + k))
    packing.check_packed(packed, 8 + k)
    packed[1, -1] ^= 0b11 << 2 * k  # the first code after the last column
    with pytest.raises(ValueError, match=r"fill up the last byte of each row with code 1"):
        packing.check_packed(packed, 8 + k)


def test_empty_tensors_pass_the_checks() -> None:
    for n, k in [(0, 0), (0, 5), (5, 0)]:
        packing.check_codes(torch.empty(n, k, dtype=torch.int8))
        packing.check_packed(packing.pack(torch.empty(n, k, dtype=torch.int8)), k)
