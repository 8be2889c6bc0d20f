"""RMSNorm and quantization of each token in one kernel, of a tensor or of a gated linear unit.

``y = (x · gain) · rstd`` as in ``numerics.rms_norm``, then ``numerics.quantize_activation``. Since
rounding is monotonic, max|y| is ``max|x · gain| · rstd``: one pass over x finds both statistics, a
second one writes the codes. y itself is never stored. As in ``quantize``, one program has one
token, and its first block of columns stays in registers between the passes.

rstd = 1 / √(mean x² + eps) alone may differ from the definition's, in its last bit: Σx² is added up
in another order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.triton.arithmetic import is_interpreted, rounded
from megabit_kernels.triton.compile_spec import CompileSpec
from megabit_kernels.triton.gated import gated_linear_unit
from megabit_kernels.triton.launch import check_float, on_one_device
from megabit_kernels.triton.limits import FLOATS
from megabit_kernels.triton.quantize import (
    MAX_BLOCK,
    Quantized,
    activation_scale,
    as_rows,
    block_of,
    empty_result,
    largest_magnitude,
    load_columns,
    magnitude_bits,
    store_codes,
)

_PER_THREAD = 8
"""16 bytes of bf16. With more of them, a thread that holds three inputs needs over 64 registers."""


def rms_norm_quantize(x: Tensor, gain: Tensor, eps: float) -> Quantized:
    """``quantize_activation(rms_norm(x, gain, eps))``.

    Args:
        x: fp32 or bf16 ``[M, K]``, K ≤ 131,072.
        gain: fp32 or bf16 ``[K]``.
    """
    return _norm_quantize(as_rows("x", x), None, gain, eps, None)


def glu_rms_norm_quantize(
    gate: Tensor, up: Tensor, gain: Tensor, eps: float, activation: str
) -> Quantized:
    """``rms_norm_quantize(act(gate) · up, gain, eps)``.

    Args:
        gate, up: of one dtype, fp32 or bf16; ``[M, K]``, K ≤ 131,072.
        gain: fp32 or bf16 ``[K]``.
        activation: ``relu2`` or ``silu``.
    """
    if activation not in ("relu2", "silu"):
        raise ValueError(f"activation is {activation!r}: relu2 or silu is wanted")
    gate, up = as_rows("gate", gate), as_rows("up", up)
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(
            f"up is {up.dtype} {tuple(up.shape)}: as gate, {gate.dtype} {tuple(gate.shape)}"
        )
    return _norm_quantize(gate, up, gain, eps, activation)


def _norm_quantize(
    x: Tensor, up: Tensor | None, gain: Tensor, eps: float, activation: str | None
) -> Quantized:
    on_one_device(x=x, up=up, gain=gain)
    m, k = x.shape
    check_float("gain", gain)
    if gain.shape != (k,):
        raise ValueError(f"gain has shape {tuple(gain.shape)}: [{k}] is wanted")
    result = empty_result(x)
    if m > 0:
        block, num_warps = block_of(k, _PER_THREAD)
        with torch.cuda.device_of(x):
            _norm_quantize_kernel[(m,)](
                x,
                up,
                gain.contiguous(),
                *result,
                eps,
                k,
                x.stride(0),
                0 if up is None else up.stride(0),
                activation,
                block,
                is_interpreted(),
                num_warps=num_warps,
            )
    return result


@triton.jit
def _norm_quantize_kernel(
    x_ptr: tl.tensor,
    up_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    x_q_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    eps: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    up_stride: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """With an ``ACTIVATION``, ``x_ptr`` is the gate of a unit that makes x."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    if ACTIVATION is not None:
        up_ptr += row * up_stride
    x_q_ptr += row * K
    columns = tl.arange(0, BLOCK)
    x = _load_input(x_ptr, up_ptr, columns, K, ACTIVATION, INTERPRETED)
    scaled = x * load_columns(gain_ptr, columns, K)
    squares = x * x
    largest = magnitude_bits(scaled)
    for start in range(BLOCK, K, BLOCK):
        x = _load_input(x_ptr, up_ptr, start + columns, K, ACTIVATION, INTERPRETED)
        squares += x * x
        more = magnitude_bits(x * load_columns(gain_ptr, start + columns, K))
        largest = tl.maximum(largest, more)
    # A token of no columns has scale 1e-5/127, as anywhere else.
    mean = tl.div_rn(tl.sum(squares), tl.maximum(K, 1).to(tl.float32))
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    scale, inverse = activation_scale(
        rounded(largest_magnitude(largest) * rstd, dtype, INTERPRETED)
    )
    y = rounded(scaled * rstd, dtype, INTERPRETED)
    store_codes(x_q_ptr, y, scale, inverse, columns, K, INTERPRETED)
    for start in range(BLOCK, K, BLOCK):
        x = _load_input(x_ptr, up_ptr, start + columns, K, ACTIVATION, INTERPRETED)
        y = rounded((x * load_columns(gain_ptr, start + columns, K)) * rstd, dtype, INTERPRETED)
        store_codes(x_q_ptr, y, scale, inverse, start + columns, K, INTERPRETED)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _load_input(
    x_ptr: tl.tensor,
    up_ptr: tl.tensor,
    columns: tl.tensor,
    K: tl.tensor,
    ACTIVATION: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    x = load_columns(x_ptr, columns, K)
    if ACTIVATION is not None:
        up = load_columns(up_ptr, columns, K)
        x = gated_linear_unit(x, up, ACTIVATION, x_ptr.dtype.element_ty, INTERPRETED)
    return x


def compile_specs() -> tuple[CompileSpec, ...]:
    """Plain and gated, both dtypes."""
    return tuple(
        _compile_spec(dtype, activation)
        for activation in (None, "relu2", "silu")
        for dtype in FLOATS.values()
    )


def _compile_spec(dtype: str, activation: str | None) -> CompileSpec:
    gated = activation is not None
    block, num_warps = block_of(MAX_BLOCK, _PER_THREAD)
    return CompileSpec(
        name=f"{f'{activation}_glu_' if activation else ''}rms_norm_quantize {dtype[1:]}",
        kernel=_norm_quantize_kernel,
        signature={
            "x_ptr": dtype,
            **({"up_ptr": dtype} if gated else {}),
            "gain_ptr": "*fp32",
            "x_q_ptr": "*i8",
            "scale_ptr": "*fp32",
            "eps": "fp32",
            "K": "i32",
            "x_stride": "i32",
            "up_stride": "i32",
        },
        constants={
            **({} if gated else {"up_ptr": None}),
            "ACTIVATION": activation,
            "BLOCK": block,
            "INTERPRETED": False,
        },
        num_warps=num_warps,
        num_stages=1,
        tensor_cores=None,
        aligned=("K", "x_stride", "up_stride"),
    )
