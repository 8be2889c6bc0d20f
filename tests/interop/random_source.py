"""A random model as a ``ModelSource``: what exporters are given in tests."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megabit.checkpoint.source import Index, LogicalTensor, logical_tensors
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit_kernels import numerics, packing

TINY = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@dataclass(frozen=True)
class RandomSource:
    """Values depend on the seed and the tensor's name only; nothing is kept between calls.

    Rows of a weight differ in size, so that a scale taken of a part of it shows.
    """

    model: ModelConfig = TINY
    seed: int = 0
    has_masters: bool = True
    assets: Mapping[str, Path] = field(default_factory=dict)
    max_length: int = 64
    path: Path = Path("random-model")

    def values(self, name: str, index: Index | None = None) -> Tensor:
        """fp32."""
        if self._tensor(name).is_ternary and not self.has_masters:
            raise UserError(f"{self.path}: has no masters of {name}; it holds codes and scales")
        return self._master(name)[index or ...]

    def codes(self, name: str, index: Index | None = None) -> Tensor:
        codes = numerics.ternarize(self._master(name), self.scale(name))
        return packing.pack(codes[index or ...])

    def scale(self, name: str) -> Tensor:
        assert self._tensor(name).is_ternary
        return numerics.absmean_scale(self._master(name))

    def _tensor(self, name: str) -> LogicalTensor:
        return logical_tensors(self.model)[name]

    def _master(self, name: str) -> Tensor:
        shape = self._tensor(name).shape
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        if len(shape) == 1:
            return 0.5 + torch.rand(shape, generator=generator)
        rows = 0.01 + 0.04 * torch.rand(shape[0], 1, generator=generator)
        return torch.randn(shape, generator=generator) * rows
