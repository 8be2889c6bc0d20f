"""Sequences of tokens of different lengths as microbatches that are the same at every layout.

What a microbatch is made of, and its shape, must not depend on the layout, for the results to have
the same bits. So microbatches are made of all sequences first, and then dealt to DP ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megabit.mesh import Axis

T = TypeVar("T")


@dataclass(frozen=True)
class Shapes:
    """The shape ``[batch_size, S]`` of microbatches, for sequences of any length up to
    ``max_length``.

    S is a multiple of ``multiple``, or ``max_length``. With the number of attention heads for it,
    tokens can be split over TP at every degree (sequence parallelism), if they can be at
    ``max_length``.
    """

    batch_size: int
    max_length: int
    multiple: int

    def pad(self, sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Up to ``batch_size`` sequences as int64 ``[batch_size, S]``, with zeros behind each and
        in the rows that are left over. Attention is causal: nothing looks at what is behind."""
        longest = max(len(sequence) for sequence in sequences)
        length = min(-(-longest // self.multiple) * self.multiple, self.max_length)
        tokens = torch.zeros(self.batch_size, length, dtype=torch.int64)
        for row, sequence in zip(tokens, sequences, strict=False):
            row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        return tokens.to(device)


def by_length(sequences: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """The numbers of all sequences, as microbatches of similar lengths, the longest first."""
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), [*sequences[i]], i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def dealt(items: Sequence[T], group_size: int, dp: Axis) -> Iterator[Sequence[T]]:
    """This DP rank's groups of consecutive items; the last group may be smaller."""
    for start in range(dp.rank * group_size, len(items), dp.size * group_size):
        yield items[start : start + group_size]
