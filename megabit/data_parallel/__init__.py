"""Data parallelism: gradient buckets and their overlapped reduction."""

from megabit.data_parallel.buckets import GradientBuckets

__all__ = ["GradientBuckets"]
