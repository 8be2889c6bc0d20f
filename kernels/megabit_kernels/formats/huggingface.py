"""Hugging Face's packed BitNet weights: a uint8 ``weight`` and a ``weight_scale`` of shape [1].

The bytes: N must be a multiple of 4, and ``weight`` is ``[N/4, K]``, where byte (r, c) holds the
codes w + 1 of four *rows*, N/4 apart::

    weight[r, c] = Σ_i (w[i·N/4 + r, c] + 1) << 2i   (i = 0..3)

The scale: Hugging Face has two kinds of linear layer, named in ``quantization_config.linear_class``
of a checkpoint, and they mean reciprocal things by the same name.

- ``bitlinear`` (the default there; Falcon-E, Llama3-8B-1.58) *divides* by it: it is 1/γ.
- ``autobitlinear`` (bitnet-b1.58-2B-4T) *multiplies* by it: it is γ.

Nothing in a tensor tells them apart, so every conversion asks for the class.

Source: ``transformers``, ``integrations/bitnet.py`` (``pack_weights``, ``BitLinear``,
``AutoBitLinear``).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from megabit_kernels.packing import (
    check_bytes,
    merge_codes,
    pack,
    require_matrix,
    split_codes,
    unpack,
)

LinearClass = Literal["bitlinear", "autobitlinear"]


def encode(packed: Tensor, k: int) -> Tensor:
    """Canonical uint8 ``[N, ceil(k/4)]`` → Hugging Face's uint8 ``[N/4, k]``."""
    codes = unpack(packed, k)
    n = codes.shape[0]
    if n % 4:
        raise ValueError(f"N = {n} must be a multiple of 4: Hugging Face packs 4 rows to a byte")
    return merge_codes(codes.view(4, n // 4, k), 0)


def decode(weight: Tensor) -> Tensor:
    """Hugging Face's uint8 ``[N/4, K]`` → canonical uint8 ``[N, ceil(K/4)]``.

    Raises:
        ValueError: a byte holds code 3, which no ternary weight has.
    """
    require_matrix("weight", weight, torch.uint8)
    check_bytes(weight, "weight")
    return pack(split_codes(weight, 0).flatten(0, 1))


def encode_scale(
    scale: Tensor, linear_class: LinearClass, dtype: torch.dtype = torch.float32
) -> Tensor:
    """γ (one element) → ``weight_scale``, shape [1] in ``dtype``.

    In fp32, ``decode_scale`` gives an fp32 γ back exactly from ``autobitlinear``, and from
    ``bitlinear`` to one unit in the last place. Published checkpoints have bf16, which keeps 8 bits
    of γ.
    """
    return _convert(scale, linear_class, "scale").reshape(1).to(dtype)


def decode_scale(weight_scale: Tensor, linear_class: LinearClass) -> Tensor:
    """``weight_scale`` (one element, any floating dtype) → γ, a 0-dim fp32 tensor."""
    return _convert(weight_scale, linear_class, "weight_scale").reshape(()).to(torch.float32)


def _convert(scale: Tensor, linear_class: LinearClass, name: str) -> Tensor:
    """Both directions, as 1/(1/γ) = γ. In fp64, so that only the result's dtype rounds."""
    if linear_class not in get_args(LinearClass):
        raise ValueError(
            f"linear_class must be one of {', '.join(get_args(LinearClass))}, not {linear_class!r}"
        )
    if scale.numel() != 1:
        raise ValueError(f"{name} must have one element, not shape {tuple(scale.shape)}")
    exact = scale.to(torch.float64)
    if not (bool(exact.isfinite()) and bool(exact > 0)):
        raise ValueError(f"{name} must be positive and finite, not {exact.item()}")
    return exact.reciprocal() if linear_class == "bitlinear" else exact
