"""Attention over pages of keys and values, with bits that depend on nothing but the sequence.

One program has 16 rows: query heads that share a KV head, of one token or of some that follow each
other in a sequence. It goes over the keys from the first one on, in blocks of a size that depends
on the head dimension and the dtypes alone, with a running maximum and a running sum of exponentials
("Online normalizer calculation for softmax", arXiv 1805.02867). Pages only say where a key lies.

A row's bits are the same however a prompt is cut, and whatever else is in the call:

- rows do not meet: a matrix instruction computes each element from its own row and column, and
  all calls have the same tile and the same compilation (what varies between calls is not
  specialised for), so each row goes through the same instructions, with the same tree for its
  maximum and its sum, in whichever row of the tile it is;
- the order of the keys is fixed, and no context is split over programs;
- keys that other rows of the tile see, but this one doesn't, do nothing: their score is −∞, their
  exponential +0, the maximum and its correction factor 1 stay, and what is added is +0 or −0.

Keys and values that are not finite stay with the rows that see them: such a row is NaN. For that,
values that are not finite are taken out before the product, where 0 · ∞ would be NaN for all rows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.paged import KVPages
from megabit_kernels.triton.arithmetic import dot, is_interpreted, rounded
from megabit_kernels.triton.compile_spec import CompileSpec
from megabit_kernels.triton.launch import on_one_device, shaped
from megabit_kernels.triton.limits import MAX_HEAD_DIM, OUTPUTS, PAGES

ROWS = 16
"""Rows of a program: the fewest that tensor cores take."""
DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WARPS = 8
_STAGES = 3


def paged_attention(
    q: Tensor,
    pages: KVPages,
    kv_of_query: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """Causal attention of the last tokens of some sequences; scores are scaled by 1/√D.

    bf16 and fp16 are multiplied by tensor cores, with softmax weights rounded to that dtype; fp32,
    and what mixes two of the three, as fp32. Sums, maxima and exponentials are fp32.

    Args:
        q: fp32, bf16 or fp16 ``[T, heads, D]``, D ≤ 256.
        pages: fp32, bf16, fp16 or int8.
        kv_of_query: int32 ``[heads]``, the KV head of each query head.
        block_tables: int32 ``[n, most blocks]``, the pages of each sequence in order.
        query_starts: int32 ``[n + 1]``, the first row of q of each sequence, and T.
        context_lengths: int32 ``[n]``, tokens of each sequence; its queries are the last ones.

    Returns:
        ``[T, heads, D]``, in the dtype of q.
    """
    t, heads, d = q.shape
    n = len(context_lengths)
    if d != pages.head_dim or not 1 <= d <= MAX_HEAD_DIM:
        raise ValueError(
            f"q has D = {d}: that of the pages, {pages.head_dim}, up to {MAX_HEAD_DIM}, is wanted"
        )
    if q.dtype not in OUTPUTS:
        raise TypeError(f"q is {q.dtype}: {' or '.join(map(str, OUTPUTS))} is wanted")
    if pages.dtype not in PAGES:
        raise TypeError(f"pages are {pages.dtype}: {' or '.join(map(str, PAGES))} is wanted")
    on_one_device(q=q, pages=pages.keys, block_tables=block_tables, query_starts=query_starts)
    q = q if q.stride(2) == 1 else q.contiguous()
    block_tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    dtype = _multiplied(q.dtype, pages.dtype)
    out = torch.empty(t, heads, d, dtype=q.dtype, device=q.device)
    if t == 0 or n == 0:
        return out
    with torch.cuda.device_of(q):
        # A sequence of r rows has r // ROWS + 1 programs at most; so many of any KV head's rows.
        _paged_attention_kernel[(t * heads // ROWS + n, pages.kv_heads)](
            q,
            pages.keys,
            pages.values,
            pages.key_scale,
            pages.value_scale,
            shaped("kv_of_query", kv_of_query, heads),
            block_tables,
            shaped("query_starts", query_starts, n + 1),
            context_lengths.contiguous(),
            out,
            math.log2(math.e) / math.sqrt(d),
            n,
            block_tables.stride(0),
            q.stride(0),
            q.stride(1),
            heads,
            pages.kv_heads,
            d,
            pages.block_size,
            triton.next_power_of_2(heads),
            ROWS,
            _keys_at_once(d, dtype),
            max(triton.next_power_of_2(d), 16),
            DOT[dtype],
            is_interpreted(),
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return out


@triton.jit(do_not_specialize=["n", "table_stride"])
def _paged_attention_kernel(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    kv_of_query_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale: tl.tensor,
    n: tl.tensor,
    table_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """``ROWS`` rows of one KV head; a row is a query head of a token.

    ``scale`` includes log2(e): exponentials are powers of two.
    """
    kv_head = tl.program_id(1)
    heads = tl.arange(0, HEADS_BLOCK)
    is_mine = tl.load(kv_of_query_ptr + heads, mask=heads < HEADS, other=-1) == kv_head
    number = tl.cumsum(is_mine.to(tl.int32), 0) - 1
    shared = tl.sum(is_mine.to(tl.int32))
    if shared == 0:
        return
    tile = tl.program_id(0)
    sequence = _sequence_of(tile, query_starts_ptr, n, shared, ROWS)
    first = tl.load(query_starts_ptr + sequence)
    queries = tl.load(query_starts_ptr + sequence + 1) - first
    first_row = (tile - (first * shared // ROWS + sequence)) * ROWS
    if first_row >= queries * shared:
        return
    row = first_row + tl.arange(0, ROWS)
    is_row = row < queries * shared
    token = row // shared
    is_head = is_mine[None, :] & (number[None, :] == (row % shared)[:, None])
    head = tl.sum(tl.where(is_head, heads[None, :], 0), 1)
    position = tl.load(contexts_ptr + sequence) - queries + token

    d = tl.arange(0, D_BLOCK)
    is_d = d < D
    at_q = q_ptr + (first + token).to(tl.int64)[:, None] * token_stride
    at_q += head[:, None] * head_stride + d[None, :]
    q = tl.load(at_q, mask=is_row[:, None] & is_d[None, :], other=0.0)
    q = _widened(q, OPERAND, INTERPRETED)

    end = tl.max(tl.where(is_row, position + 1, 0))
    tables_ptr += sequence.to(tl.int64) * table_stride
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D_BLOCK), tl.float32)
    for start in range(0, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < end
        page = tl.load(tables_ptr + key // PAGE, mask=is_key, other=0).to(tl.int64)
        page = page * KV_HEADS + kv_head
        inside = key % PAGE
        at_k = keys_ptr + (page * (D * PAGE) + inside)[None, :] + d[:, None] * PAGE
        k = tl.load(at_k, mask=is_d[:, None] & is_key[None, :], other=0)
        k = _widened(k, OPERAND, INTERPRETED)
        scores = dot(q, k, tl.zeros((ROWS, KEYS), tl.float32), INTERPRETED) * scale
        if key_scale_ptr is not None:
            at_scale = page * PAGE + inside
            scores *= tl.load(key_scale_ptr + at_scale, mask=is_key, other=0.0)[None, :]
        is_seen = key[None, :] <= position[:, None]
        scores = tl.where(is_seen, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        # While there are only scores of −∞, which have no difference: take them relative to 0.
        reference = tl.where(larger == -float("inf"), 0.0, larger)
        correction = tl.exp2(largest - reference)
        weights = tl.exp2(scores - reference[:, None])
        total = total * correction + tl.sum(weights, 1)
        largest = larger

        at_v = values_ptr + (page * (PAGE * D) + inside * D)[:, None] + d[None, :]
        v = tl.load(at_v, mask=is_key[:, None] & is_d[None, :], other=0)
        if value_scale_ptr is not None:
            value_scale = tl.load(value_scale_ptr + at_scale, mask=is_key, other=0.0)
            weights = tl.where(is_seen, weights * value_scale[None, :], 0.0)
        else:
            is_finite = tl.abs(v.to(tl.float32)) < float("inf")
            v = tl.where(is_finite, v, 0.0)
            is_bad = tl.max(tl.where(is_finite, 0, 1), 1) > 0
            sees_bad = tl.max(tl.where(is_seen & is_bad[None, :], 1, 0), 1) > 0
            total = tl.where(sees_bad, float("nan"), total)
        weights = rounded(weights, OPERAND, INTERPRETED).to(OPERAND)
        v = _widened(v, OPERAND, INTERPRETED)
        acc = dot(weights, v, acc * correction[:, None], INTERPRETED)

    result = rounded(acc / total[:, None], out_ptr.dtype.element_ty, INTERPRETED)
    at = out_ptr + (first + token).to(tl.int64)[:, None] * (HEADS * D)
    at += head[:, None] * D + d[None, :]
    result = result.to(out_ptr.dtype.element_ty)
    tl.store(at, result, mask=is_row[:, None] & is_d[None, :])


@triton.jit
def _widened(x: tl.tensor, dtype: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """``x`` in a dtype that has all its values."""
    if INTERPRETED:  # which does not know int8 to bf16
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def _sequence_of(
    tile: tl.tensor,
    query_starts_ptr: tl.tensor,
    n: tl.tensor,
    shared: tl.tensor,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """The sequence of the ``tile``-th program of a KV head, by bisection.

    That of sequence i begins at ``query_starts[i] · shared // ROWS + i``: before the one of i + 1
    there is room for all rows of i.
    """
    low = tile * 0
    high = n
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_starts_ptr + middle) * shared // ROWS + middle
        if begins <= tile:
            low = middle
        else:
            high = middle
    return low


def _multiplied(q: torch.dtype, pages: torch.dtype) -> torch.dtype:
    """What both are exact in; int8 is in any."""
    return q if pages in (q, torch.int8) else torch.float32


def _keys_at_once(d: int, dtype: torch.dtype) -> int:
    """As many as fill 8 KiB, 16 to 64. With more, registers spill."""
    row = max(triton.next_power_of_2(d), 16) * dtype.itemsize
    return min(max(8 * 1024 // row, 16), 64)


def compile_specs() -> tuple[CompileSpec, ...]:
    """Each dtype of pages, and the narrowest and the widest heads."""
    return (
        _spec("bf16", torch.bfloat16, torch.bfloat16, 128),
        _spec("fp16", torch.float16, torch.float16, 128),
        _spec("int8 pages", torch.bfloat16, torch.int8, 128),
        _spec("fp32", torch.float32, torch.float32, 128),
        _spec("fp32, int8 pages", torch.float32, torch.int8, 64),
        _spec("bf16, D = 32", torch.bfloat16, torch.bfloat16, 32),
        _spec("bf16, D = 80", torch.bfloat16, torch.bfloat16, 80),
        _spec("bf16, D = 256", torch.bfloat16, torch.bfloat16, 256),
        _spec("fp32, D = 256", torch.float32, torch.float32, 256),
    )


def _spec(which: str, q: torch.dtype, pages: torch.dtype, d: int) -> CompileSpec:
    scaled = pages == torch.int8
    dtype = _multiplied(q, pages)
    floating, page = OUTPUTS[q], PAGES[pages]
    scales = ("key_scale_ptr", "value_scale_ptr")
    return CompileSpec(
        name=f"paged_attention, {which}",
        kernel=_paged_attention_kernel,
        signature={
            "q_ptr": floating,
            "keys_ptr": page,
            "values_ptr": page,
            **(dict.fromkeys(scales, "*fp32") if scaled else {}),
            **dict.fromkeys(("kv_of_query_ptr", "tables_ptr"), "*i32"),
            **dict.fromkeys(("query_starts_ptr", "contexts_ptr"), "*i32"),
            "out_ptr": floating,
            "scale": "fp32",
            **dict.fromkeys(("n", "table_stride", "token_stride", "head_stride"), "i32"),
        },
        constants={
            **({} if scaled else dict.fromkeys(scales)),
            "HEADS": 20,
            "KV_HEADS": 5,
            "D": d,
            "PAGE": 16,
            "HEADS_BLOCK": 32,
            "ROWS": ROWS,
            "KEYS": _keys_at_once(d, dtype),
            "D_BLOCK": max(triton.next_power_of_2(d), 16),
            "OPERAND": DOT[dtype],
            "INTERPRETED": False,
        },
        num_warps=_WARPS,
        num_stages=_STAGES,
        tensor_cores=None if dtype == torch.float32 else "bf16",
        aligned=("token_stride", "head_stride"),
    )
