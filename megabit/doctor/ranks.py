"""``Ranks``: how the ranks under examination tell each other what they have found.

What is gathered is text, JSON; messages between two ranks are tensors, and whoever waits for a rank
that is gone learns its name.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megabit.doctor.places import Cluster
from megabit.errors import RunError, first_line
from megabit.mesh import Axis
from megabit.reduce import any_rank, gather_json


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
        """What each rank has, in their order; JSON values. Collective."""
        return gather_json(value, self.world, self.device)

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
