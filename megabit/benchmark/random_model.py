"""A ternary model with random weights, as Hugging Face's ``transformers`` has it on disk.

Speed does not depend on what a model has learnt.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megabit.checkpoint.source import Index, LogicalTensor, logical_tensors
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.interop.huggingface import export_huggingface
from megabit_kernels.packing import pack


def save_random_model(
    out: Path, model: ModelConfig, max_length: int, dtype: Literal["bfloat16", "float32"]
) -> None:
    """Write ``model`` to the new folder ``out``: ``offline``, ``autobitlinear``.

    Raises:
        UserError: transformers has no such model.
    """
    export_huggingface(RandomModel(model, max_length), out, "offline", "autobitlinear", dtype)


@dataclass(frozen=True)
class RandomModel:
    """A ``ModelSource`` of codes and scales."""

    model: ModelConfig
    max_length: int

    @property
    def path(self) -> Path:
        return Path("random model")

    @property
    def has_masters(self) -> bool:
        return False

    @property
    def assets(self) -> Mapping[str, Path]:
        return {}

    def values(self, name: str, index: Index | None = None) -> Tensor:
        tensor = self._tensor(name)
        if tensor.is_ternary:
            raise UserError(f"{self.path}: has codes of {name} only")
        if len(tensor.shape) == 1:
            return torch.ones(tensor.shape)[index or ...]
        # As large as embeddings of trained models: tokens differ, and greedy answers are no loops.
        return torch.randn(tensor.shape, generator=_generator(name))[index or ...]

    def codes(self, name: str, index: Index | None = None) -> Tensor:
        shape = self._tensor(name).shape
        codes = torch.randint(-1, 2, shape, dtype=torch.int8, generator=_generator(name))
        return pack(codes[index or ...])

    def scale(self, name: str) -> Tensor:
        return torch.tensor(self._tensor(name).shape[1] ** -0.5)

    def _tensor(self, name: str) -> LogicalTensor:
        return logical_tensors(self.model)[name]


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))
