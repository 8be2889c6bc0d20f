"""Layers split over tensor-parallel ranks. Statistics and scales belong to the logical tensor.

What crosses ranks, for a ternary layer:

- column input: nothing forward; under sequence parallelism an all-gather of int8 and one scale per
  token, kept for dW. Backward the sum of dX (all-reduce, or reduce-scatter), while dW is computed;
  of a tree's all-reduce, its first half
- sub-norm: forward two numbers per block and token, Σx² and max|x·g|; backward one
- row output: forward a sum of integers (``row_sums``); backward nothing, or under sequence
  parallelism an all-gather of dY
- KV heads that several ranks hold: nothing forward, the sum of dK and dV backward
- loss: for each token a maximum, then one sum per block of vocabulary and the target's logit

Activations are quantized once for q, k, v and once for gate, up. KV heads that TP does not divide
are held by every rank that reads them.
"""

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
