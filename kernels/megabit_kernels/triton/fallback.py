"""The same products by cuBLAS: what our kernels must beat to be chosen.

cuBLAS reads no packed weights, so planes are unpacked first, every time: N · K bytes written and
read, little beside a product with thousands of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from megabit_kernels.epilogue import Epilogue, finish
from megabit_kernels.triton.arithmetic import is_interpreted
from megabit_kernels.triton.compile_spec import CompileSpec
from megabit_kernels.triton.config import TileConfig
from megabit_kernels.triton.launch import launch
from megabit_kernels.triton.unpack import plane_int8, signed_planes
from megabit_kernels.triton.weight_gradient import scale_tokens

_TILE = TileConfig(1, 32, 64)


def int8_product(x_q: Tensor, weight: Tensor, epilogue: Epilogue | None = None) -> Tensor:
    """``int8_gemm`` by ``torch._int_mm``.

    That wants more than 16 rows, and multiples of 8 otherwise; zeros fill up what is missing.
    """
    (m, k), n = x_q.shape, weight.shape[0]
    if 0 in (m, n, k):
        return finish(x_q.new_zeros(m, n, dtype=torch.int32), epilogue)
    x_q = pad(x_q, (0, -k % 8, 0, max(0, 17 - m))).contiguous()
    weight = pad(weight, (0, -k % 8, 0, -n % 8)).contiguous()
    return finish(torch._int_mm(x_q, weight.t())[:m, :n], epilogue)


def packed_product(x_q: Tensor, planes: Tensor, epilogue: Epilogue | None = None) -> Tensor:
    """``packed_gemm`` by ``torch._int_mm`` on unpacked codes."""
    return int8_product(x_q, unpack_planes(planes, x_q.shape[1]), epilogue)


def input_gradient(dy: Tensor, weight: Tensor, k: int, w_scale: Tensor) -> Tensor:
    """``input_gradient`` in bf16 throughout: rounded once more, before the product with γ."""
    codes = unpack_planes(weight, k) if weight.dtype == torch.uint8 else weight
    return torch.mm(dy, codes.to(dy.dtype)).mul_(w_scale)


def weight_gradient(dy: Tensor, x_q: Tensor, x_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight_gradient`` with codes converted to bf16 in memory."""
    scaled, x = scale_tokens(dy, x_scale).t(), x_q.to(dy.dtype)
    if dtype == dy.dtype:
        return torch.mm(scaled, x)
    if not dy.is_cuda:  # the one device where torch gives bf16 products in fp32
        return torch.mm(scaled.to(dtype), x.to(dtype))
    return torch.mm(scaled, x, out_dtype=dtype)


def unpack_planes(planes: Tensor, k: int) -> Tensor:
    """Planes of a weight with ``k`` columns → int8 codes ``[N, k]``."""
    n, width = planes.shape
    codes = planes.new_empty(n, k, dtype=torch.int8)
    grid = (triton.cdiv(n, _TILE.block_n), width // 64)
    launch(
        _unpack_kernel,
        grid,
        planes.contiguous(),
        codes,
        n,
        k,
        width,
        _TILE.block_n,
        not is_interpreted(),
        config=_TILE,
    )
    return codes


@triton.jit
def _unpack_kernel(
    planes_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    width: tl.tensor,
    BN: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    """One block of ``BN`` rows."""
    block = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, 64)
    rows = n.to(tl.int64)[:, None]
    has_n = (n < N)[:, None]
    packed = tl.load(planes_ptr + rows * width + (block * 64 + j)[None, :], mask=has_n, other=0)
    signed = signed_planes(packed, ASM)
    for p in tl.static_range(4):
        k = block * 256 + 64 * p + j
        at = codes_ptr + rows * K + k[None, :]
        tl.store(at, plane_int8(signed, p, ASM) >> 6, mask=has_n & (k < K)[None, :])


def compile_specs() -> tuple[CompileSpec, ...]:
    """The unpacking."""
    return (
        CompileSpec(
            name="unpack_planes",
            kernel=_unpack_kernel,
            signature={
                "planes_ptr": "*u8",
                "codes_ptr": "*i8",
                "N": "i32",
                "K": "i32",
                "width": "i32",
            },
            constants={"BN": _TILE.block_n, "ASM": True},
            num_warps=_TILE.warps,
            num_stages=_TILE.stages,
            tensor_cores=None,
            aligned=("K", "width"),
        ),
    )
