"""Random operands: on every device the same numbers, made where tests make their tensors."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=_generator(seed), device="cpu")
    return x.to(torch.get_default_device(), dtype)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    """fp32 in [0, 1)."""
    x = torch.rand(shape, generator=_generator(seed), device="cpu")
    return x.to(torch.get_default_device())


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    """int64 in [low, high)."""
    x = torch.randint(low, high, shape, generator=_generator(seed), device="cpu")
    return x.to(torch.get_default_device())


def activations(m: int, k: int, seed: int = 0) -> Tensor:
    """int8 of the whole range."""
    return integers(-128, 128, m, k, seed=seed).to(torch.int8)


def ternary(n: int, k: int, seed: int = 1) -> Tensor:
    """int8 codes."""
    return integers(-1, 2, n, k, seed=seed).to(torch.int8)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)
