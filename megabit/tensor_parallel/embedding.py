"""Token embedding with the vocabulary's rows split over tensor-parallel ranks."""

from torch import Tensor, nn
from torch.nn import functional as F

from megabit.tensor_parallel.layers import LayerContext
from megabit.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megabit.tensor_parallel.parameter import Shard, ShardedParameter
from megabit.tensor_parallel.partition import Span


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

    def forward(self, tokens: Tensor) -> Tensor:
        span = self.weight.shard.span
        here = (tokens >= span.start) & (tokens < span.stop)
        local = (tokens - span.start).masked_fill(~here, 0)
        x = F.embedding(local, self.weight).to(self.context.compute_dtype)
        x = x.masked_fill(~here.unsqueeze(-1), 0)
        if self.context.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(x, self.context.tp)
        return reduce_from_tensor_model_parallel_region(x, self.context.tp)
