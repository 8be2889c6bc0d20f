"""The native kernels of paged attention and of the dense product, on torch tensors of the CPU.

They check what the C library would trust: that numbers of pages, lengths and heads are in range.
"""

import ctypes
import math

import torch
from torch import Tensor

from megabit_kernels.native import NativeLibrary
from megabit_kernels.native_abi import TYPES, Pages
from megabit_kernels.native_arguments import check, check_one_of, matrix
from megabit_kernels.paged import KVPages

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PAGES = (*FLOATS, torch.int8)


def takes(*tensors: Tensor) -> bool:
    """Whether all are of types that the library computes with."""
    return all(tensor.dtype in PAGES for tensor in tensors)


def write_pages(
    library: NativeLibrary,
    pages: KVPages,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    isa: str | None = None,
) -> None:
    """``plain_attention.write_pages``, with its bits.

    Raises:
        ValueError: a slot is not one of ``pages``; nothing is written then.
    """
    check_one_of("k.dtype", k.dtype, FLOATS)
    check("slots", slots, torch.int64)
    shape = (slots.numel(), pages.kv_heads, pages.head_dim)
    k, v, slots = _shaped("k", k, shape), _shaped("v", v, shape), slots.contiguous()
    if v.dtype != k.dtype:
        raise TypeError(f"v is {v.dtype}; it must be {k.dtype}, as k is")
    described = _described(pages)
    operands = ctypes.addressof(described), k.data_ptr(), v.data_ptr(), TYPES[k.dtype]
    try:
        library.c.run("write_pages", isa, *operands, slots.data_ptr(), slots.numel())
    except ValueError:
        most = pages.blocks * pages.block_size - 1
        raise ValueError(f"slots are {slots.tolist()}; each must be 0 to {most}") from None


def paged_attention(
    library: NativeLibrary,
    q: Tensor,
    pages: KVPages,
    kv_of_query: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    isa: str | None = None,
    statistics: Tensor | None = None,
) -> Tensor:
    """``attention.paged_attention``: fp32 sums, each in an order that floats.h defines.

    Args:
        statistics: contiguous fp32 ``[T, heads, 2]``, to which each row's largest score m is
            written, and Σ e^(score − m).

    Raises:
        ValueError: a page, head, length or row is not there.
    """
    check_one_of("q.dtype", q.dtype, FLOATS)
    tokens, heads, sequences = q.shape[0], q.shape[1], context_lengths.numel()
    q = _shaped("q", q, (tokens, heads, pages.head_dim))
    tables = matrix("block_tables", block_tables, torch.int32)
    numbers = [("kv_of_query", kv_of_query), ("query_starts", query_starts)]
    for name, x in (*numbers, ("context_lengths", context_lengths)):
        check(name, x, torch.int32)
    if kv_of_query.numel() != heads or query_starts.numel() != sequences + 1:
        raise ValueError(
            f"kv_of_query has {kv_of_query.numel()} numbers and query_starts "
            f"{query_starts.numel()}; for {heads} heads and {sequences} sequences it is "
            f"{heads} and {sequences + 1}"
        )
    if tables.shape[0] != sequences:
        raise ValueError(f"block_tables has {tables.shape[0]} rows; it must be {sequences}")
    out, described = torch.empty_like(q), _described(pages)
    kv_of_query, query_starts = kv_of_query.contiguous(), query_starts.contiguous()
    context_lengths = context_lengths.contiguous()
    try:
        library.c.run(
            "paged_attention",
            isa,
            q.data_ptr(),
            TYPES[q.dtype],
            ctypes.addressof(described),
            kv_of_query.data_ptr(),
            tokens,
            heads,
            tables.data_ptr(),
            tables.shape[1],
            query_starts.data_ptr(),
            context_lengths.data_ptr(),
            sequences,
            1 / math.sqrt(pages.head_dim),
            out.data_ptr(),
            None if statistics is None else statistics.data_ptr(),
        )
    except ValueError:
        given = kv_of_query, tables, query_starts, context_lengths
        raise ValueError(_problem(tokens, pages, *(x.tolist() for x in given))) from None
    return out


def dense_linear(
    library: NativeLibrary, x: Tensor, weight: Tensor, isa: str | None = None
) -> Tensor:
    """``attention.dense_linear``: fp32 sums in 16 lanes, which are added in one order.

    In bf16, the instruction set ``avx512bf16`` has other lanes than the rest, and takes numbers
    below 2^-126 for zero: bits are those of a machine.
    """
    check_one_of("x.dtype", x.dtype, FLOATS)
    x, weight = matrix("x", x, x.dtype), matrix("weight", weight, x.dtype)
    (m, k), n = x.shape, weight.shape[0]
    if weight.shape[1] != k:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must have {k} columns")
    out = torch.empty((m, n), dtype=x.dtype)
    operands = x.data_ptr(), weight.data_ptr(), out.data_ptr(), TYPES[x.dtype]
    library.c.run("dense_product", isa, *operands, m, n, k)
    return out


def _described(pages: KVPages) -> Pages:
    """``struct megabit_pages``."""
    tensors = pages.keys, pages.values, pages.key_scale, pages.value_scale
    for tensor in tensors:
        if tensor is not None and not (tensor.is_cpu and tensor.is_contiguous()):
            raise ValueError("pages must be contiguous, on the CPU")
    check_one_of("pages.dtype", pages.dtype, PAGES)
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    sizes = pages.blocks, pages.kv_heads, pages.head_dim, pages.block_size
    return Pages(*addresses, *sizes, TYPES[pages.dtype])


def _shaped(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if x.shape != shape or not x.is_cpu:
        raise ValueError(f"{name} is {tuple(x.shape)} on {x.device}; it must be {shape} on the CPU")
    return x.contiguous()


def _problem(
    tokens: int,
    pages: KVPages,
    kv_of_query: list[int],
    block_tables: list[list[int]],
    query_starts: list[int],
    context_lengths: list[int],
) -> str:
    """Which number is out of range."""
    if any(not 0 <= head < pages.kv_heads for head in kv_of_query):
        return f"kv_of_query is {kv_of_query}; there are {pages.kv_heads} KV heads"
    if query_starts[0] != 0 or query_starts[-1] != tokens:
        return f"query_starts is {query_starts}; it must go from 0 to {tokens}"
    for i, length in enumerate(context_lengths):
        queries = query_starts[i + 1] - query_starts[i]
        if not 0 <= queries <= length:
            return f"sequence {i} has {queries} queries and {length} tokens; the first are of those"
        blocks, table = -(-length // pages.block_size), block_tables[i]
        if blocks > len(table):
            return f"sequence {i} has {length} tokens, but only {len(table)} pages in block_tables"
        if any(not 0 <= block < pages.blocks for block in table[:blocks]):
            return f"sequence {i} has the pages {table[:blocks]}; there are {pages.blocks}"
    return "the numbers of sequences changed during the call"
