"""How a dimension is cut over tensor-parallel ranks: in fixed blocks, then whole blocks to ranks.

Every tensor-parallel dimension (heads, feed-forward columns, vocabulary rows) is cut into as many
blocks as the model has attention heads, whatever the TP degree. So each TP that divides the heads
gives every rank the same number of whole blocks, and sums taken block by block have the same bits
at every degree. Blocks need not be equally wide: 6912 columns in 20 blocks are 344 or 348 wide
each.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

ALIGNMENT = 4
"""Blocks begin at multiples of this, so that packed codes (4 to a byte) can be cut there."""


@dataclass(frozen=True)
class Span:
    """The part of a dimension of a logical tensor that one rank holds.

    ``owned_start:owned_stop`` is the part that this rank counts where replicas must be counted once
    (norms, weight scales, saved tensors): over all ranks, owned parts are disjoint and complete.
    All positions are those of the logical dimension.
    """

    size: int
    num_blocks: int
    """Blocks of the whole logical dimension."""
    start: int
    stop: int
    owned_start: int
    owned_stop: int
    first_block: int
    block_widths: tuple[int, ...]
    """Widths of the blocks from ``first_block`` on that ``start:stop`` consists of."""
    is_shared: bool = False
    """Whether parts of the dimension are held by several ranks, each on its own account."""

    def __str__(self) -> str:
        return f"{self.start}:{self.stop} of {self.size}"

    @property
    def width(self) -> int:
        """Elements in it."""
        return self.stop - self.start

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of it."""
        return self.width == self.size

    def owning(self, start: int, stop: int) -> "Span":
        """The same span, of which this rank counts ``start:stop`` only and others the rest."""
        return replace(self, owned_start=start, owned_stop=stop, is_shared=True)

    def owned(self, x: Tensor, dim: int) -> Tensor:
        """The owned part of ``x``, whose dimension ``dim`` is this span."""
        return x.narrow(dim, self.owned_start - self.start, self.owned_stop - self.owned_start)


@dataclass(frozen=True)
class BlockPartition:
    """``size`` elements in ``num_blocks`` blocks of nearly equal width."""

    size: int
    num_blocks: int

    def __post_init__(self) -> None:
        if self.size < ALIGNMENT * self.num_blocks:
            raise ValueError(f"{self.size} elements are too few for {self.num_blocks} blocks")

    def edge(self, block: int) -> int:
        """Where ``block`` begins; ``edge(num_blocks)`` is the size."""
        if block == self.num_blocks:
            return self.size
        return ALIGNMENT * (block * (self.size // ALIGNMENT) // self.num_blocks)

    def blocks(self, first: int, last: int) -> Span:
        """The span of blocks ``first`` to ``last`` (exclusive), owned whole."""
        edges = [self.edge(block) for block in range(first, last + 1)]
        widths = tuple(b - a for a, b in pairwise(edges))
        start, stop = edges[0], edges[-1]
        return Span(self.size, self.num_blocks, start, stop, start, stop, first, widths)

    def span(self, rank: int, degree: int) -> Span:
        """The span of ``rank`` out of ``degree``; ``degree`` divides ``num_blocks``."""
        count, rest = divmod(self.num_blocks, degree)
        if rest:
            raise ValueError(f"{degree} ranks do not divide {self.num_blocks} blocks")
        return self.blocks(rank * count, (rank + 1) * count)


def whole(size: int, owned: bool) -> Span:
    """The span of a replicated dimension; ``owned`` on exactly one of the ranks that hold it."""
    return Span(size, 1, 0, size, 0, size if owned else 0, 0, (size,))


def reduce_blocks(
    x: Tensor, widths: tuple[int, ...], reduction: Callable[[Tensor], Tensor]
) -> Tensor:
    """Reduce each block of the last dimension: ``[…, Σ widths]`` → ``[…, len(widths)]``.

    ``reduction`` maps ``[…, w]`` to ``[…]``. A block's result depends on the block alone, not on
    how many blocks there are beside it.
    """
    if len(set(widths)) == 1:
        return reduction(x.unflatten(-1, (len(widths), widths[0])))
    return torch.stack([reduction(block) for block in x.split(widths, dim=-1)], dim=-1)


def block_sums(x: Tensor, columns: Span) -> Tensor:
    """``[T, k]`` → ``[T, b]``: the sum of each of this rank's blocks."""
    return reduce_blocks(x, columns.block_widths, lambda block: block.sum(-1))
