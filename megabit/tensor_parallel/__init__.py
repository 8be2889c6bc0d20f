"""Layers split over tensor-parallel ranks. Statistics and scales belong to the logical tensor."""

from megabit.tensor_parallel.bitlinear import (
    BitLinear,
    ColumnParallelBitLinear,
    RowParallelBitLinear,
)
from megabit.tensor_parallel.context import HuggingFaceForm, LayerContext
from megabit.tensor_parallel.cross_entropy import TokenLosses, vocab_parallel_cross_entropy
from megabit.tensor_parallel.distillation import vocab_parallel_kl
from megabit.tensor_parallel.embedding import VocabParallelEmbedding
from megabit.tensor_parallel.forward_pass import (
    PLAIN,
    TERNARY,
    AttentionCache,
    ForwardPass,
    Kept,
    Noise,
    Quantization,
)
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
from megabit.tensor_parallel.probe import ActivationProbe
from megabit.tensor_parallel.ternary_layer import (
    MixedWeight,
    TernaryLayer,
    ternarize_layers,
    ternary_layers,
)
from megabit.tensor_parallel.weight_gradients import WeightGradientQueue
from megabit.tensor_parallel.weight_scale import OwnedElements, WeightScale

__all__ = [
    "PLAIN",
    "TERNARY",
    "ActivationProbe",
    "AttentionCache",
    "BitLinear",
    "BlockPartition",
    "ColumnParallelBitLinear",
    "ColumnParallelLinear",
    "ForwardPass",
    "HuggingFaceForm",
    "Kept",
    "LayerContext",
    "MixedWeight",
    "Noise",
    "OwnedElements",
    "Quantization",
    "RowParallelBitLinear",
    "RowParallelLinear",
    "Shard",
    "ShardedParameter",
    "Span",
    "TernaryLayer",
    "TokenLosses",
    "VocabParallelEmbedding",
    "WeightGradientQueue",
    "WeightScale",
    "enter_column_parallel",
    "reduce_blocks",
    "sharded_parameters",
    "ternarize_layers",
    "ternary_layers",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_kl",
    "vocab_parallel_logits",
    "whole",
]
