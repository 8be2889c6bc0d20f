"""Grouped queries over TP: which heads a rank has, and how it shares KV heads with others.

Where TP does not divide the KV heads, a rank holds every KV head that its query heads read. A KV
head held by several ranks has one gradient, which they sum backward, and is counted by the first
of them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.reduce import tree_sum
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


class KVHeads:
    """Gives each query head of a rank the KV head that it reads."""

    def __init__(self, split: HeadSplit, context: LayerContext) -> None:
        self.split, self.context = split, context
        self.is_shared = split.kv_heads % split.degree != 0
        self.is_one_to_one = split.kv_of_query == list(range(len(split.kv)))
        self.index = torch.tensor(split.kv_of_query, dtype=torch.int32, device=context.device)

    def expand(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v ``[B, S, kv heads, D]`` → ``[B, S, query heads, D]``.

        Backward sends the gradients of all KV heads over TP if ranks share some.
        """
        if self.is_one_to_one and not self.is_shared:
            return k, v
        return _Expand.apply(k, v, self)

    def sum_over_queries(self, grad: Tensor) -> Tensor:
        """``[B, S, query heads, D]`` → ``[B, S, kv heads, D]``: the terms of this rank's queries,
        in layout-exact training added over the tree's blocks."""
        shape = (*grad.shape[:2], len(self.split.kv), grad.shape[3])
        if self.context.tree_blocks is None:
            return grad.new_zeros(shape).index_add_(2, self.index, grad)
        indices = self.index.chunk(self.context.own_tree_blocks)
        grads = grad.chunk(self.context.own_tree_blocks, dim=2)
        blocks = [
            grad.new_zeros(shape).index_add_(2, index, own)
            for index, own in zip(indices, grads, strict=True)
        ]
        return tree_sum(torch.stack(blocks))

    def sum_over_ranks(self, grad: Tensor) -> Tensor:
        """Complete the gradients ``[…, kv heads, D]`` of heads that other ranks hold, too."""
        if not self.is_shared:
            return grad
        kv = self.split.kv
        logical = grad.new_zeros((*grad.shape[:-2], self.split.kv_heads, grad.shape[-1]))
        logical[..., kv.start : kv.stop, :] = grad
        return self.context.start_sum(logical).wait()[..., kv.start : kv.stop, :]


class _Expand(Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, heads: KVHeads) -> tuple[Tensor, Tensor]:
        ctx.heads = heads
        return k.index_select(2, heads.index), v.index_select(2, heads.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        heads: KVHeads = ctx.heads
        both = torch.stack([heads.sum_over_queries(grad) for grad in grads])
        dk, dv = heads.sum_over_ranks(both)
        return dk, dv, None
