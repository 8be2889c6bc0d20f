"""Data parallelism: gradients in buckets, and the ternary-native ZeRO optimizer."""

from megabit.data_parallel.buckets import GradientBuckets
from megabit.data_parallel.masters import Piece
from megabit.data_parallel.zero import ZeroOptimizer

__all__ = ["GradientBuckets", "Piece", "ZeroOptimizer"]
