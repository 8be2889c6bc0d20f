"""What the owner of the outer weights knows of the ranks that are connected.

An island is all of its ranks: they connect, deliver and ask together, each on a connection of its
own, and what is whole only when all of them have spoken is kept here until then.
"""

import queue
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from megabit.outer.anchor import Anchor, Holds
from megabit.outer.frames import Channel
from megabit.outer.hello import Hello

INITIAL = -1
"""Stands for initial weights where others have the number of a round."""


@dataclass(frozen=True)
class Answer:
    """A frame that a rank is waiting for."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    anchor: Anchor | None = None
    """Whose values go with it."""


class Refused(Exception):
    """An island cannot take part.

    Args:
        is_final: whether another try would be refused, too.
    """

    def __init__(self, reason: str, is_final: bool = True) -> None:
        super().__init__(reason)
        self.is_final = is_final


@dataclass(frozen=True)
class Ask:
    """What a rank wants next."""

    kind: Literal["next", "finish"]
    round: int
    """That it is to go on with."""
    version: int
    """Rounds that must be closed by then."""


@dataclass(eq=False)
class Link:
    """The connection of a rank."""

    channel: Channel
    hello: Hello
    answers: "queue.SimpleQueue[Answer | Refused]" = field(default_factory=queue.SimpleQueue)
    refusal: Refused | None = None
    """Why its island takes no part any more, if somebody knows."""


@dataclass
class Assembly:
    """What the ranks of an island bring of the same thing, until it is whole."""

    values: dict[str, Tensor]
    """Whole logical tensors."""
    about: tuple[Holds, bool]
    """``Term.holds`` and ``is_whole``; all ranks say the same."""
    ranks: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Session:
    """The ranks of an island that have connected together."""

    hello: Hello
    """Of the first of them."""
    since: float
    """When the first rank began what the others have not done yet; ``inf`` if there is nothing."""
    links: dict[int, Link] = field(default_factory=dict)
    assemblies: dict[int, Assembly] = field(default_factory=dict)
    """By round; ``INITIAL`` for initial weights."""
    asks: dict[int, int] = field(default_factory=dict)
    """By rank that waits for the next round, or for the end: the version that it has."""
    wants: Ask | None = None
    """What they ask for: all the same."""

    @property
    def is_complete(self) -> bool:
        return len(self.links) == self.hello.ranks
