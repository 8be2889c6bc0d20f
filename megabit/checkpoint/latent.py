"""γ and codes of ternary weights that are on disk as masters, some rows at a time.

γ belongs to the whole logical tensor, whatever part of it is wanted. Σ|W| is a sum of integers
(``megabit_kernels.numerics``), so chunks of any size give the bits that training computed with.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megabit.checkpoint.source import Index, LogicalTensor, row_slices
from megabit.errors import UserError
from megabit_kernels import TernaryWeight, abs_sum, numerics

CHUNK_ELEMENTS = 1 << 22
"""Of a master weight, in memory at a time (16 MiB in fp32); at least a row."""


@dataclass(frozen=True)
class LatentWeights:
    """``scale`` and ``codes`` for a ``ModelSource`` that has masters."""

    path: Path
    """For messages."""
    tensors: Mapping[str, LogicalTensor]
    read: Callable[[str, Index], Tensor]
    """Part of a master weight, in the dtype that it is stored in."""
    _scales: dict[str, Tensor] = field(default_factory=dict)
    """One number for each weight, so that no weight is read twice for it."""

    def scale(self, name: str) -> Tensor:
        """γ, fp32, 0-dimensional; reads the whole weight when it is first asked for.

        Raises:
            UserError: the weight holds what is not finite.
        """
        return self._scale(name).to(torch.float32)

    def codes(self, name: str, index: Index | None = None) -> Tensor:
        """Canonical packed codes of a part: uint8 ``[n, ceil(k/4)]``."""
        scale = self._scale(name)
        return torch.cat(
            [
                TernaryWeight.from_latent(self.read(name, rows), scale, "packed").data
                for rows in row_slices(index or self.tensors[name].whole, CHUNK_ELEMENTS)
            ]
        )

    def _scale(self, name: str) -> Tensor:
        """In the dtype of statistics: fp64 if the masters are."""
        if name not in self._scales:
            tensor = self.tensors[name]
            numel = math.prod(tensor.shape)
            total = torch.zeros(2, dtype=torch.int64)
            dtype = torch.float32
            for rows in row_slices(tensor.whole, CHUNK_ELEMENTS):
                values = self.read(name, rows)
                dtype = numerics.stats_dtype(values.dtype)
                total += abs_sum(values, numel)
            scale = numerics.weight_scale(total, numel, dtype)
            if not scale.isfinite():
                raise UserError(
                    f"{self.path}: {name} holds a value that is not finite, or of "
                    f"{numerics.MAX_COUNTED:.0f} or more; it cannot be ternarized"
                )
            self._scales[name] = scale
        return self._scales[name]
