"""A dense layer's product whose bits for one token do not depend on what else is in the call.

All calls of a dtype share one tile and one compilation, whatever the number of tokens. So every
element is summed by one sequence of instructions: over K in steps of the tile, from its start, into
one fp32 accumulator; no step is left to another program, and none is chosen by timing. A matrix
instruction computes each element from its own row and its own column; which row of a tile holds a
token, and what the rows beside it hold, has no part in it.

A decode step is bound by the bytes of the weight, so rows of its tile that stand empty cost
nothing. fp32 is multiplied as fp32, without tensor cores: in TF32 a product keeps 10 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.triton.arithmetic import dot, is_interpreted, rounded
from megabit_kernels.triton.compile_spec import CompileSpec, spec_of_tiles
from megabit_kernels.triton.config import TileConfig
from megabit_kernels.triton.launch import launch, matrix, on_one_device, shaped
from megabit_kernels.triton.limits import OUTPUTS
from megabit_kernels.triton.tiles import load_tile, row_pointers, tile_at

_HALF = TileConfig(block_m=32, block_n=128, block_k=64, warps=4, stages=3)
_SINGLE = TileConfig(block_m=32, block_n=64, block_k=32, warps=4, stages=3)


def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``y[t, n] = Σ_k x[t, k] · weight[n, k]``, summed in fp32 and rounded once.

    Args:
        x: fp32, bf16 or fp16 ``[T, K]``.
        weight: ``[N, K]``, in the dtype of ``x``.

    Returns:
        ``[T, N]``, in the dtype of ``x``.
    """
    x = matrix("x", x, *OUTPUTS)
    weight = matrix("weight", weight, x.dtype)
    on_one_device(x=x, weight=weight)
    (t, k), n = x.shape, weight.shape[0]
    weight = shaped("weight", weight, n, k)
    config = _config(x.dtype)
    y = x.new_empty(t, n, dtype=x.dtype)
    launch(
        _dense_linear_kernel,
        (triton.cdiv(t, config.block_m) * triton.cdiv(n, config.block_n),),
        x,
        weight,
        y,
        t,
        n,
        k,
        config.block_m,
        config.block_n,
        config.block_k,
        config.group,
        k % config.block_k != 0,
        is_interpreted(),
        config=config,
    )
    return y


@triton.jit(do_not_specialize=["M"])
def _dense_linear_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    y_ptr: tl.tensor,
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
    """One tile ``[BM, BN]``, kept transposed. ``TAIL``: K is not a multiple of ``BK``."""
    i, j = tile_at(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m = i * BM + tl.arange(0, BM)
    n = j * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_tile = row_pointers(x_ptr, m, M, K) + k[None, :]
    w_tile = row_pointers(w_ptr, n, N, K) + k[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        x = load_tile(x_tile, None, k, K - start, TAIL)
        w = load_tile(w_tile, None, k, K - start, TAIL)
        acc = dot(w, tl.trans(x), acc, INTERPRETED)
        x_tile += BK
        w_tile += BK
    y = rounded(tl.trans(acc), y_ptr.dtype.element_ty, INTERPRETED)
    at = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def _config(dtype: torch.dtype) -> TileConfig:
    return _SINGLE if dtype == torch.float32 else _HALF


def compile_specs() -> tuple[CompileSpec, ...]:
    """Each dtype, and a tail."""
    return (
        _spec("bf16", torch.bfloat16, "*bf16"),
        _spec("bf16, tail", torch.bfloat16, "*bf16", TAIL=True),
        _spec("fp16", torch.float16, "*fp16"),
        _spec("fp32", torch.float32, "*fp32"),
    )


def _spec(which: str, dtype: torch.dtype, pointer: str, **constants: object) -> CompileSpec:
    config = _config(dtype)
    return spec_of_tiles(
        f"dense_linear, {which}",
        _dense_linear_kernel,
        config,
        {
            "x_ptr": pointer,
            "w_ptr": pointer,
            "y_ptr": pointer,
            "M": "i32",
            "N": "i32",
            "K": "i32",
        },
        {
            "BM": config.block_m,
            "BN": config.block_n,
            "BK": config.block_k,
            "GROUP": config.group,
            "TAIL": False,
            "INTERPRETED": False,
            **constants,
        },
        None if dtype == torch.float32 else "bf16",
    )
