"""Gradient of a ternary layer's input: ``dX = (dY · w) · γ``.

The weight's codes are exact in bf16, so this is a bf16 product with fp32 sums that is scaled and
rounded once at the end. It reads codes from int8 or from planes. A tile of planes is one plane of
some blocks: the same bytes are read four times for four tiles, as many in all as int8 codes have.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.layouts import planes_shape
from megabit_kernels.triton import candidates
from megabit_kernels.triton.arithmetic import is_interpreted
from megabit_kernels.triton.compile_spec import CompileSpec, spec_of_tiles
from megabit_kernels.triton.config import TileConfig
from megabit_kernels.triton.launch import launch, matrix, on_one_device, shaped, stored
from megabit_kernels.triton.tiles import load_tile, row_pointers, tile_at
from megabit_kernels.triton.unpack import plane_bf16


def input_gradient(
    dy: Tensor, weight: Tensor, k: int, w_scale: Tensor, config: TileConfig
) -> Tensor:
    """``dx[m, k] = (Σ_n dy[m, n] · w[n, k]) · γ``.

    Args:
        dy: bf16 ``[M, N]``.
        weight: codes, int8 ``[N, K]``, or planes, uint8 ``[N, 64 · ceil(K/256)]``.
        k: K, which planes alone do not tell.
        w_scale: γ, fp32, 0-dimensional.
        config: tiles of ``block_m`` tokens and ``block_k`` inputs, summed ``block_n`` at a time.

    Returns:
        bf16 ``[M, K]``.
    """
    dy = matrix("dy", dy, torch.bfloat16)
    weight = matrix("weight", weight, torch.int8, torch.uint8)
    on_one_device(dy=dy, weight=weight, w_scale=w_scale)
    m, n = dy.shape
    is_planes = weight.dtype == torch.uint8
    weight = shaped("weight", weight, *(planes_shape(n, k) if is_planes else (n, k)))
    w_scale = shaped("w_scale", w_scale.float())
    dx = dy.new_empty(m, k, dtype=stored(torch.bfloat16))
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(weight.shape[1], config.block_k)
    launch(
        _input_gradient_kernel,
        (tiles, 4 if is_planes else 1),
        dy,
        weight,
        dx,
        w_scale,
        m,
        n,
        k,
        weight.shape[1],
        config.block_m,
        config.block_n,
        config.block_k,
        config.group,
        n % config.block_n != 0,
        is_planes,
        is_interpreted(),
        config=config,
    )
    return dx.to(dy.dtype)


@triton.jit
def _input_gradient_kernel(
    dy_ptr: tl.tensor,
    w_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    width: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TAIL: tl.constexpr,
    PLANES: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile ``[BM, BK]``, of one plane with ``PLANES``.

    ``width`` is the weight's row length in bytes, ``TAIL`` that N is not a multiple of ``BN``.
    """
    i, j = tile_at(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(width, BK), GROUP)
    plane = tl.program_id(1)
    m = i * BM + tl.arange(0, BM)
    byte = j * BK + tl.arange(0, BK)
    n = tl.arange(0, BN)
    dy_tile = row_pointers(dy_ptr, m, M, N) + n[None, :]
    w_tile = w_ptr + n.to(tl.int64)[:, None] * width + byte[None, :]
    acc = tl.zeros((BM, BK), tl.float32)
    for start in range(0, N, BN):
        dy = load_tile(dy_tile, None, n, N - start, TAIL)
        rows = (n < N - start)[:, None] if TAIL else None
        w = load_tile(w_tile, rows, byte, width, True)
        if PLANES:
            w = plane_bf16(w, plane, not INTERPRETED)
        if INTERPRETED:  # where bf16 is multiplied wrongly
            acc = tl.dot(dy.to(tl.float32), w.to(tl.float32), acc)
        else:
            acc = tl.dot(dy, w.to(tl.bfloat16), acc)
        dy_tile += BN
        w_tile += BN * width
    k = byte // 64 * 256 + 64 * plane + byte % 64 if PLANES else byte
    dx = acc * tl.load(w_scale_ptr)
    at = dx_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=(m < M)[:, None] & (k < K)[None, :])


def compile_specs() -> tuple[CompileSpec, ...]:
    """From codes and from planes, and with an N that ends inside a tile."""
    return (
        _spec("codes"),
        _spec("planes", PLANES=True),
        _spec("planes, tail", PLANES=True, TAIL=True),
    )


def _spec(which: str, **constants: object) -> CompileSpec:
    config = candidates.INPUT_GRADIENT
    return spec_of_tiles(
        f"input_gradient, {which}",
        _input_gradient_kernel,
        config,
        {
            "dy_ptr": "*bf16",
            "w_ptr": "*u8" if constants.get("PLANES") else "*i8",
            "dx_ptr": "*bf16",
            "w_scale_ptr": "*fp32",
            "M": "i32",
            "N": "i32",
            "K": "i32",
            "width": "i32",
        },
        {
            "BM": config.block_m,
            "BN": config.block_n,
            "BK": config.block_k,
            "GROUP": config.group,
            "TAIL": False,
            "PLANES": False,
            "INTERPRETED": False,
            **constants,
        },
        "bf16",
    )
