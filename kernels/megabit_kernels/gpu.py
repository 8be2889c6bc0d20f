"""The operations on a CUDA device, by the Triton kernels; Triton is imported when first used."""

import importlib.util

import torch
from torch import Tensor

from megabit_kernels.epilogue import Epilogue


def is_available() -> bool:
    """Whether there is a CUDA device and a Triton to compile for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def packed_product(x_q: Tensor, planes: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    raise AssertionError


def split_k_product(x_q: Tensor, planes: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    raise AssertionError


def ternarize(weight: Tensor, scale: Tensor, layout: str) -> Tensor:
    raise AssertionError
