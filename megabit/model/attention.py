"""Causal self-attention with grouped queries.

Heads are split over TP (``kv_heads``).
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from megabit.config import ModelConfig
from megabit.model.kv_heads import HeadSplit, KVHeads, kv_rows
from megabit.model.linear import RowInput, column_linear, project, row_linear, sub_norm
from megabit.model.norm import Normalized
from megabit.model.recompute import recomputed
from megabit.model.rope import rotate
from megabit.tensor_parallel import PLAIN, BlockPartition, ForwardPass, LayerContext
from megabit_kernels import causal_attention, trained_attention


class Attention(nn.Module):
    """``Normalized [t, H]`` → ``[t, H]``; what follows attention communicates over TP.

    Args:
        layer: of the whole model; a cache keeps keys and values by it.
    """

    def __init__(self, model: ModelConfig, layer: int, context: LayerContext) -> None:
        super().__init__()
        self.layer = layer
        tp = context.tp
        self.head_dim = model.head_dim
        split = HeadSplit(model.num_attention_heads, model.num_key_value_heads, tp.rank, tp.size)
        heads = BlockPartition(model.hidden_size, model.num_attention_heads)
        own_heads, own_kv = heads.span(tp.rank, tp.size), kv_rows(split, model.head_dim)
        self.q_proj = column_linear(model, own_heads, context)
        self.k_proj = column_linear(model, own_kv, context)
        self.v_proj = column_linear(model, own_kv, context)
        self.attn_sub_norm = sub_norm(model, own_heads, context)
        self.before_o = RowInput(model, heads, self.attn_sub_norm)
        self.o_proj = row_linear(model, own_heads, "o", context)
        self.kv_heads = KVHeads(split, context)

    def forward(
        self,
        x: Normalized,
        rope: tuple[Tensor, Tensor],
        batch: int,
        forward_pass: ForwardPass = PLAIN,
        selective: bool = False,
    ) -> Tensor:
        """``selective``: keep q, k and v only, and compute what follows again backward."""
        q, k, v = project([self.q_proj, self.k_proj, self.v_proj], x, forward_pass)

        def finish(q: Tensor, k: Tensor, v: Tensor, forward_pass: ForwardPass) -> Tensor:
            y = self._attend(q, k, v, rope, batch, forward_pass)
            return self.o_proj(*self.before_o(y, forward_pass), forward_pass)

        if selective:
            return recomputed(finish, (q, k, v), forward_pass)
        return finish(q, k, v, forward_pass)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: int,
        forward_pass: ForwardPass,
    ) -> Tensor:
        """Projections ``[T, heads · head_dim]`` → ``[T, heads · head_dim]`` of the query heads."""
        q, k, v = (
            rearrange(y, "(b s) (h d) -> b s h d", b=batch, d=self.head_dim) for y in (q, k, v)
        )
        return self._mix(rotate(q, *rope), rotate(k, *rope), v, forward_pass)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, forward_pass: ForwardPass) -> Tensor:
        """``q [B, S, query heads, D]``, ``k``, ``v [B, S, KV heads, D]`` → ``[T, heads · D]``."""
        if forward_pass.cache is not None:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            y = forward_pass.cache.attend(self.layer, q, k, v, self.kv_heads.index)
            return y.flatten(1)
        if torch.is_grad_enabled() or forward_pass.kept is not None:
            k, v = self.kv_heads.expand(k, v)
            y = trained_attention(q, k, v)
        else:
            y = causal_attention(q, k, v, self.kv_heads.index)
        return rearrange(y, "b s h d -> (b s) (h d)")
