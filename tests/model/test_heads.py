"""Which heads each rank computes, for every degree that divides the query heads."""

import pytest

from megabit.model.kv_heads import HeadSplit, kv_rows


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


CASES = [
    (heads, kv_heads, degree)
    for heads in (1, 2, 3, 4, 6, 8, 12, 20)
    for kv_heads in divisors(heads)
    for degree in divisors(heads)
]


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), CASES)
def test_every_split(heads: int, kv_heads: int, degree: int) -> None:
    splits = [HeadSplit(heads, kv_heads, rank, degree) for rank in range(degree)]
    group = heads // kv_heads  # query heads that read the same KV head
    assert [head for split in splits for head in split.query] == list(range(heads))
    assert [head for split in splits for head in split.owned_kv] == list(range(kv_heads))
    for rank, split in enumerate(splits):
        assert set(split.kv) == {head // group for head in split.query}  # all it reads, no more
        read = [split.kv[local] for local in split.kv_of_query]
        assert read == [head // group for head in split.query]
        earlier = {head for other in splits[:rank] for head in other.kv}
        assert set(split.owned_kv) == set(split.kv) - earlier


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), CASES)
def test_rows_of_the_kv_projections(heads: int, kv_heads: int, degree: int) -> None:
    head_dim = 8
    splits = [HeadSplit(heads, kv_heads, rank, degree) for rank in range(degree)]
    spans = [kv_rows(split, head_dim) for split in splits]
    owned = [row for span in spans for row in range(span.owned_start, span.owned_stop)]
    assert owned == list(range(kv_heads * head_dim))
    for split, span in zip(splits, spans, strict=True):
        assert (span.start, span.stop) == (split.kv.start * head_dim, split.kv.stop * head_dim)
        assert span.start <= span.owned_start <= span.owned_stop <= span.stop
        assert span.block_widths == (head_dim,) * len(split.kv)
    # A gradient is one term of a sum wherever some head is on two ranks; all ranks must agree.
    held = [head for split in splits for head in split.kv]
    assert {span.is_shared for span in spans} >= {len(held) > kv_heads}
    assert len({span.is_shared for span in spans}) == 1


@pytest.mark.parametrize(
    ("degree", "kv", "owned"),
    [
        (1, [[0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4]]),
        (2, [[0, 1, 2], [2, 3, 4]], [[0, 1, 2], [3, 4]]),
        (4, [[0, 1], [1, 2], [2, 3], [3, 4]], [[0, 1], [2], [3], [4]]),
        (5, [[0], [1], [2], [3], [4]], [[0], [1], [2], [3], [4]]),
        (10, [[i // 2] for i in range(10)], [[i // 2] if i % 2 == 0 else [] for i in range(10)]),
        (20, [[i // 4] for i in range(20)], [[i // 4] if i % 4 == 0 else [] for i in range(20)]),
    ],
)
def test_bitnet_2b4t(degree: int, kv: list[list[int]], owned: list[list[int]]) -> None:
    """20 query and 5 KV heads."""
    splits = [HeadSplit(20, 5, rank, degree) for rank in range(degree)]
    assert [list(split.kv) for split in splits] == kv
    assert [list(split.owned_kv) for split in splits] == owned
