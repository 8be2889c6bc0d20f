"""When each rank computes what in a step: as simulated, or as measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from megabit.pipeline.actions import Compute
from megabit.pipeline.placement import Placement


@dataclass(frozen=True)
class Span:
    """A compute from its start to its end, in seconds or in any other unit."""

    compute: Compute
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The computes of each rank, in order, on one clock for all of them."""

    placement: Placement
    ranks: Sequence[Sequence[Span]]

    def computes(self, rank: int) -> list[Compute]:
        """What a rank computes, in order."""
        return [span.compute for span in self.ranks[rank]]

    @property
    def start(self) -> float:
        """When the first rank begins to compute."""
        return min(spans[0].start for spans in self.ranks if spans)

    @property
    def end(self) -> float:
        """When the last rank has computed all."""
        return max(spans[-1].end for spans in self.ranks if spans)

    @property
    def duration(self) -> float:
        """From the first start to the last end."""
        return self.end - self.start

    @property
    def busy(self) -> float:
        """The time that all ranks compute, added up."""
        return sum(span.duration for spans in self.ranks for span in spans)

    @property
    def bubble(self) -> float:
        """The time that ranks are idle, for each unit of time that they compute."""
        return self.duration * len(self.ranks) / self.busy - 1
