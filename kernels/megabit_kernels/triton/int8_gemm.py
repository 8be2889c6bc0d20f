"""int8 activations times int8 weights: ternary codes kept unpacked in training, and the LM head.

A ternary weight has one scale γ, the LM head's int8 rows have one each; the epilogue is the same,
acc · (s · γ). With weights of −127 to 127 sums are exact in int32 up to K = 131,072, for
127 · 128 · K < 2^31.
"""

import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.epilogue import Epilogue
from megabit_kernels.triton import candidates
from megabit_kernels.triton.compile_spec import CompileSpec, spec_of_tiles
from megabit_kernels.triton.config import TileConfig
from megabit_kernels.triton.launch import int8_operands, launch, output
from megabit_kernels.triton.tiles import load_tile, row_pointers, store_product, tile_at


def int8_gemm(
    x_q: Tensor, weight: Tensor, config: TileConfig, epilogue: Epilogue | None = None
) -> Tensor:
    """``acc[m, n] = Σ_k x_q[m, k] · weight[n, k]``, or what ``epilogue`` makes of it.

    Args:
        x_q: int8 ``[M, K]``, K ≤ 131,072.
        weight: int8 ``[N, K]``, −127 to 127.
        config: tiles of ``block_m`` × ``block_n``, summed ``block_k`` at a time.
        epilogue: its ``w_scale`` is 0-dimensional, or ``[N]``. None gives int32.

    Returns:
        ``[M, N]``, int32 or in the epilogue's dtype.
    """
    operands = int8_operands(x_q, weight)
    per_row = epilogue is not None and epilogue.w_scale.dim() == 1
    out = output(operands, epilogue, rows_scaled=per_row)
    x_q, weight, m, n, k = operands
    launch(
        _int8_gemm_kernel,
        (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),),
        x_q,
        weight,
        *out,
        m,
        n,
        k,
        config.block_m,
        config.block_n,
        config.block_k,
        config.group,
        k % config.block_k != 0,
        per_row,
        config=config,
    )
    return out.y if epilogue is None else out.y.to(epilogue.dtype)


@triton.jit
def _int8_gemm_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TAIL: tl.constexpr,
    SCALE_PER_ROW: tl.constexpr,
) -> None:
    """One tile ``[BM, BN]``. ``TAIL`` says that K is not a multiple of ``BK``."""
    i, j = tile_at(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m = i * BM + tl.arange(0, BM)
    n = j * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_tile = row_pointers(x_ptr, m, M, K) + k[None, :]
    w_tile = row_pointers(w_ptr, n, N, K) + k[None, :]
    acc = tl.zeros((BN, BM), tl.int32)
    for start in range(0, K, BK):
        x = load_tile(x_tile, None, k, K - start, TAIL)
        w = load_tile(w_tile, None, k, K - start, TAIL)
        acc = tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)
        x_tile += BK
        w_tile += BK
    store_product(acc, y_ptr, m, n, M, N, x_scale_ptr, w_scale_ptr, SCALE_PER_ROW)


def compile_specs() -> tuple[CompileSpec, ...]:
    """The default tiles, with one scale or one a row, integer results, and a tail."""
    integers = dict.fromkeys(("x_scale_ptr", "w_scale_ptr"))
    return (
        _spec("decode, scaled rows", candidates.INT8_DECODE, SCALE_PER_ROW=True),
        _spec("some rows", candidates.INT8_SOME_ROWS),
        _spec("many rows", candidates.INT8_MANY_ROWS),
        _spec("many rows, tail", candidates.INT8_MANY_ROWS, TAIL=True),
        _spec("many rows, integers", candidates.INT8_MANY_ROWS, **integers),
    )


def _spec(which: str, config: TileConfig, **constants: object) -> CompileSpec:
    return spec_of_tiles(
        f"int8_gemm, {which}",
        _int8_gemm_kernel,
        config,
        {
            "x_ptr": "*i8",
            "w_ptr": "*i8",
            "y_ptr": "*i32" if "x_scale_ptr" in constants else "*bf16",
            "x_scale_ptr": "*fp32",
            "w_scale_ptr": "*fp32",
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
            "SCALE_PER_ROW": False,
            **constants,
        },
        "int8",
    )
