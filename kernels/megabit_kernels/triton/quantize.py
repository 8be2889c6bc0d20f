"""Activations to int8 with one scale for each token, and what other kernels quantize with.

One program has one token. A first pass over the columns finds max|x|, a second one writes the
codes. The first block of columns stays in registers in between; only what a row has
beyond it is read again, out of a cache. The codes are those of ``numerics.quantize_activation``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels import numerics
from megabit_kernels.triton.arithmetic import fma, is_interpreted
from megabit_kernels.triton.compile_spec import CompileSpec
from megabit_kernels.triton.launch import check_float, on_one_device
from megabit_kernels.triton.limits import FLOATS

_MIN_SCALE = tl.constexpr(numerics.MIN_SCALE)
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""Between 2^23 and 2^24 the fp32 numbers are the integers: adding this rounds, ties to even."""
_ROUNDER_BITS = tl.constexpr(0x4B400000)

MAX_BLOCK = 4096
"""Columns of a token that stay in registers."""
_PER_THREAD = 16


class Quantized(NamedTuple):
    """Activations as integer products take them."""

    x_q: Tensor
    """int8 ``[M, K]``"""
    scale: Tensor
    """s, fp32 ``[M, 1]``"""


def quantize_activation(x: Tensor, absmax: Tensor | None = None) -> Quantized:
    """``numerics.quantize_activation`` under ``numerics.activation_scale``, the same bits.

    Args:
        x: fp32 or bf16 ``[M, K]``, K ≤ 131,072.
        absmax: fp32 ``[M, 1]``, max|x| of each token where the caller knows it: of a token that
            spans ranks, or from a norm. None takes that of ``x``.
    """
    x = as_rows("x", x)
    on_one_device(x=x, absmax=absmax)
    m, k = x.shape
    if absmax is not None:
        if absmax.dtype != torch.float32:
            raise TypeError(f"absmax is {absmax.dtype}: torch.float32 is wanted")
        if absmax.shape != (m, 1):
            raise ValueError(f"absmax has shape {tuple(absmax.shape)}: [{m}, 1] is wanted")
        absmax = absmax.contiguous()
    result = empty_result(x)
    if m > 0:
        block, num_warps = block_of(k, _PER_THREAD)
        with torch.cuda.device_of(x):
            _quantize_kernel[(m,)](
                x, absmax, *result, k, x.stride(0), block, is_interpreted(), num_warps=num_warps
            )
    return result


@triton.jit
def _quantize_kernel(
    x_ptr: tl.tensor,
    absmax_ptr: tl.tensor,
    x_q_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    x_q_ptr += row * K
    columns = tl.arange(0, BLOCK)
    x = load_columns(x_ptr, columns, K)
    if absmax_ptr is None:
        largest = magnitude_bits(x)
        for start in range(BLOCK, K, BLOCK):
            more = magnitude_bits(load_columns(x_ptr, start + columns, K))
            largest = tl.maximum(largest, more)
        absmax = largest_magnitude(largest)
    else:
        absmax = tl.load(absmax_ptr + row)
    scale, inverse = activation_scale(absmax)
    store_codes(x_q_ptr, x, scale, inverse, columns, K, INTERPRETED)
    for start in range(BLOCK, K, BLOCK):
        x = load_columns(x_ptr, start + columns, K)
        store_codes(x_q_ptr, x, scale, inverse, start + columns, K, INTERPRETED)
    tl.store(scale_ptr + row, scale)


@triton.jit
def load_columns(row_ptr: tl.tensor, columns: tl.tensor, K: tl.tensor) -> tl.tensor:
    """Values of a row in fp32, zeros beyond its end."""
    return tl.load(row_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """|x| as an integer: the same order, with NaN, which a maximum of floats drops, on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_magnitude(bits: tl.tensor) -> tl.tensor:
    return tl.max(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def activation_scale(absmax: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """s and 1/s; a NaN stays one."""
    scale = tl.div_rn(tl.where(absmax < _MIN_SCALE, _MIN_SCALE, absmax), 127.0)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def store_codes(
    x_q_ptr: tl.tensor,
    x: tl.tensor,
    scale: tl.tensor,
    inverse: tl.tensor,
    columns: tl.tensor,
    K: tl.tensor,
    INTERPRETED: tl.constexpr,
) -> None:
    """Quantizes and stores some columns of a token."""
    codes = _quantize(x, scale, inverse, INTERPRETED)
    tl.store(x_q_ptr + columns, codes.to(tl.int8), mask=columns < K)


@triton.jit
def _quantize(
    x: tl.tensor, scale: tl.tensor, inverse: tl.tensor, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """clamp(round(x/s), −128, 127), and 0 where x/s is NaN.

    The quotient is that of IEEE division: x · (1/s) and one correction by its exact remainder
    (Markstein 1990), three instructions in place of about ten. A search over all significands of s
    and the seven x around each half-integer quotient, where the code changes, found no exception.
    """
    # Clamped before the division, so that the quotient stays finite.
    x = tl.clamp(x, -128.0 * scale, 127.0 * scale, propagate_nan=tl.PropagateNan.ALL)
    estimate = x * inverse
    remainder = fma(-estimate, scale, x, INTERPRETED)
    quotient = fma(remainder, inverse, estimate, INTERPRETED)
    return tl.where(quotient == quotient, nearest_integer(quotient), 0)


@triton.jit
def nearest_integer(x: tl.tensor) -> tl.tensor:
    """int32, ties to even, of fp32 numbers below 2^22."""
    return (x + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS


def as_rows(name: str, x: Tensor) -> Tensor:
    """``x [M, K]``, checked, with neighbouring columns side by side; rows may lie apart."""
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: [M, K] is wanted")
    check_float(name, x)
    if x.shape[1] > numerics.MAX_EXACT_K:
        limit = numerics.MAX_EXACT_K
        raise ValueError(f"{name} has K = {x.shape[1]}: products are exact up to K = {limit}")
    return x if x.stride(1) == 1 else x.contiguous()


def empty_result(x: Tensor) -> Quantized:
    return Quantized(
        torch.empty(x.shape, dtype=torch.int8, device=x.device),
        torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device),
    )


def block_of(k: int, per_thread: int) -> tuple[int, int]:
    """Columns of a block for rows of ``k``, and warps of which each thread has ``per_thread``."""
    block = min(max(triton.next_power_of_2(k), 128), MAX_BLOCK)
    return block, max(block // (32 * per_thread), 1)


def compile_specs() -> tuple[CompileSpec, ...]:
    """Both dtypes, with and without a given absmax."""
    return tuple(
        _compile_spec(dtype, absmax) for dtype in FLOATS.values() for absmax in (False, True)
    )


def _compile_spec(dtype: str, absmax: bool) -> CompileSpec:
    block, num_warps = block_of(MAX_BLOCK, _PER_THREAD)
    return CompileSpec(
        name=f"quantize {dtype[1:]}{' by absmax' if absmax else ''}",
        kernel=_quantize_kernel,
        signature={
            "x_ptr": dtype,
            **({"absmax_ptr": "*fp32"} if absmax else {}),
            "x_q_ptr": "*i8",
            "scale_ptr": "*fp32",
            "K": "i32",
            "x_stride": "i32",
        },
        constants={
            **({} if absmax else {"absmax_ptr": None}),
            "BLOCK": block,
            "INTERPRETED": False,
        },
        num_warps=num_warps,
        num_stages=1,
        tensor_cores=None,
        aligned=("K", "x_stride"),
    )
