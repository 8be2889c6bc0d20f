"""Run a schedule on one stage: where a training step computes and talks to its neighbours.

For each microbatch, ``Forward`` keeps what was received and what was made of it until ``Backward``
takes both; ``Exchange`` moves activations ``[t, H]`` up and their gradients down the pipeline. The
executor knows no schedule by name.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megabit.mesh import Axis
from megabit.pipeline.actions import Action, Backward, Exchange, Forward, Message
from megabit.tensor_parallel import Noise


class Stage(Protocol):
    """What the executor needs of a model stage; see ``model.CausalLMStage``."""

    def __call__(self, tokens: Tensor, hidden: Tensor | None, noise: Noise | None) -> Tensor: ...

    def hidden_shape(self, batch: int, length: int) -> tuple[int, int]: ...

    @property
    def hidden_dtype(self) -> torch.dtype: ...


@dataclass
class PipelineResult:
    """What one run of a schedule gave on this rank."""

    outputs: list[Tensor]
    """What ``finish`` made of each microbatch, detached; empty except on the last stage."""
    busy_s: float
    """Seconds from the first action to the last."""
    wait_s: float
    """Seconds of those in which the rank waited for an exchange with a neighbour: the bubble."""


@dataclass
class _Live:
    """A microbatch between its forward and its backward."""

    hidden_in: Tensor | None
    root: Tensor
    """Where backward starts: what ``finish`` gave on the last stage, else the stage's output."""


def run_schedule(
    actions: Sequence[Action],
    stage: Stage,
    tokens: Tensor,
    finish: Callable[[Tensor, int], Tensor],
    pp: Axis,
    *,
    noises: Sequence[Noise] | None = None,
    output_gradient: Tensor | None = None,
) -> PipelineResult:
    """Run this stage's ``actions`` over a step's microbatches; collective over ``pp``.

    Backward passes add to the parameters' gradients.

    Args:
        tokens: int64 ``[m, B, S]``, the inputs of the m microbatches.
        finish: called on the last stage with its output ``[t, H]`` and the microbatch's number; in
            training it gives the loss, a scalar.
        noises: the random numbers of each microbatch, in training.
        output_gradient: d(objective)/d(what ``finish`` gave), the same for all microbatches, such
            as 1 / target tokens of the step; needed where ``actions`` has a ``Backward``.
    """
    started = time.perf_counter()
    run = _Run(stage, tokens, finish, pp, noises, output_gradient)
    with torch.set_grad_enabled(any(isinstance(action, Backward) for action in actions)):
        for action in actions:
            if isinstance(action, Forward):
                run.forward(action.microbatch)
            elif isinstance(action, Backward):
                run.backward(action.microbatch)
            else:
                run.exchange(action)
    return PipelineResult(run.outputs, time.perf_counter() - started, run.wait_s)


@dataclass
class _Run:
    """The state of one run: live microbatches and what was or is to be exchanged."""

    stage: Stage
    tokens: Tensor
    finish: Callable[[Tensor, int], Tensor]
    pp: Axis
    noises: Sequence[Noise] | None
    output_gradient: Tensor | None
    live: dict[int, _Live] = field(default_factory=dict)
    received: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    outgoing: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    wait_s: float = 0.0

    @property
    def is_last(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    def forward(self, microbatch: int) -> None:
        hidden_in = self.received.pop(("activation", microbatch), None)
        if hidden_in is not None:
            hidden_in.requires_grad_(torch.is_grad_enabled())
        noise = None if self.noises is None else self.noises[microbatch]
        root = self.stage(self.tokens[microbatch], hidden_in, noise)
        if self.is_last:
            root = self.finish(root, microbatch)
            self.outputs.append(root.detach())
        else:
            self.outgoing["activation", microbatch] = root.detach()
        if torch.is_grad_enabled():
            self.live[microbatch] = _Live(hidden_in, root)

    def backward(self, microbatch: int) -> None:
        live = self.live.pop(microbatch)
        gradient = (
            self.output_gradient if self.is_last else self.received.pop(("gradient", microbatch))
        )
        torch.autograd.backward(live.root, gradient)
        if live.hidden_in is not None:
            assert live.hidden_in.grad is not None
            self.outgoing["gradient", microbatch] = live.hidden_in.grad

    def exchange(self, exchange: Exchange) -> None:
        started = time.perf_counter()
        _, batch, length = self.tokens.shape
        shape = self.stage.hidden_shape(batch, length)
        operations = []
        for message in exchange.sends:
            tensor = self.outgoing.pop((message.kind, message.microbatch)).contiguous()
            purpose = "activations" if message.kind == "activation" else "activation gradients"
            self.pp.sent[purpose] += tensor.nbytes
            operations.append(self._operation(dist.isend, tensor, message))
        for message in exchange.receives:
            tensor = torch.empty(shape, dtype=self.stage.hidden_dtype, device=self.tokens.device)
            self.received[message.kind, message.microbatch] = tensor
            operations.append(self._operation(dist.irecv, tensor, message))
        with self.pp.waiting():
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        self.wait_s += time.perf_counter() - started

    def _operation(
        self, kind: Callable[..., dist.Work | None], tensor: Tensor, message: Message
    ) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self.pp.global_rank(message.peer), self.pp.group)
