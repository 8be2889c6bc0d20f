"""The two layouts in which kernels read ternary weights, in plain torch: their definition.

Both hold the codes w + 1 of ``packing``, four to a byte, in the order in which a kernel meets them.
Both are padded with code 1 (w = 0) to whole tiles, so a kernel never has a partial one and the
padding adds nothing to a product. A weight's layout is derived from its codes, on any device;
nothing is stored or sent in it.

``planes`` is for Triton: uint8 ``[N, 64·B]``, B = ceil(K/256). Byte 64b + j of a row holds::

    k = 256b + 64p + j   in bits 2p, 2p+1   (p = 0..3)

One tile of bytes gives four operands by a shift and a mask each, every one against 64 *contiguous*
activations: no shuffle between lanes.

``panels`` is for the native CPU kernels: uint8 ``[P, Q, 4, 64]``, P = ceil(N/64), Q = ceil(K/16).
Panel p, block q, sub-panel s holds 16 rows × 16 columns, and its byte 4r + i has row
n = 64p + 16s + r and::

    k = 16q + 4·plane + i   in bits 2·plane, 2·plane+1   (plane = 0..3)

So 64 bytes are one vector register; masked, they are four operands of the instruction that adds
four neighbouring products into each of 16 sums (``vpdpbusd`` and its kin), one sum per row. A panel
is one stream of memory from beginning to end.
"""

import torch
from torch import Tensor

from megabit_kernels.packing import merge_codes, pad_codes, require_matrix, split_codes

PLANE = 64
"""Neighbouring columns in one plane of the ``planes`` layout."""

PANEL_ROWS = 64
SUB_PANEL_ROWS = 16
PANEL_COLUMNS = 16
"""Columns of one block of the ``panels`` layout: 4 planes of 4 neighbours."""


def planes_shape(n: int, k: int) -> tuple[int, int]:
    """Shape of an ``[n, k]`` weight in the ``planes`` layout."""
    return n, PLANE * _ceil_div(k, 4 * PLANE)


def to_planes(codes: Tensor) -> Tensor:
    """int8 codes ``[N, K]`` of any strides, trusted to be −1, 0 or 1 → ``planes``."""
    require_matrix("codes", codes, torch.int8)
    n, width = planes_shape(*codes.shape)
    padded = pad_codes(codes, n, 4 * width)
    return merge_codes(padded.view(n, width // PLANE, 4, PLANE), 2).view(n, width)


def from_planes(planes: Tensor, k: int) -> Tensor:
    """``planes`` of a weight with ``k`` columns → int8 codes ``[N, k]``."""
    require_matrix("planes", planes, torch.uint8)
    n, width = planes.shape
    _require_shape("planes", planes, planes_shape(n, k), f"K = {k}")
    blocks = planes.unflatten(1, (width // PLANE, PLANE))
    return split_codes(blocks, 2).view(n, 4 * width)[:, :k].contiguous()


def panels_shape(n: int, k: int) -> tuple[int, int, int, int]:
    """Shape of an ``[n, k]`` weight in the ``panels`` layout."""
    sub_panels = PANEL_ROWS // SUB_PANEL_ROWS
    return _ceil_div(n, PANEL_ROWS), _ceil_div(k, PANEL_COLUMNS), sub_panels, 4 * SUB_PANEL_ROWS


def to_panels(codes: Tensor) -> Tensor:
    """int8 codes ``[N, K]`` of any strides, trusted to be −1, 0 or 1 → ``panels``."""
    require_matrix("codes", codes, torch.int8)
    shape = panels_shape(*codes.shape)
    panels, blocks, sub_panels, _ = shape
    padded = pad_codes(codes, panels * PANEL_ROWS, blocks * PANEL_COLUMNS)
    tiles = padded.view(panels, sub_panels, SUB_PANEL_ROWS, blocks, 4, 4)  # p s r q plane i
    return merge_codes(tiles, 4).permute(0, 3, 1, 2, 4).reshape(shape)


def from_panels(panels: Tensor, n: int, k: int) -> Tensor:
    """``panels`` of an ``[n, k]`` weight → int8 codes ``[n, k]``."""
    if panels.dtype != torch.uint8:
        raise TypeError(f"panels must be torch.uint8, not {panels.dtype}")
    _require_shape("panels", panels, panels_shape(n, k), f"[N, K] = [{n}, {k}]")
    count, blocks, _, _ = panels.shape
    tiles = panels.unflatten(3, (SUB_PANEL_ROWS, 4)).permute(0, 2, 3, 1, 4)  # p s r q i
    codes = split_codes(tiles, 4).reshape(count * PANEL_ROWS, blocks * PANEL_COLUMNS)
    return codes[:n, :k].contiguous()


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _require_shape(name: str, x: Tensor, shape: tuple[int, ...], of: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; {of} needs {shape}")
