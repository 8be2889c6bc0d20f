"""Keys and values of new tokens into the pages of a cache, rounded or quantized on the way.

One program has one token and one KV head. The result has the bits of ``plain_attention``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.paged import KVPages
from megabit_kernels.triton.arithmetic import is_interpreted, rounded
from megabit_kernels.triton.compile_spec import CompileSpec
from megabit_kernels.triton.launch import on_one_device
from megabit_kernels.triton.limits import OUTPUTS, PAGES
from megabit_kernels.triton.quantize import largest_magnitude, magnitude_bits, nearest_integer


def write_pages(pages: KVPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Puts ``k`` and ``v`` where ``slots`` says.

    Args:
        pages: fp32, bf16, fp16 or int8.
        k, v: fp32, bf16 or fp16 ``[T, KV heads, D]``.
        slots: int64 ``[T]``, ``block · block_size + offset``, all different.
    """
    shape = (len(slots), pages.kv_heads, pages.head_dim)
    for name, x in (("k", k), ("v", v)):
        if x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: {list(shape)} is wanted")
        if x.dtype not in OUTPUTS:
            raise TypeError(f"{name} is {x.dtype}: {' or '.join(map(str, OUTPUTS))} is wanted")
    if pages.dtype not in PAGES:
        raise TypeError(f"pages are {pages.dtype}: {' or '.join(map(str, PAGES))} is wanted")
    on_one_device(keys=pages.keys, values=pages.values, k=k, v=v, slots=slots)
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    if 0 in shape:
        return
    with torch.cuda.device_of(k):
        _write_pages_kernel[shape[:2]](
            k,
            v,
            slots.contiguous(),
            pages.keys,
            pages.values,
            pages.key_scale,
            pages.value_scale,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            pages.kv_heads,
            pages.head_dim,
            pages.block_size,
            triton.next_power_of_2(pages.head_dim),
            is_interpreted(),
            num_warps=1,
        )


@triton.jit
def _write_pages_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    D_BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    page = slot // PAGE * KV_HEADS + head
    inside = slot % PAGE
    d = tl.arange(0, D_BLOCK)
    at_k = k_ptr + token * k_token + head * k_head
    at_v = v_ptr + token * v_token + head * v_head
    at_keys = keys_ptr + page * (D * PAGE) + inside
    at_values = values_ptr + page * (PAGE * D) + inside * D
    if key_scale_ptr is not None:
        at_scale = page * PAGE + inside
        _quantize(at_k, at_keys + d * PAGE, key_scale_ptr + at_scale, d, D)
        _quantize(at_v, at_values + d, value_scale_ptr + at_scale, d, D)
    else:
        _round(at_k, at_keys + d * PAGE, d, D, INTERPRETED)
        _round(at_v, at_values + d, d, D, INTERPRETED)


@triton.jit
def _round(
    x_ptr: tl.tensor, at: tl.tensor, d: tl.tensor, D: tl.constexpr, INTERPRETED: tl.constexpr
) -> None:
    dtype: tl.constexpr = at.dtype.element_ty
    x = tl.load(x_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(at, rounded(x, dtype, INTERPRETED).to(dtype), mask=d < D)


@triton.jit
def _quantize(
    x_ptr: tl.tensor, at: tl.tensor, scale_ptr: tl.tensor, d: tl.tensor, D: tl.constexpr
) -> None:
    """``plain_attention.quantize_heads`` of one token's head."""
    x = tl.load(x_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    scale = tl.div_rn(largest_magnitude(magnitude_bits(x)), 127.0)
    quotient = tl.div_rn(x, tl.zeros_like(x) + scale)
    quotient = tl.where(quotient == quotient, tl.clamp(quotient, -127.0, 127.0), 0.0)
    tl.store(at, nearest_integer(quotient).to(tl.int8), mask=d < D)
    tl.store(scale_ptr, scale)


def compile_specs() -> tuple[CompileSpec, ...]:
    """Pages of floats, and of codes."""
    return (
        _spec("bf16", torch.bfloat16, torch.bfloat16),
        _spec("fp32 to fp16", torch.float32, torch.float16),
        _spec("bf16 to int8", torch.bfloat16, torch.int8),
    )


def _spec(which: str, x: torch.dtype, pages: torch.dtype) -> CompileSpec:
    scaled = pages == torch.int8
    scales = ("key_scale_ptr", "value_scale_ptr")
    return CompileSpec(
        name=f"write_pages, {which}",
        kernel=_write_pages_kernel,
        signature={
            **dict.fromkeys(("k_ptr", "v_ptr"), OUTPUTS[x]),
            "slots_ptr": "*i64",
            **dict.fromkeys(("keys_ptr", "values_ptr"), PAGES[pages]),
            **(dict.fromkeys(scales, "*fp32") if scaled else {}),
            **dict.fromkeys(("k_token", "k_head", "v_token", "v_head"), "i32"),
        },
        constants={
            **({} if scaled else dict.fromkeys(scales)),
            "KV_HEADS": 5,
            "D": 128,
            "PAGE": 16,
            "D_BLOCK": 128,
            "INTERPRETED": False,
        },
        num_warps=1,
        num_stages=1,
        tensor_cores=None,
        aligned=("k_token", "k_head", "v_token", "v_head"),
    )
