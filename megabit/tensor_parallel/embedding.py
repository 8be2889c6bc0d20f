"""Token embedding with the vocabulary's rows split over tensor-parallel ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megabit.tensor_parallel.context import LayerContext
from megabit.tensor_parallel.forward_pass import PLAIN, ForwardPass
from megabit.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megabit.tensor_parallel.parameter import Shard, ShardedParameter
from megabit.tensor_parallel.partition import Span
from megabit.tensor_parallel.weight_gradients import WeightGradientQueue, weight_gradient


class VocabParallelEmbedding(nn.Module):
    """Looks up the tokens whose rows this rank has and sums over TP: ``[T]`` → ``[t, H]``.

    For each token one rank contributes its row and the others zeros, so the sum is exact. Under
    sequence parallelism each rank gets its own ``t = T/tp`` tokens. A copy on the last stage that
    serves only as the tied output head has ``rows`` of which it owns none.
    """

    def __init__(self, rows: Span, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        self.weight = ShardedParameter(
            Shard((rows.size, hidden_size), 0, rows), context.master_dtype, context.device
        )

    def forward(self, tokens: Tensor, forward_pass: ForwardPass = PLAIN) -> Tensor:
        """Token ids ``[T]`` → ``[t, H]`` in the compute dtype."""
        span = self.weight.shard.span
        here = (tokens >= span.start) & (tokens < span.stop)
        local = (tokens - span.start).masked_fill(~here, 0)
        x = _Lookup.apply(local, self.weight.ready(), forward_pass.weight_gradients)
        x = x.to(self.context.compute_dtype)
        x = x.masked_fill(~here.unsqueeze(-1), 0)
        if self.context.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(x, self.context)
        return reduce_from_tensor_model_parallel_region(x, self.context)


class _Lookup(Function):
    """``F.embedding`` whose gradient is added up in fp32, also where the replica is bf16.

    Tokens have no gradient: all of its backward pass can be put off.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: ShardedParameter, queue: WeightGradientQueue | None
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.queue = weight, queue
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens,), grad = ctx.saved_tensors, grads[0]
        rows = ctx.weight.shape[0]

        def compute() -> Tensor:
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
            return torch.ops.aten.embedding_dense_backward(wide, tokens, rows, -1, False)

        return None, weight_gradient(ctx.weight, compute, ctx.queue), None
