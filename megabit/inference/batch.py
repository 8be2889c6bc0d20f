"""What one forward pass of the engine computes: tokens of many sequences, one after the other.

A batch is put together where requests are scheduled, and travels from stage to stage as bytes, in
front of the hidden states. Ranks keep nothing of a sequence but the blocks of their KV cache, and
all that concerns those is in the batch.
"""

import json
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Kind(IntEnum):
    """What a rank does with it."""

    FORWARD = 0
    REPORT = 1
    """Nothing; ranks exchange how they are."""
    END = 2
    """Nothing, and no batch follows."""


class Wanted(NamedTuple):
    """What is wanted of the logits of one row of a batch."""

    row: int
    target: int | None
    """The token whose log probability is wanted, of a prompt; None: one is to be drawn."""
    logprobs: int | None
    """Log probabilities of so many likeliest tokens, and of the token; None: none."""
    sampling: dict[str, Any] | None
    """Fields of ``sampling.RowSampling``; None: the likeliest token."""


@dataclass(frozen=True)
class Batch:
    """T tokens of n sequences; ``query_starts[i]`` is the first one of sequence i."""

    kind: Kind
    number: int
    """Of the forward pass, since the engine's start."""
    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """``[T]``"""
    positions: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """``[T]``: of tokens in their sequences."""
    slots: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """``[T]``: where keys and values are kept: block · block size + place in the block."""
    query_starts: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    """``[n + 1]``"""
    context_lengths: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """``[n]``: tokens of a sequence that are known after the pass."""
    block_tables: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """``[n, B]``: the blocks of each, padded with zeros."""
    wanted: tuple[Wanted, ...] = ()
    is_lossy: bool = True
    """Whether sums over TP may be rounded, where that is set up."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def result_shape(self) -> tuple[int, int]:
        """Of what the last stage answers, fp64: for each wanted row a token, its log probability,
        and tokens (−1: none) and log probabilities of the likeliest. At least one row, as an empty
        batch is answered, too."""
        most = max((wanted.logprobs or 0 for wanted in self.wanted), default=0)
        return max(1, len(self.wanted)), 2 + 2 * most

    def encode(self) -> npt.NDArray[np.uint8]:
        """As bytes, uint8."""
        rest = json.dumps([[*wanted] for wanted in self.wanted]).encode()
        head = [
            self.kind,
            self.number,
            self.is_lossy,
            self.num_tokens,
            *self.block_tables.shape,
            len(rest),
        ]
        arrays = [
            np.array(head, np.int64),
            self.tokens,
            self.positions,
            self.slots,
            self.query_starts,
            self.context_lengths,
            self.block_tables.reshape(-1),
        ]
        packed = np.concatenate(arrays).view(np.uint8)
        return np.concatenate([packed, np.frombuffer(rest, np.uint8)])

    @staticmethod
    def decode(data: npt.NDArray[np.uint8]) -> "Batch":
        """What ``encode`` made of one."""
        size = np.dtype(np.int64).itemsize
        head = data[: 7 * size].view(np.int64)
        kind, number, is_lossy, tokens, sequences, blocks, rest = (int(value) for value in head)
        lengths = [tokens, tokens, tokens, sequences + 1, sequences, sequences * blocks]
        end = (7 + sum(lengths)) * size
        content = data[7 * size : end].view(np.int64)
        of_tokens, positions, slots, starts, contexts, tables = np.split(
            content, np.cumsum(lengths)[:-1]
        )
        wanted = json.loads(data[end : end + rest].tobytes())
        return Batch(
            Kind(kind),
            number,
            of_tokens,
            positions,
            slots,
            starts,
            contexts,
            block_tables=tables.reshape(sequences, blocks),
            wanted=tuple(Wanted(*fields) for fields in wanted),
            is_lossy=bool(is_lossy),
        )
