"""Run a schedule on one rank: where the computing of a training step happens.

For each microbatch and stage, ``Forward`` keeps what was received and what was made of it until a
backward takes both. ``Backward`` computes all gradients; ``InputGradient`` only those that the
stage before waits for, and leaves the others in a queue for ``WeightGradient``. What stages send
each other goes through the ``Mailbox``. The executor knows no schedule by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megabit.mesh import Axis
from megabit.pipeline.actions import (
    Backward,
    Compute,
    Exchange,
    Forward,
    InputGradient,
    Schedule,
    WeightGradient,
    needed_by,
    produced_by,
)
from megabit.pipeline.clock import Clock
from megabit.pipeline.mailbox import Mailbox
from megabit.pipeline.timeline import Span
from megabit.tensor_parallel import (
    TERNARY,
    ActivationProbe,
    ForwardPass,
    Noise,
    Quantization,
    WeightGradientQueue,
)

Finish = Callable[[Tensor, int, ForwardPass], Tensor]


class Stages(Protocol):
    """What the executor needs of the stages on a rank; see ``model.CausalLMStages``."""

    def __call__(
        self, tokens: Tensor, hidden: Tensor | None, forward_pass: ForwardPass, chunk: int
    ) -> Tensor: ...

    def hidden_shape(self, batch: int, length: int) -> tuple[int, int]: ...

    @property
    def hidden_dtype(self) -> torch.dtype: ...


@dataclass
class PipelineResult:
    """What one run of a schedule gave on this rank."""

    outputs: list[Tensor]
    """What ``finish`` made of each microbatch, detached; empty except where the last stage is."""
    spans: list[Span]
    """When this rank computed what, on the host's monotonic clock."""
    seconds: float
    """From the first action to the last, waiting included."""

    @property
    def wait_s(self) -> float:
        """Seconds in which the rank computed nothing: its part of the bubble."""
        return max(0.0, self.seconds - sum(span.duration for span in self.spans))


def run_schedule(
    schedule: Schedule,
    stages: Stages,
    tokens: Sequence[Tensor],
    finish: Finish,
    pp: Axis,
    *,
    noises: Sequence[Noise] | None = None,
    output_gradient: Tensor | None = None,
    quantization: Quantization = TERNARY,
    probe: ActivationProbe | None = None,
) -> PipelineResult:
    """Run this rank's part of ``schedule`` over a step's microbatches; collective over ``pp``.

    Backward passes hand gradients to the parameters.

    Args:
        tokens: the inputs of the microbatches, int64 ``[B, S]`` each (or ``[m, B, S]``); the same
            on every rank of the pipeline, and B and S may differ between microbatches.
        finish: called with the last stage's output ``[t, H]``, the number of the microbatch and its
            forward pass; in training it gives the loss, a scalar.
        noises: the random numbers of each microbatch, in training.
        output_gradient: d(objective)/d(what ``finish`` gave), the same for all microbatches, such
            as 1 / target tokens of the step; needed where the schedule has backward passes.
        quantization, probe: of all forward passes; see ``ForwardPass``.

    Raises:
        PeerLost: another rank of the pipeline died, or did not answer within the time-out of the
            process group.
    """
    run = _Run(schedule, stages, tokens, finish, pp, noises, output_gradient, quantization, probe)
    return run.run()


@dataclass
class _Live:
    """A microbatch between its forward and its backward on a stage."""

    hidden_in: Tensor | None
    root: Tensor
    """Where backward starts: what ``finish`` gave after the last stage, else the stage's output."""


@dataclass
class _Run:
    """The state of one run: live microbatches, put off weight gradients, results."""

    schedule: Schedule
    stages: Stages
    tokens: Sequence[Tensor]
    finish: Finish
    pp: Axis
    noises: Sequence[Noise] | None
    output_gradient: Tensor | None
    quantization: Quantization
    probe: ActivationProbe | None
    live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    """By microbatch and chunk."""
    put_off: dict[tuple[int, int], WeightGradientQueue] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)

    @cached_property
    def computes(self) -> list[Compute]:
        return self.schedule.computes(self.pp.rank)

    @cached_property
    def is_training(self) -> bool:
        """Whether there is anything but forward passes."""
        return not all(isinstance(compute, Forward) for compute in self.computes)

    def run(self) -> PipelineResult:
        for compute in self.computes:
            if isinstance(compute, WeightGradient):
                self.put_off[compute.microbatch, compute.chunk] = WeightGradientQueue()
        device = self.tokens[0].device
        mailbox = Mailbox(self.pp, self.hidden_shape, self.stages.hidden_dtype, device)
        clock = Clock(device)
        started, marks = clock.mark(), []
        with torch.set_grad_enabled(self.is_training):
            for action in self.schedule.ranks[self.pp.rank]:
                if isinstance(action, Exchange):
                    mailbox.post(action)
                    continue
                needed = needed_by(action, self.pp.rank, self.schedule.placement)
                received = None if needed is None else mailbox.take(needed)
                before = clock.mark()
                made = self.compute(action, received)
                marks.append((action, before, clock.mark()))
                target = produced_by(action, self.pp.rank, self.schedule.placement)
                if target is not None:
                    assert made is not None
                    mailbox.put(target, made)
        mailbox.finish()
        ended = clock.mark()
        return PipelineResult(
            self.outputs,
            [Span(action, clock.seconds(a), clock.seconds(b)) for action, a, b in marks],
            clock.seconds(ended) - clock.seconds(started),
        )

    def compute(self, action: Compute, received: Tensor | None) -> Tensor | None:
        """What the neighbouring stage needs of ``action``."""
        match action:
            case Forward():
                return self.forward(action, received)
            case Backward() | InputGradient():
                return self.backward(action, received)
            case WeightGradient():
                self.put_off.pop((action.microbatch, action.chunk)).run()
        return None

    def forward(self, action: Forward, hidden_in: Tensor | None) -> Tensor:
        microbatch, chunk = action.microbatch, action.chunk
        if hidden_in is not None:
            hidden_in.requires_grad_(self.is_training)
        forward_pass = ForwardPass(
            None if self.noises is None else self.noises[microbatch],
            weight_gradients=self.put_off.get((microbatch, chunk)),
            quantization=self.quantization,
            probe=self.probe,
        )
        root = self.stages(self.tokens[microbatch], hidden_in, forward_pass, chunk)
        if self.is_last(chunk):
            root = self.finish(root, microbatch, forward_pass)
            self.outputs.append(root.detach())
        if self.is_training:
            self.live[microbatch, chunk] = _Live(hidden_in, root)
        return root.detach()

    def backward(self, action: Backward | InputGradient, gradient: Tensor | None) -> Tensor | None:
        live = self.live.pop((action.microbatch, action.chunk))
        if self.is_last(action.chunk):
            gradient = self.output_gradient
        torch.autograd.backward(live.root, gradient)
        return None if live.hidden_in is None else live.hidden_in.grad

    def is_last(self, chunk: int) -> bool:
        """Whether the rank's chunk is the last stage of the model."""
        placement = self.schedule.placement
        return placement.stage(self.pp.rank, chunk) == placement.num_stages - 1

    def hidden_shape(self, microbatch: int) -> tuple[int, int]:
        batch, length = self.tokens[microbatch].shape
        return self.stages.hidden_shape(batch, length)
