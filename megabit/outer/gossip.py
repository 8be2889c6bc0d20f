"""Gossip: islands meet in pairs, other ones each time, and take the mean of the two. Experimental.

After every H steps a permutation that follows from (seed, round) pairs islands up; the two of a
pair send each other their masters in fp32 and both take (a + b) / 2, the same bits on both. With an
odd number of islands one goes on alone. (Boyd et al. 2006; for language models NoLoCo, arXiv
2506.10911, whose outer momentum is not here.)

A mean of pairs keeps the mean of all islands (but for rounding) and brings them closer: if islands
stood still, pairing at random would halve their distance every round, as a mean square, about. As
they train in between, they stay apart, and there are as many models as islands until ``conclude``
takes the mean of all.

A rank sends 4 bytes for each of its weights in a meeting: as much as DiLoCo in fp32 with two
islands, and half as much as with many. That saves bytes, not waiting: pairs exchange in one
all-to-all of all islands, in which others have nothing to say, instead of in a group for each pair
that there may be.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megabit.data_parallel import Piece, ZeroOptimizer
from megabit.outer.mean import PlainMean, start_mean
from megabit.outer.tensors import OuterTensor, by_bucket, outer_tensors, publish
from megabit.reduce import all_reduce, start_exchange


def partners(islands: int, seed: int, meeting: int) -> list[int]:
    """The partner of each island at a meeting; itself for one that goes on alone."""
    order = list(range(islands))
    random.Random(f"gossip {seed} {meeting}").shuffle(order)
    partner = list(range(islands))
    for a, b in zip(order[::2], order[1::2], strict=False):
        partner[a], partner[b] = b, a
    return partner


@dataclass
class Gossip:
    """Meetings of pairs; see ``opening.Outer``. It keeps nothing from one to the next."""

    optimizer: ZeroOptimizer
    inner_steps: int
    seed: int
    tensors: list[OuterTensor]
    distance: float = 0.0
    """Between islands just before the last meeting, the same on every rank: √(Σ(a−b)² / 2) as a
    root mean square over pairs. For pairs drawn at random it estimates how far islands are from
    their mean, times √(W/(W−1))."""

    @staticmethod
    def create(optimizer: ZeroOptimizer, inner_steps: int, seed: int) -> "Gossip":
        return Gossip(optimizer, inner_steps, seed, outer_tensors(optimizer))

    def begin(self) -> None:
        """See ``opening.Outer``."""

    def state(self) -> dict[str, Any]:
        """See ``opening.Outer``."""
        return {}

    def resume(self, state: Mapping[str, Any]) -> bool:
        """See ``opening.Outer``."""
        return False

    def after_step(self, step: int) -> bool:
        """See ``opening.Outer``."""
        if step % self.inner_steps:
            return False
        self.optimizer.publisher.settle()  # what still travels may be the masters' own memory
        pairs = partners(self.optimizer.mesh.outer.size, self.seed, step // self.inner_steps)
        self._meet(pairs)
        publish(self.optimizer, self.tensors)
        return True

    def conclude(self, step: int) -> bool:
        """See ``opening.Outer``."""
        self.optimizer.publisher.settle()
        for message in by_bucket(self.tensors):
            finish = start_mean([tensor.weights for tensor in message], self.optimizer.mesh.outer)
            for tensor, mean in zip(message, finish(), strict=True):
                tensor.weights.copy_(mean)
        publish(self.optimizer, self.tensors)
        return True

    def pieces(self, owned: bool = False) -> Iterator[Piece]:
        """See ``opening.Outer``."""
        yield from ()

    def meeting(self) -> str:
        """See ``opening.Outer``."""
        return f"islands were {self.distance:.3g} apart before they met" if self.distance else ""

    def expected_bytes(self, step: int, is_last: bool = False) -> float:
        """See ``opening.Outer``."""
        outer = self.optimizer.mesh.outer
        sent = 0.0
        if step % self.inner_steps == 0:  # the distance
            sent += 2 * (outer.size - 1) / outer.size * 8
        if is_last:
            sent += sum(PlainMean(outer).nbytes(message) for message in by_bucket(self.tensors))
        partner = partners(outer.size, self.seed, step // self.inner_steps)[outer.rank]
        if step % self.inner_steps == 0 and partner != outer.rank:
            sent += sum(tensor.weights.nbytes for tensor in self.tensors)
        return sent

    def _meet(self, pairs: list[int]) -> None:
        mesh = self.optimizer.mesh
        outer, partner = mesh.outer, pairs[mesh.outer.rank]
        square = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for message in by_bucket(self.tensors):
            weights = torch.cat([tensor.weights.flatten() for tensor in message])
            counts = [weights.numel() * (i == partner != outer.rank) for i in range(outer.size)]
            sent = weights if any(counts) else weights[:0]
            theirs = start_exchange(sent, counts, counts, outer, "outer").wait()
            if not any(counts):
                continue
            means = theirs.split([tensor.weights.numel() for tensor in message])
            for tensor, other in zip(message, means, strict=True):
                square += self._take(tensor, other.view_as(tensor.weights))
        total = all_reduce(all_reduce(square, mesh.island), outer, purpose="outer")
        paired = sum(partner != island for island, partner in enumerate(pairs))
        self.distance = math.sqrt(total.item() / (2 * paired)) if paired else 0.0

    def _take(self, tensor: OuterTensor, other: Tensor) -> Tensor:
        """Take the mean of both; Σ(a−b)² of the rows that this rank counts."""
        difference = tensor.owned_of(tensor.weights) - tensor.owned_of(other)
        tensor.weights.add_(other).div_(2)
        return difference.square().sum(dtype=torch.float64)
