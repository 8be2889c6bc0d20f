"""What the products share: the order of tiles, the sum over packed columns, and the way out.

Products are kept transposed, ``acc [BN, BM] = W · xᵀ``. Weights are then the left operand, which
Hopper's tensor cores take from registers and Blackwell's from their own memory: codes go from the
unpacking straight into the product and never through shared memory. On Ampere each weight is then
unpacked by one warp and not by all.
"""

import triton
import triton.language as tl

from megabit_kernels.triton.unpack import plane_fp16, plane_int8, signed_planes


@triton.jit
def tile_at(
    i: tl.tensor, rows: tl.tensor, columns: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Row and column of the ``i``-th tile: down ``GROUP`` rows, then one column to the right."""
    per_group = GROUP * columns
    first = i // per_group * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + i % per_group % height, i % per_group // height


@triton.jit
def row_pointers(
    base: tl.tensor, rows: tl.tensor, count: tl.tensor, stride: tl.tensor
) -> tl.tensor:
    """``[R, 1]`` pointers to ``rows`` of a matrix; one past the last row is the last row itself.

    What is computed of such a row is never stored, so no load needs a mask for it.
    """
    return base + tl.minimum(rows, count - 1).to(tl.int64)[:, None] * stride


@triton.jit
def load_tile(
    at: tl.tensor, row_mask: tl.tensor, k: tl.tensor, K: tl.tensor, TAIL: tl.constexpr
) -> tl.tensor:
    """The ``[R, C]`` numbers ``at`` pointers, zero where there is no row or no column.

    Args:
        row_mask: rows that exist, ``[R, 1]``; None if all do.
        k: the tile's columns ``[C]``, which exist below ``K``.
        TAIL: whether some may not.
    """
    if TAIL:
        inside = (k < K)[None, :]
        if row_mask is not None:
            inside = inside & row_mask
        tile = tl.load(at, mask=inside, other=0)
    elif row_mask is not None:
        tile = tl.load(at, mask=row_mask, other=0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def packed_sum(
    w_rows: tl.tensor,
    x_rows: tl.tensor,
    x_mask: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    K: tl.tensor,
    TAIL: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """``weight · xᵀ``, int32 ``[BN, BM]``, over blocks ``first`` to ``last - 1`` of 256 columns.

    int8 multiplies 64 · w, four planes in a turn; sums stay within 2^30 for K ≤ 131,072. fp16
    multiplies w, one plane in a turn: so the sum stays in Blackwell's tensor memory, where four
    products in a turn would move it out and back for each.

    Args:
        w_rows: pointers ``[BN, 1]`` to rows of planes.
        x_rows: pointers ``[BM, 1]`` to rows of x, int8 or fp16.
        x_mask, TAIL: as in ``load_tile``.
    """
    j = tl.arange(0, 64)
    w_tile = w_rows + (first * 64 + j)[None, :]
    x_tile = x_rows + (first * 256 + j)[None, :]
    left = K - first * 256
    if x_rows.dtype.element_ty == tl.int8:
        acc = tl.zeros((w_rows.shape[0], x_rows.shape[0]), tl.int32)
        for _ in range(first, last):
            signed = signed_planes(tl.load(w_tile), ASM)
            for p in tl.static_range(4):
                x = load_tile(x_tile + 64 * p, x_mask, 64 * p + j, left, TAIL)
                acc = tl.dot(plane_int8(signed, p, ASM), tl.trans(x), acc, out_dtype=tl.int32)
            w_tile += 64
            x_tile += 256
            left -= 256
        total = acc >> 6
    else:
        acc = tl.zeros((w_rows.shape[0], x_rows.shape[0]), tl.float32)
        for plane in range(4 * first, 4 * last):
            packed = tl.load(w_rows + ((plane >> 2) * 64 + j)[None, :])
            x = load_tile(x_tile, x_mask, j, left, TAIL)
            acc = tl.dot(plane_fp16(packed, plane & 3, ASM), tl.trans(x), acc)
            x_tile += 64
            left -= 64
        total = acc.to(tl.int32)
    return total


@triton.jit
def store_product(
    acc: tl.tensor,
    y_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    x_scale_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    SCALE_PER_ROW: tl.constexpr,
) -> None:
    """Writes ``acc [BN, BM]`` int32 to ``y [M, N]``: as it is, or as acc · (s · γ).

    Args:
        x_scale_ptr: s, fp32 ``[M]``; None writes the integers.
        w_scale_ptr: γ, one fp32 number, or one for each of N with ``SCALE_PER_ROW``.
    """
    out = tl.trans(acc)
    has_m = m < M
    has_n = n < N
    if x_scale_ptr is not None:
        scale = tl.load(x_scale_ptr + m, mask=has_m, other=0.0)[:, None]
        if SCALE_PER_ROW:
            scale = scale * tl.load(w_scale_ptr + n, mask=has_n, other=0.0)[None, :]
        else:
            scale = scale * tl.load(w_scale_ptr)
        out = out.to(tl.float32) * scale
    at = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, out.to(y_ptr.dtype.element_ty), mask=has_m[:, None] & has_n[None, :])
