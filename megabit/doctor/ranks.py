"""``Ranks``: how the ranks under examination tell each other what they have found.

What is gathered is text, JSON, padded to the length of the longest; messages between two ranks are
tensors, and whoever waits for a rank that is gone learns its name.
"""

import json
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megabit.doctor.places import Cluster
from megabit.errors import RunError
from megabit.mesh import Axis
from megabit.reduce import all_gather, all_reduce, any_rank

MAX_BYTES = 16 * 2**20
"""Of what a rank may say at once."""


def gather(value: Any, world: Axis, device: torch.device) -> list[Any]:
    """What each rank of ``world`` has, in the order of ranks, on every rank; JSON values."""
    text = json.dumps(value).encode()
    if len(text) > MAX_BYTES:
        raise ValueError(f"{len(text)} bytes are too many to gather")
    longest = int(all_reduce(torch.tensor(len(text), device=device), world, "max"))
    own = torch.full((1, longest), ord(" "), dtype=torch.uint8)
    own[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = all_gather(own.to(device), world).cpu()
    return [json.loads(row.numpy().tobytes()) for row in rows]


@dataclass(frozen=True)
class Ranks:
    """All ranks, as one of them sees them."""

    world: Axis
    device: torch.device
    cluster: Cluster

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def speaks(self) -> bool:
        """Whether this rank acts for its host."""
        return self.cluster.host_of(self.rank).speaker == self.rank

    def gather(self, value: Any) -> list[Any]:
        """See ``gather``; collective."""
        return gather(value, self.world, self.device)

    def wait(self) -> None:
        """Until all are here; collective."""
        any_rank(False, self.world, self.device)

    def send(self, x: Tensor, peer: int) -> None:
        """Send ``x``, contiguous and on this rank's device, to ``peer``, which receives the same
        shape and dtype; returns when it has left.

        Raises:
            RunError: it does not answer.
        """
        try:
            dist.send(x, peer, self.world.group)
            self._synchronize()
        except RuntimeError as error:
            self._lost(peer, error)

    def receive(self, x: Tensor, peer: int) -> Tensor:
        """Fill ``x`` with what ``peer`` sends, and return it when it is here.

        Raises:
            RunError: it does not answer.
        """
        try:
            dist.recv(x, peer, self.world.group)
            self._synchronize()
        except RuntimeError as error:
            self._lost(peer, error)
        return x

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _lost(self, peer: int, error: RuntimeError) -> NoReturn:
        raise RunError(
            f"{self.cluster.name(self.rank)} waits in vain for {self.cluster.name(peer)}: "
            f"{first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """Of what torch says, without the place in its sources that gloo begins with."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rpartition("] ")[2] or lines[0]
