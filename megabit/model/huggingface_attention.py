"""Causal self-attention as ``transformers`` computes it."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from megabit.interop.huggingface import arithmetic
from megabit.model.attention import Attention
from megabit.tensor_parallel import ForwardPass


class HuggingFaceAttention(Attention):
    """By torch's SDPA, and with a cache one sequence after the other; for inference."""

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, forward_pass: ForwardPass) -> Tensor:
        if forward_pass.cache is None:
            return self._sdpa(q, k, v).flatten(0, 1)
        kept = forward_pass.cache.keep(self.layer, k.flatten(0, 1), v.flatten(0, 1))
        queries = q.flatten(0, 1).split(forward_pass.cache.query_starts.diff().tolist())
        return torch.cat(
            [
                self._sdpa(own.unsqueeze(0), *(x.unsqueeze(0) for x in context)).flatten(0, 1)
                for own, context in zip(queries, kept, strict=True)
            ]
        )

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [B, S, heads, D]``, the last tokens of ``k`` and ``v [B, C, KV heads, D]`` →
        ``[B, S, heads · D]``."""
        k, v = self.kv_heads.expand(k, v)
        q, k, v = (rearrange(y, "b s h d -> b h s d") for y in (q, k, v))
        length, context = q.shape[2], k.shape[2]
        if length in (1, context):
            return arithmetic.attend(q, k, v, "sdpa")
        # What follows a part that was computed before; transformers has no such pass by default.
        visible = torch.ones(length, context, dtype=torch.bool, device=q.device)
        y = F.scaled_dot_product_attention(q, k, v, visible.tril(context - length))
        return rearrange(y, "b h s d -> b s (h d)")
