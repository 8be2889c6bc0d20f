"""The actions that a pipeline schedule is made of, and the messages that tie stages together.

A schedule is data: one list of actions for each stage, in the order in which the stage runs them.
The executor runs any such list, and ``validate`` proves that it can finish.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Forward:
    """Run the stage's layers on a microbatch and keep what its backward pass needs."""

    microbatch: int

    def __str__(self) -> str:
        return f"F{self.microbatch}"


@dataclass(frozen=True)
class Backward:
    """Compute the input and the weight gradients of a microbatch and free its activations."""

    microbatch: int

    def __str__(self) -> str:
        return f"B{self.microbatch}"


@dataclass(frozen=True)
class Message:
    """The output of one stage's Forward or Backward, as seen from one end."""

    kind: Literal["activation", "gradient"]
    microbatch: int
    peer: int
    """The stage at the other end."""

    def __str__(self) -> str:
        return f"{self.kind[0]}{self.microbatch}"


@dataclass(frozen=True)
class Exchange:
    """Post all sends and receives together (``batch_isend_irecv``); over when all of them are.

    Messages from one stage to another are matched in the order in which they are posted.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]

    def __str__(self) -> str:
        sends = [f"send {message}→{message.peer}" for message in self.sends]
        receives = [f"recv {message}←{message.peer}" for message in self.receives]
        return f"[{', '.join(sends + receives)}]"


Compute: TypeAlias = Forward | Backward
Action: TypeAlias = Compute | Exchange
Schedule: TypeAlias = Sequence[Sequence[Action]]
"""The actions of each stage, first stage first."""


def needed_by(compute: Compute, stage: int, stages: int) -> tuple[Message, ...]:
    """What ``stage`` must have received before it runs ``compute``.

    Nothing on the first stage, which reads tokens, and for a Backward on the last, which has the
    loss.
    """
    match compute:
        case Forward(microbatch):
            return (Message("activation", microbatch, stage - 1),) if stage > 0 else ()
        case Backward(microbatch):
            return (Message("gradient", microbatch, stage + 1),) if stage < stages - 1 else ()


def produced_by(compute: Compute, stage: int, stages: int) -> tuple[Message, ...]:
    """What ``stage`` must send after it has run ``compute``."""
    match compute:
        case Forward(microbatch):
            return (Message("activation", microbatch, stage + 1),) if stage < stages - 1 else ()
        case Backward(microbatch):
            return (Message("gradient", microbatch, stage - 1),) if stage > 0 else ()
