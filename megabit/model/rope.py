"""Rotary positions (arXiv 2104.09864) in Hugging Face's layout: halves, not pairs, are rotated."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megabit.interop.huggingface import arithmetic


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their position: ``[B, S, heads, head_dim]`` → the same shape.

    Args:
        as_huggingface: angles are taken in fp32, as in ``transformers``.
    """

    def __init__(
        self,
        head_dim: int,
        max_length: int,
        theta: float,
        device: torch.device,
        as_huggingface: bool = False,
    ) -> None:
        super().__init__()
        # In fp64, so that the tables of an fp64 run and of an fp32 run are the same numbers.
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        angle = torch.outer(torch.arange(max_length, dtype=torch.float64), theta**-exponent)
        cos, sin = angle.cos(), angle.sin()
        if as_huggingface:
            whole = arithmetic.rotary_tables(max_length, head_dim, theta, torch.float32)
            cos, sin = (table[0, 0, :, : head_dim // 2] for table in whole)
        self.register_buffer("cos", cos.to(device), persistent=False)  # [S, head_dim/2]
        self.register_buffer("sin", sin.to(device), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin ``[length, 1, head_dim/2]``, for all layers of a forward pass."""
        return self.cos[:length, None].to(dtype), self.sin[:length, None].to(dtype)

    def tables_at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same for tokens at ``positions``, int64 ``[T]``: ``[T, 1, head_dim/2]``."""
        return self.cos[positions, None].to(dtype), self.sin[positions, None].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [B, S, heads, D]``, tables ``[S, 1, D/2]``: (a, b) → (a·cos − b·sin, b·cos + a·sin)."""
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _rotated(x, cos, sin)


class _Rotate(Function):
    """Backward is the rotation by the opposite angle, so nothing but the tables is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    halves = x.unflatten(-1, (2, -1))
    # No fused multiply-add, which torch uses or not depending on how many heads there are.
    by_cos, by_sin = halves * cos.unsqueeze(-2), halves * sin.unsqueeze(-2)
    by_cos.select(-2, 0).sub_(by_sin.select(-2, 1))
    by_cos.select(-2, 1).add_(by_sin.select(-2, 0))
    return by_cos.flatten(-2)
