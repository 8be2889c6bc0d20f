"""Which parts of the model each pipeline stage holds."""

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


def stage_layouts(
    num_layers: int, pp: int, layers_per_stage: Sequence[int] | None = None
) -> list[StageLayout]:
    """Lay consecutive layers over ``pp`` stages.

    Args:
        num_layers: decoder layers of the whole model.
        pp: number of stages.
        layers_per_stage: layers on each stage; default: as even as possible, with the odd layers on
            the earliest stages, because the last one has the head's product to compute as well.

    Raises:
        ValueError: if the layout would lose or repeat a layer. Users hear of it earlier, from
            ``config.find_problems``.
    """
    counts = _even(num_layers, pp) if layers_per_stage is None else layers_per_stage
    if len(counts) != pp or min(counts) < 0 or sum(counts) != num_layers:
        raise ValueError(f"{list(counts)} does not lay {num_layers} layers over {pp} stages")
    ends = list(accumulate(counts))
    return [
        StageLayout(range(end - count, end), embedding=stage == 0, head=stage == pp - 1)
        for stage, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def _even(num_layers: int, pp: int) -> list[int]:
    share, odd = divmod(num_layers, pp)
    return [share + (stage < odd) for stage in range(pp)]
