"""Kernels of the ternary product. This package never imports ``megabit``."""

from megabit_kernels.dispatch import ternary_matmul

__all__ = ["ternary_matmul"]
