"""Causal self-attention with grouped queries and a SubLN before the output projection.

Heads are split over TP. Where TP does not divide the KV heads, a rank holds every KV head that its
query heads read; a KV head held by several ranks is counted by the first of them.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from megabit.config import ModelConfig
from megabit.model.linear import linear_types
from megabit.model.norm import Normalized, RMSNorm
from megabit.model.rope import rotate
from megabit.tensor_parallel import BlockPartition, LayerContext, Span


@dataclass(frozen=True)
class HeadSplit:
    """Which query and KV heads one tensor-parallel rank computes."""

    heads: int
    kv_heads: int
    rank: int
    degree: int

    @property
    def query(self) -> range:
        count = self.heads // self.degree
        return range(self.rank * count, (self.rank + 1) * count)

    @property
    def kv(self) -> range:
        """KV heads that this rank's query heads read."""
        return range(self._kv_of(self.query[0]), self._kv_of(self.query[-1]) + 1)

    @property
    def owned_kv(self) -> range:
        """Those of ``kv`` that no earlier rank holds."""
        if self.rank == 0:
            return self.kv
        taken = self._kv_of(self.query[0] - 1) + 1
        return range(min(max(self.kv.start, taken), self.kv.stop), self.kv.stop)

    @property
    def kv_of_query(self) -> list[int]:
        """For each local query head, the local KV head that it reads."""
        return [self._kv_of(head) - self.kv.start for head in self.query]

    def _kv_of(self, head: int) -> int:
        return head // (self.heads // self.kv_heads)


def kv_rows(split: HeadSplit, head_dim: int) -> Span:
    """Rows of the k and v projections that this rank holds, in blocks of one head."""
    held = BlockPartition(split.kv_heads * head_dim, split.kv_heads).blocks(
        split.kv.start, split.kv.stop
    )
    if split.kv_heads % split.degree == 0:
        return held  # each KV head on one rank
    return held.owning(split.owned_kv.start * head_dim, split.owned_kv.stop * head_dim)


class Attention(nn.Module):
    """``Normalized [t, H]`` → ``[t, H]``; SubLN and o_proj communicate over TP."""

    def __init__(self, model: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        tp = context.tp
        self.head_dim = model.head_dim
        split = HeadSplit(model.num_attention_heads, model.num_key_value_heads, tp.rank, tp.size)
        heads = BlockPartition(model.hidden_size, model.num_attention_heads)
        own_heads, own_kv = heads.span(tp.rank, tp.size), kv_rows(split, model.head_dim)
        column, row = linear_types(model)
        self.q_proj = column(model.hidden_size, own_heads, context)
        self.k_proj = column(model.hidden_size, own_kv, context)
        self.v_proj = column(model.hidden_size, own_kv, context)
        self.attn_sub_norm = RMSNorm(own_heads, model.rms_norm_eps, context)
        self.o_proj = row(own_heads, model.hidden_size, context)
        # One KV head for each query head, unless each query head has its own anyway.
        expand = split.kv_of_query if split.kv_of_query != list(range(len(split.kv))) else None
        self.kv_of_query: Tensor | None
        self.register_buffer(
            "kv_of_query",
            None if expand is None else torch.tensor(expand, device=context.device),
            persistent=False,
        )

    def forward(self, x: Normalized, rope: tuple[Tensor, Tensor], batch: int) -> Tensor:
        q, k, v = self.q_proj.forward_together([self.q_proj, self.k_proj, self.v_proj], *x)
        q, k, v = (
            rearrange(y, "(b s) (h d) -> b s h d", b=batch, d=self.head_dim) for y in (q, k, v)
        )
        q, k = rotate(q, *rope), rotate(k, *rope)
        if self.kv_of_query is not None:
            k, v = k.index_select(2, self.kv_of_query), v.index_select(2, self.kv_of_query)
        q, k, v = (rearrange(y, "b s h d -> b h s d") for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = rearrange(y, "b h s d -> (b s) (h d)")
        return self.o_proj(*self.attn_sub_norm(y))
