"""Attention over a paged KV cache, and the dense product of the head: for people, on any device.

Both are *invariant*: the bits of a token's result depend on that token and its own context alone.
They do not depend on what else is in the call, on how a prompt was cut into chunks, on which pages
hold it, on the number of heads, rows or threads. So a batch, a prompt in pieces and a forward pass
over whole samples give the same numbers. Another machine, device or implementation may round
otherwise.

Nothing here but ``trained_attention`` has a gradient.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from megabit_kernels import native, native_attention
from megabit_kernels.dispatch import select
from megabit_kernels.paged import FLOAT_PAGES, KVPages

CHUNK = 16
"""Block size of the pages that ``causal_attention`` makes for the call."""


def write_pages(
    pages: KVPages, k: Tensor, v: Tensor, slots: Tensor, implementation: str | None = None
) -> None:
    """Put keys and values into the cache; a float is rounded to the pages' dtype once.

    Args:
        k: ``[T, KV heads, D]`` in fp32, bf16, fp16 or fp64.
        v: the same.
        slots: int64 ``[T]``, ``block · block_size + offset``, all different.
    """
    tokens = k.shape[0]
    _expect("k", k, (tokens, pages.kv_heads, pages.head_dim), FLOAT_PAGES, pages.device)
    _expect("v", v, (tokens, pages.kv_heads, pages.head_dim), (k.dtype,), pages.device)
    _expect("slots", slots, (tokens,), (torch.int64,), pages.device)
    row = select("write_pages", pages.device, tokens, 1, pages.head_dim, name=implementation)
    row.run(pages, k.detach(), v.detach(), slots)


def paged_attention(
    q: Tensor,
    pages: KVPages,
    kv_of_query: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    implementation: str | None = None,
) -> Tensor:
    """Causal attention of some sequences' last tokens over all of their tokens.

    Scores are scaled by 1/√D; sums are taken in fp32 (fp64 where q is).

    Args:
        q: ``[T, heads, D]``, queries of all sequences one after the other.
        pages: hold the keys and values of all contexts, those of the queries' tokens included.
        kv_of_query: int32 or int64 ``[heads]``, the KV head that each head reads.
        block_tables: int32 ``[n, most blocks]``: pages of each sequence; what lies beyond its
            context is not read.
        query_starts: int32 ``[n + 1]``: queries of sequence i are rows ``[i]`` to ``[i + 1]``.
        context_lengths: int32 ``[n]``: tokens of each sequence; the queries are its last ones.

    Returns:
        ``[T, heads, D]`` in the dtype of q.
    """
    kv_of_query = kv_of_query.int()
    tokens, heads, count = q.shape[0], q.shape[1], context_lengths.shape[0]
    _expect("q", q, (tokens, heads, pages.head_dim), FLOAT_PAGES, pages.device)
    for name, x, shape in (
        ("kv_of_query", kv_of_query, (heads,)),
        ("block_tables", block_tables, (count, *block_tables.shape[1:2])),
        ("query_starts", query_starts, (count + 1,)),
        ("context_lengths", context_lengths, (count,)),
    ):
        _expect(name, x, shape, (torch.int32,), pages.device)
    row = select("paged_attention", q.device, tokens, heads, q.shape[2], name=implementation)
    return row.run(q.detach(), pages, kv_of_query, block_tables, query_starts, context_lengths)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, kv_of_query: Tensor, implementation: str | None = None
) -> Tensor:
    """The same for whole samples, with the bits of a cache in the dtype of q.

    Args:
        q: ``[B, S, heads, D]``.
        k: ``[B, S, KV heads, D]``.
        v: the same.
        kv_of_query: int32 or int64 ``[heads]``.

    Returns:
        ``[B, S, heads, D]``.
    """
    pages, tables, starts, lengths = _in_pages(k, v, q.dtype, implementation)
    flat = q.flatten(0, 1)
    y = paged_attention(flat, pages, kv_of_query, tables, starts, lengths, implementation)
    return y.view(q.shape)


def trained_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with gradients: ``[B, S, heads, D]`` each → the same.

    In fp32 and bf16 on a CPU with the native kernels, the forward pass has the bits of
    ``causal_attention``. Elsewhere it is torch's, in another order of sums.
    """
    if runs_native(q):
        return cast(Tensor, _TrainedAttention.apply(q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2)


def runs_native(x: Tensor) -> bool:
    """Whether attention and dense products of ``x`` run through the native kernels of a CPU: then
    they are fast enough for training's forward pass."""
    is_native = select("dense_linear", x.device, 1, 1, 1).name == "native"
    return is_native and x.dtype in native_attention.FLOATS


class _TrainedAttention(Function):
    """Ours forward; backward torch's, which takes the logarithm of each row's Σ e^score."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages, tables, starts, lengths = _in_pages(k, v, q.dtype)
        heads = torch.arange(q.shape[2], dtype=torch.int32)
        statistics = q.new_empty(*q.shape[:3], 2, dtype=torch.float32)
        operands = q.flatten(0, 1), pages, heads, tables, starts, lengths
        y = native_attention.paged_attention(native.require(), *operands, statistics=statistics)
        y = y.view(q.shape)
        largest, total = statistics.unbind(-1)
        ctx.save_for_backward(q, k, v, y, largest + total.log())
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        grad, operands = grads[0], ctx.saved_tensors
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        results = backward(*(x.transpose(1, 2) for x in (grad, *operands)), 0.0, True)
        return tuple(x.transpose(1, 2) for x in results)


def _in_pages(
    k: Tensor, v: Tensor, dtype: torch.dtype, implementation: str | None = None
) -> tuple[KVPages, Tensor, Tensor, Tensor]:
    """Whole samples ``[B, S, KV heads, D]`` in pages for one call; block tables, query starts and
    context lengths."""
    batch, length, kv_heads, head_dim = k.shape
    blocks, device = -(-length // CHUNK), k.device
    pages = KVPages.allocate(batch * blocks, CHUNK, kv_heads, head_dim, dtype, device)
    tables = torch.arange(batch * blocks, dtype=torch.int32, device=device).view(batch, blocks)
    first = torch.arange(batch, device=device).unsqueeze(1) * (blocks * CHUNK)
    slots = (first + torch.arange(length, device=device)).flatten()
    write_pages(pages, k.flatten(0, 1), v.flatten(0, 1), slots, implementation)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    return pages, tables, starts, lengths


def dense_linear(x: Tensor, weight: Tensor, implementation: str | None = None) -> Tensor:
    """``x [T, K]`` × ``weight [N, K]`` of the same dtype → ``[T, N]``, sums in fp32 or fp64.

    Each element is summed in one order over K.
    """
    tokens, k = x.shape
    _expect("x", x, (tokens, k), FLOAT_PAGES, x.device)
    _expect("weight", weight, (weight.shape[0], k), (x.dtype,), x.device)
    row = select("dense_linear", x.device, tokens, weight.shape[0], k, name=implementation)
    return row.run(x.detach(), weight.detach())


def _expect(
    name: str,
    x: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}")
    if x.dtype not in dtypes or x.device != device:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} is {x.dtype} on {x.device}; it must be {wanted} on {device}")
