"""Which parts of the model each pipeline stage has."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class StageLayout:
    """The parts of the model on one stage."""

    layers: range
    """Decoder layers, by their index in the whole model; may be empty."""
    embedding: bool
    head: bool
    """Final norm, output head and loss."""


def stage_layouts(layers_per_stage: Sequence[int]) -> tuple[StageLayout, ...]:
    """Lay consecutive layers over stages; the embedding is on the first and the head on the last.

    Args:
        layers_per_stage: first stage first. That they add up to the model's layers is for
            ``config.find_problems`` to see.
    """
    ends = [*accumulate(layers_per_stage)]
    return tuple(
        StageLayout(range(end - count, end), embedding=stage == 0, head=stage == len(ends) - 1)
        for stage, (count, end) in enumerate(zip(layers_per_stage, ends, strict=True))
    )
