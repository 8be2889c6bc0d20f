"""Latent weights to ternary codes: every layout from one reading.

γ, from ``numerics.absmean_scale``, never leaves the device, so nothing waits for the host.

A code needs no division: round(W/γ) > 0 exactly where W > γ/2. Were W the next number above γ/2,
W/γ would lie above 1/2 by more than half a unit in the last place and so not be rounded to the tie.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.triton.compile_spec import CompileSpec
from megabit_kernels.triton.launch import check_float, on_one_device
from megabit_kernels.triton.limits import FLOATS

CodeFormat = Literal["planes", "packed", "int8", "bf16"]
"""Where codes can go: the layouts, and bf16 for a product in floating point."""

ROWS = 16
COLUMNS = tl.constexpr(256)
"""Columns of a tile: one block of ``planes``."""


def ternarize(weight: Tensor, scale: Tensor, outputs: Sequence[CodeFormat]) -> tuple[Tensor, ...]:
    """``numerics.ternarize`` into one or more layouts at once, the same bits.

    Args:
        weight: fp32 or bf16 ``[N, K]``.
        scale: γ, 0-dimensional, fp32 or of the weight's dtype.
        outputs: what is wanted, each once.

    Returns:
        In the order of ``outputs``: ``planes`` uint8 ``[N, 64 · ceil(K/256)]``, ``packed`` uint8
        ``[N, ceil(K/4)]``, ``int8`` and ``bf16`` ``[N, K]``.
    """
    check_float("weight", weight)
    on_one_device(weight=weight, scale=scale)
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: [N, K] is wanted")
    if scale.numel() != 1:
        raise ValueError(f"scale has shape {tuple(scale.shape)}: one number is wanted")
    if scale.dtype not in (torch.float32, weight.dtype):
        raise TypeError(f"scale is {scale.dtype}: torch.float32 or {weight.dtype} is wanted")
    unknown = [output for output in outputs if output not in get_args(CodeFormat)]
    if unknown or len(set(outputs)) != len(outputs):
        raise ValueError(
            f"outputs is {tuple(outputs)}: each of {get_args(CodeFormat)} at most once"
        )
    n, k = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    results: dict[CodeFormat, Tensor] = {output: _empty(output, weight) for output in outputs}
    if weight.numel() > 0:
        with torch.cuda.device_of(weight):
            _ternarize_kernel[triton.cdiv(n, ROWS), triton.cdiv(k, COLUMNS.value)](
                weight,
                scale,
                *(results.get(output) for output in get_args(CodeFormat)),
                n,
                k,
                weight.stride(0),
                triton.cdiv(k, 4),
                ROWS,
                num_warps=4,
            )
    return tuple(results.values())


@triton.jit
def _ternarize_kernel(
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    int8_ptr: tl.tensor,
    bf16_ptr: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    stride: tl.tensor,
    packed_stride: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    block = tl.program_id(1)
    columns = (block * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (rows < N) & (columns < K)
    weight = tl.load(weight_ptr + rows * stride + columns, mask=inside, other=0.0).to(tl.float32)
    half = tl.load(scale_ptr).to(tl.float32) * 0.5
    codes = (weight > half).to(tl.int32) - (weight < -half).to(tl.int32)
    if int8_ptr is not None:
        tl.store(int8_ptr + rows * K + columns, codes.to(tl.int8), mask=inside)
    if bf16_ptr is not None:
        tl.store(bf16_ptr + rows * K + columns, codes.to(tl.float32).to(tl.bfloat16), mask=inside)
    QUARTER: tl.constexpr = COLUMNS // 4
    shifts = 2 * tl.arange(0, 4)
    digits = codes + 1  # 1, which is w = 0, beyond the end of a row
    bytes_ = (block * QUARTER + tl.arange(0, QUARTER))[None, :]
    if packed_ptr is not None:
        neighbours = tl.reshape(digits, (ROWS, QUARTER, 4)) << shifts[None, None, :]
        packed = tl.sum(neighbours, 2).to(tl.uint8)
        inside = (rows < N) & (bytes_ < packed_stride)
        tl.store(packed_ptr + rows * packed_stride + bytes_, packed, mask=inside)
    if planes_ptr is not None:
        apart = tl.reshape(digits, (ROWS, 4, QUARTER)) << shifts[None, :, None]
        planes = tl.sum(apart, 1).to(tl.uint8)
        planes_stride = tl.num_programs(1) * QUARTER
        tl.store(planes_ptr + rows * planes_stride + bytes_, planes, mask=rows < N)


def _empty(output: CodeFormat, weight: Tensor) -> Tensor:
    n, k = weight.shape
    shape = {"planes": (n, 64 * triton.cdiv(k, 256)), "packed": (n, triton.cdiv(k, 4))}
    dtype = {"int8": torch.int8, "bf16": torch.bfloat16}
    return torch.empty(
        shape.get(output, (n, k)), dtype=dtype.get(output, torch.uint8), device=weight.device
    )


def compile_specs() -> tuple[CompileSpec, ...]:
    """Both dtypes; codes for inference, for storage and for training."""
    return tuple(
        spec
        for dtype in FLOATS.values()
        for spec in (
            _ternarize_spec(dtype, ("planes",)),
            _ternarize_spec(dtype, ("packed",)),
            _ternarize_spec(dtype, ("int8", "bf16")),
        )
    )


def _ternarize_spec(dtype: str, outputs: Sequence[CodeFormat]) -> CompileSpec:
    pointers = {"planes": "*u8", "packed": "*u8", "int8": "*i8", "bf16": "*bf16"}
    return CompileSpec(
        name=f"ternarize {dtype[1:]} to {'+'.join(outputs)}",
        kernel=_ternarize_kernel,
        signature={
            "weight_ptr": dtype,
            "scale_ptr": "*fp32",
            **{f"{output}_ptr": pointers[output] for output in outputs},
            "N": "i32",
            "K": "i32",
            "stride": "i32",
            "packed_stride": "i32",
        },
        constants={
            **{f"{output}_ptr": None for output in pointers if output not in outputs},
            "ROWS": ROWS,
        },
        num_warps=4,
        num_stages=1,
        tensor_cores=None,
        aligned=("K", "stride", "packed_stride"),
    )
