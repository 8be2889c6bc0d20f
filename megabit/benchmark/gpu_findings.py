"""What the parts of the benchmark of one GPU share: where they run, and what they have found."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megabit.benchmark.document import Row


@dataclass(frozen=True)
class Place:
    """Where and how thoroughly."""

    device: torch.device
    is_quick: bool
    cache_bytes: int
    """Of the device's last-level cache."""
    told: Callable[[str], None]
    """Hears what is measured now."""

    @property
    def budget_s(self) -> float:
        """For one contestant of a kernel."""
        return 0.005 if self.is_quick else 0.05


@dataclass
class Findings:
    """Filled while a part runs, so that what was found before its time ended is there."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    peak_flops: float | None = None
    """Operations a second of a large bf16 product, as measured."""
