"""Which stages each pipeline rank holds.

A *stage* is a run of consecutive layers. A rank holds one of them or several, its *chunks*, so that
a microbatch passes through the ranks more than once and a bubble is only as long as a chunk.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The stages of each rank, by chunk."""

    stages: tuple[tuple[int, ...], ...]

    @staticmethod
    def loop(ranks: int, chunks: int = 1) -> "Placement":
        """Round and round: stages 0 … p−1 on ranks 0 … p−1, then stage p on rank 0 again."""
        return Placement(tuple(tuple(range(rank, ranks * chunks, ranks)) for rank in range(ranks)))

    @staticmethod
    def v(ranks: int) -> "Placement":
        """There and back: rank r has stages r and 2p−1−r, so that rank 0 has both ends."""
        return Placement(tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))

    @property
    def ranks(self) -> int:
        """Pipeline ranks, p."""
        return len(self.stages)

    @property
    def chunks(self) -> int:
        """Stages on each rank, v."""
        return len(self.stages[0])

    @property
    def num_stages(self) -> int:
        """Stages of the model, p · v."""
        return self.ranks * self.chunks

    @property
    def problem(self) -> str | None:
        """What is wrong with it, if anything."""
        counts = {len(chunks) for chunks in self.stages}
        if len(counts) != 1 or counts == {0}:
            return "ranks hold different numbers of stages, or none"
        if sorted(stage for chunks in self.stages for stage in chunks) != [*range(self.num_stages)]:
            return f"does not have each of the stages 0 to {self.num_stages - 1} once"
        if any(list(chunks) != sorted(chunks) for chunks in self.stages):
            return "has a rank whose later chunk comes earlier in the model"
        if self.rank_of(0) != 0 or self.rank_of(self.num_stages - 1) not in (0, self.ranks - 1):
            return "must have the first stage on rank 0, and the last on rank 0 or the last rank"
        return None

    def stage(self, rank: int, chunk: int) -> int:
        """Which stage of the model a chunk of a rank is."""
        return self.stages[rank][chunk]

    def rank_of(self, stage: int) -> int:
        """Which rank has a stage."""
        return self._places[stage][0]

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's chunks ``stage`` is."""
        return self._places[stage][1]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """The rank and the chunk of each stage."""
        return {
            stage: (rank, chunk)
            for rank, chunks in enumerate(self.stages)
            for chunk, stage in enumerate(chunks)
        }
