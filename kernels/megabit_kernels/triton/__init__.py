"""Kernels for GPUs, written in Triton. Nothing here is imported before a GPU (or a test) asks."""
