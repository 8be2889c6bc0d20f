"""The arithmetic of Hugging Face's BitNet layers, operation by operation, with its roundings.

It is not megabit's: activations are multiplied by 127/max where megabit divides by max/127, γ is a
mean in floats, and a product of integers is rounded to the compute dtype before it is scaled.

``transformers`` compiles four of these functions where they are defined, and that shows in bits.
Inductor keeps bf16 intermediates in fp32, so that ``bitlinear`` in bf16 rounds other activations to
other codes, and it adds up a mean in another order than torch. So they are compiled here as well,
with the same shapes; whatever turns the compiler off in a process turns both off.

Source: ``transformers`` 5.24, ``integrations/bitnet.py`` (``ActQuant``, ``WeightQuant``,
``BitLinear``, ``AutoBitLinear``) and ``models/bitnet/modeling_bitnet.py``.
"""

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_Result = TypeVar("_Result")

Linear = Callable[[Tensor], Tensor]
"""``x`` with all columns, which are quantized together → its product with a weight. Of a weight
that has some of the ``columns`` only: a term of a sum over such weights."""
ALL = slice(None)
Part = tuple[slice, slice]
"""Rows and columns of a weight."""
WHOLE: Part = (ALL, ALL)
Attention = Literal["sdpa", "eager"]
"""What transformers calls ``attn_implementation``; ``sdpa`` is its default."""


def online_linear(weight: Tensor, compiled: bool, part: Part = WHOLE) -> Linear:
    """A layer that quantizes its master weight, ``AutoBitLinear`` in mode ``online``."""
    # A Parameter, as there: the compiler takes its shape for a constant, and not that of others.
    quantized = _maybe(compiled, _quantized_weight)(nn.Parameter(weight, requires_grad=False))
    own, columns = quantized[part].contiguous(), part[1]
    return lambda x: F.linear(_maybe(compiled, _quantized_activation)(x)[..., columns], own)


def auto_linear(
    codes: Tensor, weight_scale: Tensor, compiled: bool, columns: slice = ALL
) -> Linear:
    """A layer of codes ``[N, K]`` and γ in one dtype, ``AutoBitLinear`` in mode ``offline``."""

    def linear(x: Tensor) -> Tensor:
        x_hat = _maybe(compiled, _quantized_activation)(x)[..., columns]
        return F.linear(x_hat, codes) * weight_scale

    return linear


def bit_linear(codes: Tensor, weight_scale: Tensor, compiled: bool, columns: slice = ALL) -> Linear:
    """A layer of codes ``[N, K]`` and 1/γ in one dtype, ``BitLinear``."""

    def linear(x: Tensor) -> Tensor:
        x_q, x_scale = _maybe(compiled, _int8_activation)(x)
        product = F.linear(x_q[..., columns].to(codes.dtype), codes)
        return _maybe(compiled, _descaled)(product, weight_scale, x_scale)

    return linear


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Rounded to the dtype of ``x`` before the gain is multiplied."""
    return gain * normalized(x, eps)


def normalized(x: Tensor, eps: float) -> Tensor:
    """``rms_norm`` without a gain."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype)


def rotary_tables(length: int, head_dim: int, theta: float, dtype: torch.dtype) -> list[Tensor]:
    """cos and sin ``[1, 1, length, head_dim]``, of angles in fp32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    angle = torch.arange(length)[:, None].float() * (1.0 / theta**exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return [table.to(dtype)[None, None] for table in (angle.cos(), angle.sin())]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [B, heads, S, D]`` by its position."""
    a, b = x.chunk(2, -1)
    return (x * cos) + (torch.cat((-b, a), dim=-1) * sin)


def attend(q: Tensor, k: Tensor, v: Tensor, implementation: Attention) -> Tensor:
    """Causal attention, ``[B, heads, S, D]`` → ``[B, S, heads · D]``; k and v may have fewer."""
    length, head_dim = q.shape[2:]
    groups = q.shape[1] // k.shape[1]
    scaling = head_dim**-0.5
    may_group = implementation == "sdpa" and head_dim <= 256
    if groups > 1 and not may_group:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    if implementation == "sdpa":
        y = F.scaled_dot_product_attention(
            q, k, v, scale=scaling, is_causal=length > 1, enable_gqa=groups > 1 and may_group
        )
    else:
        scores = torch.matmul(q, k.transpose(2, 3)) * scaling
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask = torch.zeros(length, length, dtype=q.dtype)
        scores = scores + mask.masked_fill_(future, torch.finfo(q.dtype).min)
        y = torch.matmul(F.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)
    return y.transpose(1, 2).reshape(q.shape[0], length, -1)


def activation(x: Tensor, name: str) -> Tensor:
    """``relu2`` or ``silu``."""
    return torch.square(F.relu(x)) if name == "relu2" else F.silu(x)


def _maybe(compiled: bool, function: Callable[..., _Result]) -> Callable[..., _Result]:
    return torch.compile(function) if compiled else function


def _quantized_weight(weight: Tensor) -> Tensor:
    wide = weight.float()
    scale = 1.0 / wide.abs().mean().clamp_(min=1e-5)
    return ((wide * scale).round().clamp(-1, 1) / scale).to(weight.dtype)


def _quantized_activation(x: Tensor) -> Tensor:
    wide = x.float()
    scale = 127 / wide.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
    return ((wide * scale).round().clamp(-128, 127) / scale).to(x.dtype)


def _int8_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = 127 / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127).to(torch.int8), scale


def _descaled(product: Tensor, weight_scale: Tensor, x_scale: Tensor) -> Tensor:
    return product / (weight_scale * x_scale)
