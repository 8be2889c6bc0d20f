"""The actions that a pipeline schedule is made of, and the messages that tie stages together.

A schedule is data: one list of actions for each rank, in the order in which the rank runs them. The
executor runs any such list, ``validate`` proves that it can finish, ``simulate`` says how long it
takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from megabit.pipeline.placement import Placement


@dataclass(frozen=True)
class Compute:
    """Work on a microbatch on one stage, the ``chunk``-th of the rank's."""

    microbatch: int
    chunk: int = 0

    letters: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.letters}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class Forward(Compute):
    """Run the stage's layers on a microbatch and keep what its backward pass needs."""

    letters = "F"


class InputGradient(Compute):
    """Compute the gradient of the stage's input, and put off those of weights (B)."""

    letters = "B"


class WeightGradient(Compute):
    """Compute the gradients of weights that were put off (W)."""

    letters = "W"


class Backward(Compute):
    """Both at once: B, and W layer by layer on the way."""

    letters = "BW"


@dataclass(frozen=True)
class Message:
    """What one stage computed for the next or the one before, as seen from one end."""

    kind: Literal["activation", "gradient"]
    microbatch: int
    chunk: int
    """Of the rank that receives it."""
    peer: int
    """The rank at the other end."""

    def __str__(self) -> str:
        return f"{self.kind[0]}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Exchange:
    """Post sends and receives together (``batch_isend_irecv``).

    A rank goes on at once, and waits for a message where it needs it. Messages from one rank to
    another are matched in the order in which they are posted.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]

    def __str__(self) -> str:
        sends = [f"send {message}→{message.peer}" for message in self.sends]
        receives = [f"recv {message}←{message.peer}" for message in self.receives]
        return f"[{', '.join(sends + receives)}]"


Action: TypeAlias = Compute | Exchange


@dataclass(frozen=True)
class Schedule:
    """What each rank does in a step. A generator gives the computes; ``communicate`` puts the
    exchanges between them."""

    placement: Placement
    microbatches: int
    ranks: Sequence[Sequence[Action]]

    def computes(self, rank: int) -> list[Compute]:
        """What a rank computes, in order."""
        return [action for action in self.ranks[rank] if isinstance(action, Compute)]

    def __str__(self) -> str:
        """One line for each rank."""
        width = len(str(len(self.ranks) - 1))
        return "\n".join(
            f"rank {rank:>{width}}: {' '.join(map(str, actions))}"
            for rank, actions in enumerate(self.ranks)
        )


def needed_by(compute: Compute, rank: int, placement: Placement) -> Message | None:
    """What another stage must have computed before ``rank`` runs ``compute``; the stage may be on
    the same rank.

    Nothing for a Forward on the first stage, which reads tokens, for a backward on the last, which
    has the loss, and for a WeightGradient, which goes on from the rank's own InputGradient.
    """
    stage = placement.stage(rank, compute.chunk)
    match compute:
        case Forward():
            if stage == 0:
                return None
            source = placement.rank_of(stage - 1)
            return Message("activation", compute.microbatch, compute.chunk, source)
        case Backward() | InputGradient():
            if stage == placement.num_stages - 1:
                return None
            source = placement.rank_of(stage + 1)
            return Message("gradient", compute.microbatch, compute.chunk, source)
    return None


def produced_by(compute: Compute, rank: int, placement: Placement) -> Message | None:
    """What another stage, perhaps of the same rank, needs of what ``rank`` computed."""
    stage = placement.stage(rank, compute.chunk)
    kind: Literal["activation", "gradient"]
    match compute:
        case Forward():
            kind, target = "activation", stage + 1
        case Backward() | InputGradient():
            kind, target = "gradient", stage - 1
        case _:
            return None
    if not 0 <= target < placement.num_stages:
        return None
    return Message(kind, compute.microbatch, placement.chunk_of(target), placement.rank_of(target))
