"""The one place that chooses how an integer product is computed.

Every way gives the same bits: ``|acc| ≤ 128 · K`` fits int32 and, up to K = 131,072, is also an
exact fp32 integer (below 2^24) whatever the order of summation. So the choice is about time only,
and the slowest way serves as the oracle of the others.
"""

import torch
from torch import Tensor

MAX_EXACT_K = 131_072
"""Widest input for which 128 · K ≤ 2^24, the last integer up to which fp32 counts exactly."""


def ternary_matmul(x_q: Tensor, codes: Tensor) -> Tensor:
    """Exact product of quantized activations and ternary codes.

    Args:
        x_q: int8 ``[M, K]``.
        codes: int8 ``[N, K]``, each −1, 0 or +1.

    Returns:
        int32 ``[M, N]``: ``Σ_k x_q[m, k] · codes[n, k]``.
    """
    if x_q.shape[1] > MAX_EXACT_K:
        raise ValueError(f"K = {x_q.shape[1]} exceeds {MAX_EXACT_K}, the widest exact product")
    # oneDNN reads the strides of dimensions of size one, which mean nothing (pytorch#195066).
    if x_q.shape[1] > 1 and _int_mm_is_fast(x_q, codes):
        return torch._int_mm(_plain(x_q), _plain(codes).t())
    return torch.mm(x_q.float(), codes.float().t()).to(torch.int32)


def _plain(x: Tensor) -> Tensor:
    """``x`` with the strides of a fresh tensor; a copy only if it is not contiguous."""
    return x.contiguous().flatten().view(x.shape)


def _int_mm_is_fast(x_q: Tensor, codes: Tensor) -> bool:
    """Whether ``torch._int_mm`` beats an fp32 product; ``make bench`` prints the measurement.

    On the CPU it is 8 times faster than fp32 where oneDNN finds VNNI instructions, and a naive loop
    elsewhere. On CUDA it asks for more than 16 rows, and K and N that are multiples of 8.
    """
    if x_q.device.type == "cpu":
        return bool(torch.cpu._is_vnni_supported())
    return x_q.shape[0] > 16 and x_q.shape[1] % 8 == 0 and codes.shape[0] % 8 == 0
