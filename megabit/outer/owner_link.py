"""A rank's side of the connection to the owner of the outer weights (``owner``)."""

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megabit.outer.frames import VANISHED_S, Channel, Frame
from megabit.outer.hello import MAX_ROUND, Hello


class OwnerRefused(Exception):
    """The owner will not have this island; its reason is the message.

    Args:
        is_final: whether it would refuse another try, too.
    """

    def __init__(self, reason: str, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


@dataclass(frozen=True)
class Go:
    """What the owner says when an island may go on."""

    round: int
    """That it is in from now on."""
    version: int
    """Of the newest anchor: so many rounds are closed."""
    id: str
    """Of that anchor."""
    is_reset: bool
    """Whether the island begins anew from that anchor: what it has done since is not counted."""
    values: list[Tensor] | None
    """The anchor's values of the rank's ``takes``; None if it has that anchor already."""


@dataclass(frozen=True)
class Delivery:
    """What a rank brings of a round; see ``anchor.Term``."""

    round: int
    is_change: bool
    is_whole: bool
    values: Sequence[Tensor]
    """Of ``gives``."""


class OwnerLink:
    """A connection on which this rank has said hello.

    Raises:
        OwnerRefused: in any method, the owner has ended it with a reason.
        FrameError: in any method, the connection has ended, or it is no owner that answers.
        OSError: in any method, the connection is broken, or there is none.
    """

    def __init__(self, address: str, hello: Hello) -> None:
        self._takes = hello.takes
        self._channel = Channel(socket.create_connection(split_address(address), VANISHED_S))
        try:
            self._channel.send("hello", **hello.fields())
        except OSError:
            self.close()
            raise

    def join(self, initial: Iterable[Tensor]) -> Go:
        """Wait until all ranks of the island are there, and for the owner's word.

        Args:
            initial: this rank's ``gives`` now, in case that they are wanted.
        """
        frame = self._receive("initial", "go")
        if frame.kind == "initial":
            self._channel.send("initial", [*initial])
            frame = self._receive("go")
        return self._go(frame)

    def deliver(self, delivery: Delivery) -> None:
        """Bring what a round needs of this rank; ``go_on`` tells what became of it."""
        self._channel.send(
            "round",
            delivery.values,
            round=delivery.round,
            is_change=delivery.is_change,
            is_whole=delivery.is_whole,
        )

    def go_on(self, round_: int, version: int, has: int) -> Go:
        """Wait until the island may go on.

        Args:
            round_: with which round.
            version: rounds that must be closed by then.
            has: version of the anchor that this rank knows.
        """
        self._channel.send("next", round=round_, version=version, has=has)
        return self._go(self._receive("go"))

    def finish(self) -> None:
        """Say goodbye, once all ranks of the island do."""
        self._channel.send("finish")
        self._receive("bye")
        self.close()

    def close(self) -> None:
        """End the connection: the island then takes no part."""
        self._channel.close()

    def _receive(self, *kinds: str) -> Frame:
        frame = self._channel.receive()
        if frame.kind == "refuse":
            raise OwnerRefused(frame.text("reason"), frame.flag("is_final"))
        return frame.expect(*kinds)

    def _go(self, frame: Frame) -> Go:
        values = None
        if frame.flag("has_values"):
            values = [*self._channel.values(frame, [region.shape for region in self._takes])]
        return Go(
            round=frame.integer("round", 0, MAX_ROUND),
            version=frame.integer("version", 0, MAX_ROUND),
            id=frame.text("id", 64),
            is_reset=frame.flag("is_reset"),
            values=values,
        )


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` and ``[host]:port`` as a pair.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return match[1] or match[2], int(match[3])
