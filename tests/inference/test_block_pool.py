"""Blocks: nobody's are given away, prefixes are found again, the longest unused goes first."""

from megabit.inference.block_pool import ROOT, BlockPool, chained


def pool(blocks: int = 4, size: int = 2, prefix: bool = True) -> BlockPool:
    return BlockPool(blocks, size, prefix)


def test_what_is_allocated_is_not_free_until_all_users_are_gone() -> None:
    blocks = pool()
    first = blocks.allocate(3)
    assert sorted(first) == first == [0, 1, 2]
    assert blocks.num_free == 1
    assert blocks.num_used == 3
    blocks.share(first[:1])
    blocks.free(first)
    assert blocks.num_used == 1
    blocks.free(first[:1])
    assert blocks.num_used == 0


def test_a_prefix_is_found_as_far_as_it_is_the_same() -> None:
    blocks = pool()
    taken = blocks.allocate(3)
    digests = [ROOT]
    for number, tokens in enumerate(([1, 2], [3, 4], [5, 6])):
        digests.append(chained(digests[-1], tokens))
        blocks.remember(taken[number], digests[-1])
    blocks.free(taken)
    other = chained(digests[2], [5, 7])
    assert blocks.find(digests[1:]) == taken
    assert blocks.find([*digests[1:3], other]) == taken[:2]
    # The same tokens after others are another block.
    assert blocks.find([chained(ROOT, [3, 4])]) == []
    assert blocks.num_free_among(taken) == 3
    blocks.share(taken[:2])
    assert blocks.num_free_among(taken) == 1
    assert blocks.num_used == 2


def test_the_end_of_the_longest_unused_prefix_is_given_away_first() -> None:
    blocks = pool(4)
    old, new = blocks.allocate(2), blocks.allocate(2)
    chains = {}
    for name, taken in (("old", old), ("new", new)):
        first = chained(ROOT, [len(name), *map(ord, name)])
        chains[name] = [first, chained(first, [9, 9])]
        for block, digest in zip(taken, chains[name], strict=True):
            blocks.remember(block, digest)
    blocks.free(old)
    blocks.free(new)
    assert blocks.allocate(1) == [old[1]]
    assert blocks.find(chains["old"]) == old[:1]
    assert blocks.allocate(1) == [old[0]]
    assert blocks.find(chains["old"]) == []
    assert blocks.find(chains["new"]) == new


def test_nothing_is_found_without_a_prefix_cache() -> None:
    blocks = pool(prefix=False)
    taken = blocks.allocate(1)
    digest = chained(ROOT, [1, 2])
    blocks.remember(taken[0], digest)
    assert blocks.find([digest]) == []
