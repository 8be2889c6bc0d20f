"""int8 activations times packed ternary weights, for many rows: prefill and training.

Way of the data: 2 bits a weight from memory to registers → int8 → tensor cores, int32 → times s·γ →
rounded once. Sums are exact, so neither the tiles nor the operand's dtype changes a bit.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.epilogue import Epilogue
from megabit_kernels.triton import candidates
from megabit_kernels.triton.arithmetic import is_interpreted
from megabit_kernels.triton.compile_spec import CompileSpec, spec_of_tiles
from megabit_kernels.triton.config import TileConfig
from megabit_kernels.triton.launch import launch, output, packed_operands
from megabit_kernels.triton.tiles import packed_sum, row_pointers, store_product, tile_at


def packed_gemm(
    x_q: Tensor, planes: Tensor, config: TileConfig, epilogue: Epilogue | None = None
) -> Tensor:
    """``acc[m, n] = Σ_k x_q[m, k] · w[n, k]``, or what ``epilogue`` makes of it.

    Args:
        x_q: int8 ``[M, K]``, K ≤ 131,072.
        planes: uint8 ``[N, 64 · ceil(K/256)]``.
        config: tiles of ``block_m`` tokens and ``block_n`` outputs.
        epilogue: None gives int32.

    Returns:
        ``[M, N]``, int32 or in the epilogue's dtype.
    """
    operands = packed_operands(x_q, planes, config)
    out = output(operands, epilogue)
    x_q, planes, m, n, k = operands
    grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),)
    launch(
        _packed_gemm_kernel,
        grid,
        x_q,
        planes,
        *out,
        m,
        n,
        k,
        planes.shape[1],
        config.block_m,
        config.block_n,
        config.group,
        k % 256 != 0,
        not is_interpreted(),
        config=config,
    )
    return out.y if epilogue is None else out.y.to(epilogue.dtype)


@triton.jit
def _packed_gemm_kernel(
    x_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    planes_stride: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    TAIL: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    """One tile ``[BM, BN]``. Rows past the end are read from the last one, and never stored.

    The row stride of the planes is an argument, for one computed from K would not show the
    compiler that 16 bytes can be copied at a time. ``TAIL`` says that K ends inside a block.
    """
    i, j = tile_at(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m = i * BM + tl.arange(0, BM)
    n = j * BN + tl.arange(0, BN)
    w_rows = row_pointers(planes_ptr, n, N, planes_stride)
    x_rows = row_pointers(x_ptr, m, M, K)
    acc = packed_sum(w_rows, x_rows, None, 0, tl.cdiv(K, 256), K, TAIL, ASM)
    store_product(acc, y_ptr, m, n, M, N, x_scale_ptr, w_scale_ptr, False)


def compile_specs() -> tuple[CompileSpec, ...]:
    """The default tiles, a K that ends inside a block, integer results, and the operand in fp16."""
    integers = dict.fromkeys(("x_scale_ptr", "w_scale_ptr"))
    return (
        _spec("few rows", candidates.FEW_ROWS),
        _spec("some rows", candidates.SOME_ROWS),
        _spec("many rows", candidates.MANY_ROWS),
        _spec("many rows, tail", candidates.MANY_ROWS, TAIL=True),
        _spec("many rows, integers", candidates.MANY_ROWS, **integers),
        _spec("many rows, fp16", replace(candidates.MANY_ROWS, operand="fp16")),
        _spec("prefill", candidates.PREFILL),
    )


def _spec(which: str, config: TileConfig, **constants: object) -> CompileSpec:
    return spec_of_tiles(
        f"packed_gemm, {which}",
        _packed_gemm_kernel,
        config,
        {
            "x_ptr": "*i8" if config.operand == "int8" else "*fp16",
            "planes_ptr": "*u8",
            "y_ptr": "*i32" if "x_scale_ptr" in constants else "*bf16",
            "x_scale_ptr": "*fp32",
            "w_scale_ptr": "*fp32",
            "M": "i32",
            "N": "i32",
            "K": "i32",
            "planes_stride": "i32",
        },
        {
            "BM": config.block_m,
            "BN": config.block_n,
            "GROUP": config.group,
            "TAIL": False,
            "ASM": True,
            **constants,
        },
        "int8" if config.operand == "int8" else "bf16",
    )
