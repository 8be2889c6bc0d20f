"""Pipeline schedules: the order of compute on each stage, and the communication it implies.

A generator states only the order of Forward and Backward; ``with_communication`` derives every
message from it. All generators run the backward passes in the order of the microbatches, so that
gradients add up in the same order, hence to the same bits, whatever the schedule.
"""

from collections.abc import Sequence
from typing import Literal, assert_never

from megabit.pipeline.actions import (
    Action,
    Backward,
    Compute,
    Exchange,
    Forward,
    Message,
    Schedule,
    needed_by,
    produced_by,
)
from megabit.pipeline.validate import validate


def make_schedule(
    name: Literal["1f1b", "gpipe", "forward_only"], stages: int, microbatches: int
) -> list[list[Action]]:
    """The named schedule with its communication, proven to be complete and free of deadlock."""
    match name:
        case "1f1b":
            orders = one_forward_one_backward(stages, microbatches)
        case "gpipe":
            orders = gpipe(stages, microbatches)
        case "forward_only":
            orders = forward_only(stages, microbatches)
        case _:
            assert_never(name)
    schedule = with_communication(orders)
    validate(schedule, stages, microbatches, forward_only=name == "forward_only")
    return schedule


def gpipe(stages: int, microbatches: int) -> list[list[Compute]]:
    """All forwards, then all backwards; a stage holds the activations of all microbatches.

    Huang et al. 2019, https://arxiv.org/abs/1811.06965.
    """
    return [
        [*map(Forward, range(microbatches)), *map(Backward, range(microbatches))]
        for _ in range(stages)
    ]


def one_forward_one_backward(stages: int, microbatches: int) -> list[list[Compute]]:
    """Fill the pipeline, then alternate one forward and one backward, then drain it.

    The bubble is GPipe's, but stage s holds the activations of at most ``stages - s`` microbatches.
    PipeDream-Flush: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.1.
    """
    orders = []
    for stage in range(stages):
        # Forwards to run while microbatch 0 is on its way to the last stage.
        warmup = min(stages - 1 - stage, microbatches)
        order: list[Compute] = [*map(Forward, range(warmup))]
        for microbatch in range(warmup, microbatches):
            order += [Forward(microbatch), Backward(microbatch - warmup)]
        order += map(Backward, range(microbatches - warmup, microbatches))
        orders.append(order)
    return orders


def forward_only(stages: int, microbatches: int) -> list[list[Compute]]:
    """All forwards and nothing else, for evaluation."""
    return [[*map(Forward, range(microbatches))] for _ in range(stages)]


def with_communication(orders: Sequence[Sequence[Compute]]) -> list[list[Action]]:
    """Put one Exchange between any two computes of a stage that have something to communicate.

    It sends what the first has produced and receives what the second needs. Posting both together
    is what keeps neighbours from each waiting in a send that the other has yet to receive (the
    ``send_forward_recv_backward`` pairs of Megatron-LM).
    """
    return [_with_exchanges(order, stage, len(orders)) for stage, order in enumerate(orders)]


def format_schedule(schedule: Schedule) -> str:
    """The schedule as text, one line for each stage."""
    width = len(str(len(schedule) - 1))
    return "\n".join(
        f"stage {stage:>{width}}: {' '.join(map(str, actions))}"
        for stage, actions in enumerate(schedule)
    )


def _with_exchanges(order: Sequence[Compute], stage: int, stages: int) -> list[Action]:
    actions: list[Action] = []
    sends: tuple[Message, ...] = ()
    for compute in order:
        receives = needed_by(compute, stage, stages)
        if sends or receives:
            actions.append(Exchange(sends, receives))
        actions.append(compute)
        sends = produced_by(compute, stage, stages)
    if sends:
        actions.append(Exchange(sends, ()))
    return actions
