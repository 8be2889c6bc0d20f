"""Which blocks of the KV cache are whose, and which of them hold a prefix that others may share.

A block is *full* when the keys and values of all of its tokens are computed. What it holds follows
from its tokens and all before them, so full blocks are found by a digest of those (a chain of
digests, block by block). A block that nobody uses keeps what it holds until it is needed for
something else, the longest unused one first.

All ranks compute batches in one order. So a block counts as computed once the batch that fills it
is put together: whatever reads it is in that batch or in a later one.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Digest = bytes
ROOT: Digest = b""
"""What the digest of a first block continues."""


def chained(parent: Digest, tokens: Sequence[int]) -> Digest:
    """The digest of a full block with ``tokens`` after blocks with the digest ``parent``. Nobody
    who chooses prompts can make two of them meet."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Blocks 0 to ``num_blocks`` − 1, each free or used by one sequence or several."""

    def __init__(self, num_blocks: int, block_size: int, has_prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.has_prefix_cache = has_prefix_cache
        self._users = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """The next one to be taken first."""
        self._block_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens of a sequence take."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """So many blocks for one user; at least as many are free."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """One user less. Of blocks that nobody uses any more, the last ones are given away first:
        a prefix is of use without what follows, but not the other way round."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None

    def find(self, digests: Sequence[Digest]) -> list[int]:
        """The blocks of the longest prefix of a chain that is there."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of them nobody uses: sharing those leaves fewer for others."""
        return sum(self._users[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One user more."""
        for block in blocks:
            if self._users[block] == 0:
                del self._free[block]
            self._users[block] += 1

    def forget_prefixes(self) -> None:
        """What blocks hold is not to be shared any more."""
        self._block_of.clear()
        self._digest_of.clear()

    def remember(self, block: int, digest: Digest) -> None:
        """That ``block`` is full, with that digest."""
        if self.has_prefix_cache and digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
