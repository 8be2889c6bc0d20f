"""Layers split over tensor-parallel ranks. Statistics and scales belong to the logical tensor."""

from megabit.tensor_parallel.bitlinear import (
    BitLinear,
    ColumnParallelBitLinear,
    RowParallelBitLinear,
    TernaryLayer,
    ternarize_layers,
    ternary_layers,
)
from megabit.tensor_parallel.context import LayerContext
from megabit.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megabit.tensor_parallel.embedding import VocabParallelEmbedding
from megabit.tensor_parallel.forward_pass import PLAIN, ForwardPass, Kept, Noise
from megabit.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    enter_column_parallel,
)
from megabit.tensor_parallel.logits import vocab_parallel_logits
from megabit.tensor_parallel.parameter import (
    Shard,
    ShardedParameter,
    sharded_parameters,
)
from megabit.tensor_parallel.partition import BlockPartition, Span, reduce_blocks, whole
from megabit.tensor_parallel.weight_gradients import WeightGradientQueue

__all__ = [
    "PLAIN",
    "BitLinear",
    "BlockPartition",
    "ColumnParallelBitLinear",
    "ColumnParallelLinear",
    "ForwardPass",
    "Kept",
    "LayerContext",
    "Noise",
    "RowParallelBitLinear",
    "RowParallelLinear",
    "Shard",
    "ShardedParameter",
    "Span",
    "TernaryLayer",
    "VocabParallelEmbedding",
    "WeightGradientQueue",
    "enter_column_parallel",
    "reduce_blocks",
    "sharded_parameters",
    "ternarize_layers",
    "ternary_layers",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logits",
    "whole",
]
