"""The canonical packed form of a ternary matrix: what is stored and what is sent.

A weight w of −1, 0 or +1 has the two-bit code w + 1: 0, 1 or 2; 3 is invalid. A matrix ``[N, K]``
is uint8 ``[N, ceil(K/4)]``, row by row, and byte j of row n is::

    bits   7 6            5 4            3 2            1 0
    code   w[n, 4j+3]+1   w[n, 4j+2]+1   w[n, 4j+1]+1   w[n, 4j]+1

Where K is no multiple of 4, the codes that fill the last byte are 1 (w = 0). So equal matrices have
equal bytes, and a product that runs over the filling adds nothing.

No byte holds two rows: a matrix is cut along rows anywhere and along columns at multiples of 4, and
``torch.cat`` rejoins the parts, all without unpacking. That is why this form is the canonical one.
Formats that mix rows in a byte (``formats``) and the layouts that kernels read (``layouts``) are
derived from it through the codes and never cut themselves.

In torch, weights are *codes*: int8 ``[N, K]`` with the values w. Nothing here reads values back to
the host except the checks, which are for data from outside.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

CODES_PER_BYTE = 4


def pack(codes: Tensor) -> Tensor:
    """int8 codes ``[N, K]`` of any strides → packed uint8 ``[N, ceil(K/4)]``.

    Runs after every optimizer step, so it does not look at the values: one outside −1..1 spoils its
    byte. ``check_codes`` is for codes that something else made.
    """
    require_matrix("codes", codes, torch.int8)
    n, k = codes.shape
    width = packed_width(k)
    padded = pad_codes(codes, n, CODES_PER_BYTE * width)
    return merge_codes(padded.view(n, width, CODES_PER_BYTE), 2)


def unpack(packed: Tensor, k: int) -> Tensor:
    """packed uint8 ``[N, ceil(K/4)]`` → int8 codes ``[N, K]``; an invalid code 3 gives 2."""
    _require_packed(packed, k)
    return split_codes(packed, 2).flatten(1)[:, :k].contiguous()


def slice_packed(
    packed: Tensor, k: int, rows: slice = slice(None), columns: slice = slice(None)
) -> Tensor:
    """The packed form of ``codes[rows, columns]``, as a view.

    Args:
        packed: uint8 ``[N, ceil(K/4)]``.
        k: K, the number of columns of the matrix.
        rows: any slice with step 1, as Python reads it.
        columns: a slice with step 1 whose ends are multiples of 4 or K.

    Raises:
        ValueError: a step other than 1, or a column cut inside a byte.
    """
    _require_packed(packed, k)
    row_start, row_stop = _range("rows", rows, packed.shape[0])
    start, stop = _range("columns", columns, k)
    for edge in (start, stop):
        if edge % CODES_PER_BYTE and edge != k:
            raise ValueError(
                f"columns {start}:{stop} cut a byte: each end must be a multiple of "
                f"{CODES_PER_BYTE} or K = {k}"
            )
    return packed[row_start:row_stop, packed_width(start) : packed_width(stop)]


def packed_width(k: int) -> int:
    """Bytes of a packed row of ``k`` codes."""
    return -(-k // CODES_PER_BYTE)


def check_codes(codes: Tensor, name: str = "codes") -> None:
    """Raise ValueError unless ``codes``, int8 ``[N, K]``, are all −1, 0 or 1."""
    require_matrix(name, codes, torch.int8)
    if codes.numel():
        low, high = (int(value) for value in codes.aminmax())
        if low < -1 or high > 1:
            raise ValueError(f"{name} must hold −1, 0 and 1 only, not {low if low < -1 else high}")


def check_packed(packed: Tensor, k: int, name: str = "packed") -> None:
    """Raise ValueError unless ``packed`` is the packed form of some ternary ``[N, k]``."""
    _require_packed(packed, k, name)
    check_bytes(packed, name)
    used = k % CODES_PER_BYTE
    if used and bool((packed[:, -1] >> 2 * used != 0b01010101 >> 2 * used).any()):
        raise ValueError(f"{name} must fill up the last byte of each row with code 1 (w = 0)")


def check_bytes(data: Tensor, name: str) -> None:
    """Raise ValueError if a byte of ``data``, uint8 of any shape, holds the invalid code 3."""
    if bool((data & data >> 1 & 0b01010101).any()):
        raise ValueError(f"{name} holds code 3; only 0, 1 and 2 (w = −1, 0, +1) are valid")


# What the packed form, the layouts and the formats of others have in common.


def merge_codes(codes: Tensor, dim: int) -> Tensor:
    """Four codes to a byte: ``dim``, of size 4, goes away; its member i lands in bits 2i, 2i+1."""
    first, second, third, fourth = (codes + 1).view(torch.uint8).unbind(dim)
    return first | second << 2 | third << 4 | fourth << 6


def split_codes(data: Tensor, dim: int) -> Tensor:
    """The inverse of ``merge_codes``: uint8 → int8 with a new ``dim`` of size 4."""
    fields = torch.stack([data >> shift & 3 for shift in (0, 2, 4, 6)], dim)
    return fields.view(torch.int8).sub_(1)


def pad_codes(codes: Tensor, n: int, k: int) -> Tensor:
    """``codes`` with zero weights after its last row and column, up to ``[n, k]``."""
    rows, columns = n - codes.shape[0], k - codes.shape[1]
    return F.pad(codes, (0, columns, 0, rows)) if rows or columns else codes


def require_matrix(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raise unless ``x`` has two dimensions and ``dtype``."""
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"{name} must have 2 dimensions, not shape {tuple(x.shape)}")


def _require_packed(packed: Tensor, k: int, name: str = "packed") -> None:
    require_matrix(name, packed, torch.uint8)
    if k < 0 or packed.shape[1] != packed_width(k):
        raise ValueError(
            f"{name} has {packed.shape[1]} bytes a row; K = {k} columns need {packed_width(k)}"
        )


def _range(name: str, part: slice, size: int) -> tuple[int, int]:
    start, stop, step = part.indices(size)
    if step != 1:
        raise ValueError(f"{name} must be a slice with step 1, not {step}")
    return start, max(start, stop)
