"""Gradient of a ternary layer's latent weight: ``dW = (dY · s)ᵀ · x_q``.

Backward keeps the int8 activations of forward, a half of what bf16 ones take. Their scale s belongs
to a token, so it lies along the sum and cannot be taken out of it: it goes into dY, in a pass
of its own, for done in the product it would be done again for every tile of K. int8 codes are exact
in bf16, and sums are fp32; the one rounding before the last is that of dY · s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.triton import candidates
from megabit_kernels.triton.arithmetic import is_interpreted
from megabit_kernels.triton.compile_spec import CompileSpec, spec_of_tiles
from megabit_kernels.triton.config import TileConfig
from megabit_kernels.triton.launch import launch, matrix, on_one_device, shaped, stored
from megabit_kernels.triton.tiles import load_tile, tile_at


def weight_gradient(
    dy: Tensor,
    x_q: Tensor,
    x_scale: Tensor,
    config: TileConfig,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``dw[n, k] = Σ_m bf16(dy[m, n] · s[m]) · x_q[m, k]``.

    Args:
        dy: bf16 ``[M, N]``.
        x_q: int8 ``[M, K]``.
        x_scale: s, fp32 ``[M, 1]``.
        config: tiles of ``block_n`` × ``block_k``, summed ``block_m`` tokens at a time.

    Returns:
        ``[N, K]`` in ``dtype``, fp32 or bf16.
    """
    scaled = scale_tokens(dy, x_scale)
    x_q = matrix("x_q", x_q, torch.int8)
    on_one_device(dy=dy, x_q=x_q, x_scale=x_scale)
    (m, n), k = scaled.shape, x_q.shape[1]
    x_q = shaped("x_q", x_q, m, k)
    dw = dy.new_empty(n, k, dtype=stored(dtype))
    launch(
        _weight_gradient_kernel,
        (triton.cdiv(n, config.block_n) * triton.cdiv(k, config.block_k),),
        scaled,
        x_q,
        dw,
        m,
        n,
        k,
        config.block_m,
        config.block_n,
        config.block_k,
        config.group,
        m % config.block_m != 0,
        is_interpreted(),
        config=config,
    )
    return dw.to(dtype)


def scale_tokens(dy: Tensor, x_scale: Tensor) -> Tensor:
    """bf16 ``dy [M, N]`` times fp32 ``x_scale [M, 1]``, rounded to bf16 once, in one pass."""
    dy = matrix("dy", dy, torch.bfloat16)
    x_scale = shaped("x_scale", x_scale, dy.shape[0], 1)
    return torch.mul(dy, x_scale, out=torch.empty_like(dy))


@triton.jit
def _weight_gradient_kernel(
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    dw_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TAIL: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile ``[BN, BK]``. ``TAIL`` says that M is not a multiple of ``BM``."""
    i, j = tile_at(tl.program_id(0), tl.cdiv(N, BN), tl.cdiv(K, BK), GROUP)
    n = i * BN + tl.arange(0, BN)
    k = j * BK + tl.arange(0, BK)
    m = tl.arange(0, BM)
    dy_tile = dy_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    x_tile = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, M, BM):
        rows = (m < M - start)[:, None] if TAIL else None
        dy = load_tile(dy_tile, rows, n, N, True)
        x = load_tile(x_tile, rows, k, K, True)
        if INTERPRETED:  # where bf16 is multiplied wrongly
            acc = tl.dot(tl.trans(dy.to(tl.float32)), x.to(tl.float32), acc)
        else:
            acc = tl.dot(tl.trans(dy), x.to(tl.bfloat16), acc)
        dy_tile += BM * N
        x_tile += BM * K
    at = dw_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, acc.to(dw_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def compile_specs() -> tuple[CompileSpec, ...]:
    """Both result dtypes, and a number of tokens that ends inside a tile."""
    return (
        _spec("fp32", "*fp32", tail=False),
        _spec("fp32, tail", "*fp32", tail=True),
        _spec("bf16", "*bf16", tail=False),
    )


def _spec(which: str, result: str, tail: bool) -> CompileSpec:
    config = candidates.WEIGHT_GRADIENT
    return spec_of_tiles(
        f"weight_gradient, {which}",
        _weight_gradient_kernel,
        config,
        {
            "dy_ptr": "*bf16",
            "x_ptr": "*i8",
            "dw_ptr": result,
            "M": "i32",
            "N": "i32",
            "K": "i32",
        },
        {
            "BM": config.block_m,
            "BN": config.block_n,
            "BK": config.block_k,
            "GROUP": config.group,
            "TAIL": tail,
            "INTERPRETED": False,
        },
        "bf16",
    )
