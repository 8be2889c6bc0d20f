"""Paged attention and the dense product in plain torch: where there is no kernel.

Elementwise operations only, whose results do not depend on the shape of a tensor; sums are taken in
one order. A token's result thus never depends on what else is in the call. Slow.
"""

import math

import torch
from torch import Tensor

from megabit_kernels.numerics import stats_dtype
from megabit_kernels.paged import KVPages

ELEMENTS = 1 << 22
"""Products that are held at a time."""


def write_pages(pages: KVPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """k and v ``[T, KV heads, D]`` to their slots."""
    block, offset = slots // pages.block_size, slots % pages.block_size
    keys = pages.keys.permute(0, 3, 1, 2)  # [blocks, block size, KV heads, D], as the values are
    values = pages.values.transpose(1, 2)
    for pool, scales, x in ((keys, pages.key_scale, k), (values, pages.value_scale, v)):
        if scales is None:
            pool[block, offset] = x.to(pages.dtype)
        else:
            codes, scale = quantize_heads(x)
            pool[block, offset] = codes
            scales.transpose(1, 2)[block, offset] = scale


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [T, heads, D]`` → int8 codes and fp32 scales ``[T, heads]``.

    A head with NaN or ±Inf has that for a scale and codes of zero, so it is NaN when read.
    """
    wide = x.float()
    largest = wide.abs().amax(-1)
    scale = largest / largest.new_full((), 127)  # CUDA would multiply by 1 / 127
    codes = torch.div(wide, scale.unsqueeze(-1)).round_().clamp_(-128, 127)
    return codes.nan_to_num_(0.0).to(torch.int8), scale


def paged_attention(
    q: Tensor,
    pages: KVPages,
    kv_of_query: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """``q [T, heads, D]`` → the same shape and dtype, one sequence after the other."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts, lengths = query_starts.tolist(), context_lengths.tolist()
    for i, length in enumerate(lengths):
        begin, end = starts[i], starts[i + 1]
        if begin == end:
            continue
        table = block_tables[i, : math.ceil(length / pages.block_size)].long()
        keys, values = _context(pages, table, length, stats_dtype(q.dtype))
        keys, values = keys[kv_of_query.long()], values[kv_of_query.long()]
        step = max(1, ELEMENTS // max(1, keys.numel()))
        for first in range(begin, end, step):
            rows = slice(first, min(first + step, end))
            visible = torch.arange(length - end + rows.start, length - end + rows.stop) + 1
            out[rows] = _attend(q[rows], keys, values, visible.to(q.device))
    return out


def _context(
    pages: KVPages, table: Tensor, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[KV heads, context, D]`` of one sequence."""
    keys, values = pages.keys[table].to(dtype).mT, pages.values[table].to(dtype)
    if pages.key_scale is not None and pages.value_scale is not None:
        keys = keys * pages.key_scale[table].to(dtype).unsqueeze(-1)
        values = values * pages.value_scale[table].to(dtype).unsqueeze(-1)
    return keys.transpose(0, 1).flatten(1, 2)[:, :length], values.transpose(0, 1).flatten(1, 2)[
        :, :length
    ]


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """``q [n, heads, D]``, ``[heads, context, D]``; query i sees the first ``visible[i]`` keys."""
    wide = q.to(keys.dtype).transpose(0, 1)  # [heads, n, D]
    scores = _tree_sum(wide.unsqueeze(2) * keys.unsqueeze(1)) * (1 / math.sqrt(q.shape[-1]))
    hidden = torch.arange(keys.shape[1], device=q.device) >= visible.unsqueeze(-1)  # [n, context]
    scores = scores.masked_fill(hidden, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp_().masked_fill_(hidden, 0.0)
    terms = (weights.unsqueeze(-1) * values.unsqueeze(1)).masked_fill_(hidden.unsqueeze(-1), 0.0)
    total = _tree_sum(weights).unsqueeze(-1)
    return (_tree_sum(terms.mT) / total).transpose(0, 1).to(q.dtype)


def _tree_sum(x: Tensor) -> Tensor:
    """Sums over the last dimension, of neighbours, again and again: zeros behind change nothing."""
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(-1)


def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x [T, K]`` × ``weight [N, K]`` → ``[T, N]``: sums over K in order, in the wide dtype."""
    dtype = stats_dtype(x.dtype)
    columns, rows = x.to(dtype).t().contiguous(), weight.to(dtype).t().contiguous()
    total = x.new_zeros(x.shape[0], weight.shape[0], dtype=dtype)
    for column, row in zip(columns, rows, strict=True):
        total += column.unsqueeze(1) * row  # no fused multiply-add, which some elements might get
    return total.to(x.dtype)
