"""int8 activations times packed ternary weights, for at most 16 rows: generation.

Such a product reads every weight once and computes little, so memory bounds it, and the way to
memory's speed is to have enough programs. There is one tile of rows only; where there are too few
tiles of outputs as well, several programs share the sum over K of one tile. They add their parts
into memory with integer atomics: exact, so the order of arrival does not matter.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.epilogue import Epilogue
from megabit_kernels.triton import candidates
from megabit_kernels.triton.arithmetic import is_interpreted
from megabit_kernels.triton.compile_spec import CompileSpec, spec_of_tiles
from megabit_kernels.triton.config import TileConfig
from megabit_kernels.triton.launch import launch, output, packed_operands
from megabit_kernels.triton.limits import DECODE_ROWS
from megabit_kernels.triton.tiles import packed_sum, row_pointers, store_product

_SCALE_BLOCK = 1024


def split_k(
    x_q: Tensor, planes: Tensor, config: TileConfig, epilogue: Epilogue | None = None
) -> Tensor:
    """``packed_gemm`` for M ≤ 16, with ``config.split`` programs for each tile of outputs.

    One launch without a split. A split costs a fill with zeros before and, if there is an
    epilogue, a pass over ``[M, N]`` after it.
    """
    operands = packed_operands(x_q, planes, config)
    x_q, planes, m, n, k = operands
    if m > DECODE_ROWS:
        raise ValueError(f"x_q has {m} rows: at most {DECODE_ROWS} are wanted")
    if config.block_m != DECODE_ROWS:
        raise ValueError(f"block_m = {config.block_m}: {DECODE_ROWS} is wanted")
    out = output(operands, epilogue)
    blocks = triton.cdiv(k, 256)
    split = max(1, min(config.split, blocks))
    acc = out.y if split == 1 else x_q.new_zeros(m, n, dtype=torch.int32)
    scales = (out.x_scale, out.w_scale) if split == 1 else (None, None)
    launch(
        _split_k_kernel,
        (triton.cdiv(m, DECODE_ROWS), triton.cdiv(n, config.block_n), split),
        x_q,
        planes,
        acc,
        *scales,
        m,
        n,
        k,
        planes.shape[1],
        config.block_m,
        config.block_n,
        split,
        k % 256 != 0,
        not is_interpreted(),
        config=config,
    )
    if epilogue is None:
        return acc
    if split > 1:
        grid = (m, triton.cdiv(n, _SCALE_BLOCK))
        launch(_scale_kernel, grid, acc, *out, n, _SCALE_BLOCK, config=config)
    return out.y.to(epilogue.dtype)


@triton.jit
def _split_k_kernel(
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
    SPLIT: tl.constexpr,
    TAIL: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    """The part of a tile that is one of ``SPLIT`` runs of blocks. Rows past M are not even read."""
    part = tl.program_id(2)
    m = tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    blocks = tl.cdiv(K, 256)
    w_rows = row_pointers(planes_ptr, n, N, planes_stride)
    x_rows = row_pointers(x_ptr, m, M, K)
    first = part * blocks // SPLIT
    last = (part + 1) * blocks // SPLIT
    acc = packed_sum(w_rows, x_rows, (m < M)[:, None], first, last, K, TAIL, ASM)
    if SPLIT == 1:
        store_product(acc, y_ptr, m, n, M, N, x_scale_ptr, w_scale_ptr, False)
    else:
        at = y_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.atomic_add(at, acc, mask=(m < M)[None, :] & (n < N)[:, None], sem="relaxed")


@triton.jit
def _scale_kernel(
    acc_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    N: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """``y = acc · (s · γ)`` for ``BLOCK`` outputs of one row."""
    m = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(x_scale_ptr + m) * tl.load(w_scale_ptr)
    acc = tl.load(acc_ptr + m * N + n, mask=n < N, other=0)
    tl.store(y_ptr + m * N + n, (acc.to(tl.float32) * scale).to(y_ptr.dtype.element_ty), mask=n < N)


def compile_specs() -> tuple[CompileSpec, ...]:
    """Alone on a tile and with others, a K that ends inside a block, and the pass after a split."""
    return (
        _spec("alone", candidates.DECODE),
        _spec("alone, tail", candidates.DECODE, TAIL=True),
        _spec("alone, fp16", replace(candidates.DECODE, operand="fp16")),
        _spec("split", replace(candidates.DECODE, split=4)),
        CompileSpec(
            name="split_k, scaling",
            kernel=_scale_kernel,
            signature={
                "acc_ptr": "*i32",
                "y_ptr": "*bf16",
                "x_scale_ptr": "*fp32",
                "w_scale_ptr": "*fp32",
                "N": "i32",
            },
            constants={"BLOCK": _SCALE_BLOCK},
            num_warps=4,
            num_stages=1,
            tensor_cores=None,
            aligned=("N",),
        ),
    )


def _spec(which: str, config: TileConfig, **constants: object) -> CompileSpec:
    if config.split > 1:
        constants |= dict.fromkeys(("x_scale_ptr", "w_scale_ptr"))
    return spec_of_tiles(
        f"split_k, {which}",
        _split_k_kernel,
        config,
        {
            "x_ptr": "*i8" if config.operand == "int8" else "*fp16",
            "planes_ptr": "*u8",
            "y_ptr": "*bf16" if config.split == 1 else "*i32",
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
            "SPLIT": config.split,
            "TAIL": False,
            "ASM": True,
            **constants,
        },
        "int8" if config.operand == "int8" else "bf16",
    )
