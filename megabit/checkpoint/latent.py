"""γ and codes of ternary weights that are on disk as masters, some rows at a time.

γ belongs to the whole logical tensor, whatever part of it is wanted. It is made of integers that
are added over chunks (``tensor_parallel.weight_scale``), so chunks of any size give the bits that
training computed with.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megabit.checkpoint.source import Index, LogicalTensor, row_slices
from megabit.errors import UserError
from megabit.mesh import Axis
from megabit.tensor_parallel import OwnedElements, WeightScale
from megabit_kernels import TernaryWeight, numerics

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
    weight_scale: WeightScale = field(default_factory=WeightScale)
    """What γ is."""
    _scales: dict[str, Tensor] = field(default_factory=dict)
    """One number for each weight, so that no weight is read again for it."""

    def scale(self, name: str) -> Tensor:
        """γ, fp32, 0-dimensional; reads the whole weight when it is first asked for (for a
        median, four times).

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
            chunks = _Chunks(self, name)
            whole = OwnedElements(chunks, math.prod(self.tensors[name].shape))
            alone, cpu = Axis.single("tp"), torch.device("cpu")
            # In fp64 at first: before they are read, nobody knows what dtype the masters have.
            (scale,) = self.weight_scale.of_tensors([whole], alone, torch.float64, cpu)
            if not scale.isfinite():
                raise UserError(
                    f"{self.path}: {name} holds a value that is not finite, or of "
                    f"{numerics.MAX_COUNTED:.0f} or more; it cannot be ternarized"
                )
            self._scales[name] = scale.to(chunks.dtype)
        return self._scales[name]


@dataclass
class _Chunks:
    """Of a weight, each read when it is come to."""

    weights: LatentWeights
    name: str
    dtype: torch.dtype = torch.float32
    """Of statistics of what has been read."""

    def __iter__(self) -> Iterator[Tensor]:
        for rows in row_slices(self.weights.tensors[self.name].whole, CHUNK_ELEMENTS):
            values = self.weights.read(self.name, rows)
            self.dtype = numerics.stats_dtype(values.dtype)
            yield values
