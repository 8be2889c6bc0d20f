"""For debugging: ranks compare what they are about to call, before each collective runs.

Where ranks call different collectives, or of different shapes, gloo ends the process and NCCL hangs
or gives wrong numbers; neither says who called what. With ``faults.check_collectives`` each rank
first tells the others of the axis in one message, always of the same size:

    reduce.start_…  →  Axis.check  →  message [header | sent to each rank | received from each rank]
                                      all-gathered over the axis  →  all the same? or RunError

It raises on all ranks of the axis alike, and the collective is not begun. The messages are not
counted as traffic. They block, so nothing is hidden behind computing any more, and collectives that
otherwise begin as soon as something is there begin in the order of the program.

Messages between pipeline stages (``pipeline.mailbox``) have no need of it: both sides derive them
from one validated schedule.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megabit.errors import RunError
from megabit.mesh import Axis, ParallelMesh
from megabit.reduce import gather_uncounted

HEADER_BYTES = 256
"""As much of what a call is as is compared."""
SIZE_BYTES = 8


def check_collectives(mesh: ParallelMesh) -> None:
    """Compare each collective of ``mesh`` from now on; on all ranks or on none."""
    for axis in mesh.axes():
        if axis.group is not None:
            axis.check = CollectivePrecheck(axis, mesh.device)


@dataclass(frozen=True)
class CollectivePrecheck:
    """The check of one axis."""

    axis: Axis
    device: torch.device

    def __call__(self, call: str, sent: Sequence[int] = (), received: Sequence[int] = ()) -> None:
        """Compare ``call`` with what the other ranks of the axis are about to do.

        Args:
            sent, received: elements to and from each rank, where these are not the same everywhere.

        Raises:
            RunError: it is something else, on all ranks.
        """
        size = self.axis.size
        calls, to, by = self._exchange(call, sent or [0] * size, received or [0] * size)
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank, called in enumerate(calls):
            ranks[called].append(self.axis.global_rank(rank))
        if len(ranks) > 1:
            told = "; ".join(f"{_named(group)} {called}" for called, group in ranks.items())
            raise RunError(f"ranks call different collectives over {self.axis.name}: {told}")
        for source in range(size):
            for target in range(size):
                if to[source][target] != by[target][source]:
                    raise RunError(
                        f"ranks disagree on {call} over {self.axis.name}: rank "
                        f"{self.axis.global_rank(source)} sends {to[source][target]} elements to "
                        f"rank {self.axis.global_rank(target)}, which expects {by[target][source]}"
                    )

    def _exchange(
        self, call: str, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Call, sizes sent and sizes received of each rank of the axis."""
        header = call.encode()[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
        sizes = b"".join(size.to_bytes(SIZE_BYTES, "little") for size in (*sent, *received))
        own = torch.frombuffer(bytearray(header + sizes), dtype=torch.uint8).to(self.device)
        rows = [bytes(row) for row in gather_uncounted(own, self.axis).tolist()]
        calls = [row[:HEADER_BYTES].rstrip(b"\0").decode(errors="replace") for row in rows]
        numbers = [
            [
                int.from_bytes(row[at : at + SIZE_BYTES], "little")
                for at in range(HEADER_BYTES, len(row), SIZE_BYTES)
            ]
            for row in rows
        ]
        size = self.axis.size
        return calls, [row[:size] for row in numbers], [row[size:] for row in numbers]


def _named(ranks: Sequence[int]) -> str:
    """``rank 2 calls``, ``ranks 0, 1 call``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} calls"
    return f"ranks {', '.join(map(str, ranks))} call"
