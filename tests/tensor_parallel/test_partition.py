"""Blocks of a dimension: cover it once, at any degree, and reduce to the same bits."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megabit.tensor_parallel.partition import (
    ALIGNMENT,
    BlockPartition,
    Span,
    reduce_blocks,
    whole,
)

partitions = st.integers(1, 40).flatmap(
    lambda blocks: st.builds(
        BlockPartition, st.integers(ALIGNMENT * blocks, 400 + 4 * blocks), st.just(blocks)
    )
)


def degrees(partition: BlockPartition) -> list[int]:
    return [d for d in range(1, partition.num_blocks + 1) if partition.num_blocks % d == 0]


@given(partitions)
def test_every_degree_covers_each_element_once_in_whole_blocks(partition: BlockPartition) -> None:
    unsplit = partition.span(0, 1)
    assert (unsplit.start, unsplit.stop, unsplit.first_block) == (0, partition.size, 0)
    for degree in degrees(partition):
        spans = [partition.span(rank, degree) for rank in range(degree)]
        assert [i for span in spans for i in range(span.start, span.stop)] == list(
            range(partition.size)
        )
        assert tuple(w for span in spans for w in span.block_widths) == unsplit.block_widths
        for rank, span in enumerate(spans):
            assert span.first_block == rank * partition.num_blocks // degree
            assert sum(span.block_widths) == span.width
            assert (span.owned_start, span.owned_stop) == (span.start, span.stop)
            assert (span.size, span.num_blocks) == (partition.size, partition.num_blocks)
            assert span.is_replicated == (degree == 1)
            assert not span.is_shared


@given(partitions)
def test_blocks_are_nearly_equal_and_begin_at_multiples_of_four(partition: BlockPartition) -> None:
    widths = partition.span(0, 1).block_widths
    tail = partition.size % ALIGNMENT  # of the last block
    aligned = (*widths[:-1], widths[-1] - tail)
    assert all(width > 0 and width % ALIGNMENT == 0 for width in aligned)
    assert max(aligned) - min(aligned) <= ALIGNMENT


def test_the_feed_forward_layer_of_2b4t() -> None:
    """6912 columns in 20 blocks: no degree but 1, 2 and 4 could give every rank as many."""
    partition = BlockPartition(6912, 20)
    assert set(partition.span(0, 1).block_widths) == {344, 348}
    spans = [partition.span(rank, 5) for rank in range(5)]
    assert [span.width for span in spans] == [1380, 1384, 1380, 1384, 1384]
    assert [span.first_block for span in spans] == [0, 4, 8, 12, 16]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks do not divide 20 blocks"):
        BlockPartition(6912, 20).span(0, 3)
    with pytest.raises(ValueError, match="79 elements are too few for 20 blocks"):
        BlockPartition(79, 20)


def test_owned_parts() -> None:
    span = BlockPartition(32, 4).span(1, 2)
    x = torch.arange(32.0).expand(3, 32)[:, span.start : span.stop]
    assert torch.equal(span.owned(x, 1), x)
    last_half = span.owning(24, 32)
    assert last_half.is_shared
    assert (last_half.start, last_half.stop) == (span.start, span.stop)
    assert last_half.owned(x, 1)[0].tolist() == list(range(24, 32))
    assert last_half.owned(x.t(), 0).shape == (8, 3)
    assert span.owning(16, 16).owned(x, 1).shape == (3, 0)


@pytest.mark.parametrize("owned", [True, False])
def test_a_replicated_dimension(owned: bool) -> None:
    span = whole(24, owned)
    assert (span.start, span.stop, span.width, span.block_widths) == (0, 24, 24, (24,))
    assert span.is_replicated
    assert span.owned(torch.ones(24), 0).numel() == (24 if owned else 0)


@pytest.mark.parametrize(
    "reduction",
    [
        pytest.param(lambda block: block.sum(-1), id="sum"),
        pytest.param(lambda block: block.amax(-1), id="amax"),
        pytest.param(lambda block: block.sum(-1, dtype=torch.float64), id="sum in fp64"),
    ],
)
@pytest.mark.parametrize("size", [6912, 6400, 163], ids=["unequal", "equal", "tail"])
@pytest.mark.parametrize("tokens", [1, 3, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_has_the_same_bits_whatever_is_beside_it(
    reduction: Callable[[Tensor], Tensor], size: int, tokens: int, dtype: torch.dtype
) -> None:
    x = torch.randn(tokens, size, dtype=dtype)
    partition = BlockPartition(size, 20)

    def reduced(span: Span) -> Tensor:
        return reduce_blocks(
            x[:, span.start : span.stop].contiguous(), span.block_widths, reduction
        )

    unsplit = reduced(partition.span(0, 1))
    edges = [partition.edge(block) for block in range(21)]
    by_loop = [reduction(x[:, a:b].contiguous()) for a, b in pairwise(edges)]
    assert torch.equal(unsplit, torch.stack(by_loop, -1))
    for degree in (2, 4, 5, 10, 20):
        parts = [reduced(partition.span(rank, degree)) for rank in range(degree)]
        assert torch.equal(unsplit, torch.cat(parts, -1))
