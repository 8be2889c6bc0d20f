"""What the activations of ternary layers are quantized to, counted while a forward pass runs."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

LARGEST = 127
"""int8 activations saturate here: the largest of a token always does."""


@dataclass
class ActivationProbe:
    """Counts by layer, of this rank's part and of all microbatches that carry the probe."""

    counts: dict[str, Tensor] = field(default_factory=dict)
    """int64 ``[2]`` by the name of the layer: saturated values, all values."""

    @torch.no_grad()
    def add(self, name: str, x_q: Tensor) -> None:
        """Count int8 ``x_q`` of any shape for the layer ``name``; nothing waits for a GPU here."""
        saturated = (x_q.abs() >= LARGEST).sum()
        total = torch.full_like(saturated, x_q.numel())
        counted = torch.stack([saturated, total])
        self.counts[name] = self.counts[name] + counted if name in self.counts else counted
