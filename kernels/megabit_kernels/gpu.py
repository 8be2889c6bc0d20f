"""The operations on a CUDA device, by the Triton kernels; Triton is imported when first used.

What the kernels don't compute, fp64 above all, goes to ``plain``.
"""

import importlib.util
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from megabit_kernels import plain, plain_attention
from megabit_kernels.conversion import Layout
from megabit_kernels.epilogue import Epilogue, fused
from megabit_kernels.paged import KVPages
from megabit_kernels.triton.limits import FLOATS, MAX_HEAD_DIM, OUTPUTS, PAGES


def is_available() -> bool:
    """Whether there is a CUDA device and a Triton to compile for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def runs_on(device: torch.device) -> bool:
    """Whether Triton's kernels take tensors of ``device``: CUDA's, or any in its interpreter."""
    if device.type == "cuda" or "triton" not in sys.modules:
        return device.type == "cuda"
    from megabit_kernels.triton.arithmetic import is_interpreted

    return is_interpreted()


def packed_product(x_q: Tensor, planes: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """int8 ``[M, K]`` × ``planes`` → ``[M, N]``."""
    from megabit_kernels.triton import products

    return fused(lambda own: products.packed_product(x_q, planes, own), epilogue)


def split_k_product(x_q: Tensor, planes: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """``packed_product`` for M ≤ 16, the sum over K shared by several programs."""
    from megabit_kernels.triton import products

    return fused(lambda own: products.decode_product(x_q, planes, own), epilogue)


def int8_product(x_q: Tensor, weight: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """int8 ``[M, K]`` × int8 ``[N, K]`` → ``[M, N]``."""
    from megabit_kernels.triton import products

    return fused(lambda own: products.int8_product(x_q, weight, own), epilogue)


def input_gradient(
    grad: Tensor, data: Tensor, layout: Layout, k: int, w_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """dX with bf16 operands: codes are unpacked in registers."""
    if dtype != torch.bfloat16 or layout not in ("planes", "int8"):
        return plain.input_gradient(grad, data, layout, k, w_scale, dtype)
    from megabit_kernels.triton import products

    return products.input_gradient(grad.to(dtype), data, k, w_scale).to(torch.float32)


def int8_input_gradient(
    grad: Tensor, data: Tensor, layout: Layout, k: int, w_scale: Tensor, seed: int
) -> Tensor:
    """``plain.int8_input_gradient`` with an int8 product; what is quantized, torch quantizes."""
    return plain.int8_input_gradient(grad, data, layout, k, w_scale, seed, int8_product)


def int8_weight_gradients(
    grads: Sequence[Tensor], x_q: Tensor, x_scale: Tensor, seed: int
) -> list[Tensor]:
    """``plain.int8_weight_gradients`` with an int8 product."""
    return plain.int8_weight_gradients(grads, x_q, x_scale, seed, int8_product)


def weight_gradient(grad: Tensor, x_q: Tensor, x_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """dW with bf16 operands, fp32 sums."""
    if dtype != torch.bfloat16 or x_q.dtype != torch.int8 or x_scale.dtype != torch.float32:
        return plain.weight_gradient(grad, x_q, x_scale, dtype)
    from megabit_kernels.triton import products

    return products.weight_gradient(grad.to(dtype), x_q, x_scale, dtype)


def quantize_activation(x: Tensor, absmax: Tensor | None) -> tuple[Tensor, Tensor]:
    """``plain.quantize_activation`` in one kernel."""
    if x.dtype not in FLOATS or (absmax is not None and absmax.dtype != torch.float32):
        return plain.quantize_activation(x, absmax)
    from megabit_kernels.triton import quantize

    return quantize.quantize_activation(x, absmax)


def rms_norm_quantize(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``plain.rms_norm_quantize`` in one kernel."""
    if x.dtype not in FLOATS or gain.dtype not in FLOATS:
        return plain.rms_norm_quantize(x, gain, eps)
    from megabit_kernels.triton import norm_quantize

    return norm_quantize.rms_norm_quantize(x, gain, eps)


def glu_rms_norm_quantize(
    gate: Tensor, up: Tensor, gain: Tensor, eps: float, activation: str
) -> tuple[Tensor, Tensor]:
    """``plain.glu_rms_norm_quantize`` in one kernel."""
    if gate.dtype not in FLOATS or gain.dtype not in FLOATS:
        return plain.glu_rms_norm_quantize(gate, up, gain, eps, activation)
    from megabit_kernels.triton import norm_quantize

    return norm_quantize.glu_rms_norm_quantize(gate, up, gain, eps, activation)


def ternarize(weight: Tensor, scale: Tensor, layout: Layout) -> Tensor:
    """``plain.ternarize`` in one kernel."""
    if weight.dtype not in FLOATS or layout == "panels":
        return plain.ternarize(weight, scale, layout)
    from megabit_kernels.triton import ternarize as kernels

    (data,) = kernels.ternarize(weight, scale, (layout,))
    return data


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """``plain.cross_entropy`` in one pass over the logits."""
    if logits.dtype not in FLOATS:
        return plain.cross_entropy(logits, targets)
    from megabit_kernels.triton import cross_entropy as kernels

    return kernels.cross_entropy_forward(logits, targets)


def cross_entropy_gradient(
    grad: Tensor, logits: Tensor, targets: Tensor, normalizer: Tensor
) -> Tensor:
    """``plain.cross_entropy_gradient`` in one pass over the logits."""
    if logits.dtype not in FLOATS:
        return plain.cross_entropy_gradient(grad, logits, targets, normalizer)
    from megabit_kernels.triton import cross_entropy as kernels

    return kernels.cross_entropy_backward(grad, logits, targets, normalizer)


def write_pages(pages: KVPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """``plain_attention.write_pages`` in one kernel."""
    if k.dtype not in OUTPUTS or pages.dtype not in PAGES:
        return plain_attention.write_pages(pages, k, v, slots)
    from megabit_kernels.triton import write_pages as kernels

    return kernels.write_pages(pages, k, v, slots)


def paged_attention(
    q: Tensor,
    pages: KVPages,
    kv_of_query: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """``plain_attention.paged_attention`` in one pass over the keys."""
    operands = (q, pages, kv_of_query, block_tables, query_starts, context_lengths)
    if q.dtype not in OUTPUTS or pages.dtype not in PAGES or pages.head_dim > MAX_HEAD_DIM:
        return plain_attention.paged_attention(*operands)
    from megabit_kernels.triton import paged_attention as kernels

    return kernels.paged_attention(*operands)


def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``plain_attention.dense_linear`` by tiles."""
    if x.dtype not in OUTPUTS:
        return plain_attention.dense_linear(x, weight)
    from megabit_kernels.triton import dense_linear as kernels

    return kernels.dense_linear(x, weight)
