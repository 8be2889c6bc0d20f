"""The operations on a CPU with the native library; what it doesn't compute goes to ``plain``.

The library computes in fp32 and bf16. fp64, in which runs are checked, is for ``plain``.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megabit_kernels import (
    native,
    native_attention,
    numerics,
    plain,
    plain_attention,
    stochastic,
)
from megabit_kernels.conversion import Layout, lay_out, unpack
from megabit_kernels.epilogue import Epilogue, fused
from megabit_kernels.paged import KVPages


def is_available() -> bool:
    """Whether the library was built and loads."""
    return native.library() is not None


def instruction_set() -> str:
    """What the library computes with on this machine."""
    return native.isas()[0]


def ternary_product(x_q: Tensor, panels: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """int8 ``[M, K]`` × ``panels`` → ``[M, N]``."""
    library = native.require()

    def product(own: Epilogue | None) -> Tensor:
        if own is None:
            return library.ternary_matmul(x_q, panels, n)
        gamma = float(own.w_scale)
        return library.ternary_linear(x_q, own.x_scale, panels, n, gamma, own.dtype)

    return fused(product, epilogue)


def int8_product(x_q: Tensor, panels: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """int8 ``[M, K]`` × int8 panels → ``[M, N]``."""
    library = native.require()

    def product(own: Epilogue | None) -> Tensor:
        if own is None:
            return library.int8_matmul(x_q, panels, n)
        return library.int8_linear(x_q, own.x_scale, panels, n, own.w_scale, own.dtype)

    return fused(product, epilogue)


def quantize_activation(x: Tensor, absmax: Tensor | None) -> tuple[Tensor, Tensor]:
    """``plain.quantize_activation`` in one pass over ``x``."""
    if x.dtype not in native.FLOATS or (absmax is not None and absmax.dtype != torch.float32):
        return plain.quantize_activation(x, absmax)
    return native.require().quantize_activation(x, absmax)


def int8_input_gradient(
    grad: Tensor, data: Tensor, layout: Layout, k: int, w_scale: Tensor, seed: int
) -> Tensor:
    """``plain.int8_input_gradient``; the weight is transposed into int8 panels for the call."""
    if not _is_fp32(grad, w_scale):
        return plain.int8_input_gradient(grad, data, layout, k, w_scale, seed)
    library, (_, n) = native.require(), grad.shape
    grad_q, scale = library.round_rows(grad.float(), stochastic.key_of(seed, 0))
    if layout == "panels":
        panels = library.transpose_panels(data, n, k)
    else:
        panels = library.pack_int8_transposed(unpack(data, layout, n, k, torch.int8))
    return library.int8_linear(grad_q, scale, panels, k, w_scale.expand(k), torch.float32)


def int8_weight_gradients(
    grads: Sequence[Tensor], x_q: Tensor, x_scale: Tensor, seed: int
) -> list[Tensor]:
    """``plain.int8_weight_gradients``; x_q is transposed into int8 panels once for all."""
    if not _is_fp32(*grads, x_scale):
        return plain.int8_weight_gradients(grads, x_q, x_scale, seed)
    library, k, results = native.require(), x_q.shape[1], []
    panels, ones = library.pack_int8_transposed(x_q), torch.ones(k)
    for i, grad in enumerate(grads):
        key = stochastic.key_of(seed, 1 + i)
        z_t, scale = library.round_columns(grad.float(), x_scale, key)
        results.append(library.int8_linear(z_t, scale, panels, k, ones, torch.float32))
    return results


def abs_sum(weight: Tensor, numel: int) -> Tensor:
    """``numerics.fixed_point_abs_sum`` in one pass over ``weight``."""
    if weight.dtype != torch.float32:
        return numerics.fixed_point_abs_sum(weight, numel)
    return native.require().abs_sum(weight, numel)


def square_sum(x: Tensor, largest: float, numel: int) -> Tensor:
    """``numerics.fixed_point_square_sum`` in one pass over ``x``."""
    if x.dtype != torch.float32 or largest == 0 or not math.isfinite(largest):
        return numerics.fixed_point_square_sum(x, largest, numel)
    return native.require().square_sum(x, largest, numel)


def absmean_scale(weight: Tensor) -> Tensor:
    """``numerics.absmean_scale`` in one pass over ``weight``."""
    numel = weight.numel()
    return numerics.weight_scale(abs_sum(weight, numel), numel, numerics.stats_dtype(weight.dtype))


def ternarize(weight: Tensor, scale: Tensor, layout: Layout) -> Tensor:
    """``plain.ternarize`` in one pass, straight into panels where those are wanted."""
    if not weight.dtype == scale.dtype == torch.float32:
        return plain.ternarize(weight, scale, layout)
    library, gamma = native.require(), float(scale)
    if layout == "panels":
        return library.ternarize_panels(weight, gamma)
    return lay_out(library.ternarize_codes(weight, gamma), layout)


def write_pages(pages: KVPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """``plain_attention.write_pages`` in one pass."""
    if not native_attention.takes(pages.keys, k):
        return plain_attention.write_pages(pages, k, v, slots)
    return native_attention.write_pages(native.require(), pages, k, v, slots)


def paged_attention(
    q: Tensor,
    pages: KVPages,
    kv_of_query: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """``attention.paged_attention`` where neither q nor pages are fp64."""
    numbers = kv_of_query, block_tables, query_starts, context_lengths
    if not native_attention.takes(q, pages.keys):
        return plain_attention.paged_attention(q, pages, *numbers)
    return native_attention.paged_attention(native.require(), q, pages, *numbers)


def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``attention.dense_linear`` where the operands are not fp64."""
    if not native_attention.takes(x):
        return plain_attention.dense_linear(x, weight)
    return native_attention.dense_linear(native.require(), x, weight)


def _is_fp32(*tensors: Tensor) -> bool:
    """Whether statistics of each are taken in fp32, as the library does."""
    return all(numerics.stats_dtype(x.dtype) == torch.float32 for x in tensors)
