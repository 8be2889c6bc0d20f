"""Messages between a rank's stages and its neighbours': where a pipeline communicates.

A message is put here when it has been computed, posted where the schedule says, and taken where it
is needed. Sends and receives are posted without waiting for them; only who takes a message waits.
Tensors are ``[t, H]`` in ``precision.compute``. Every rank has the tokens of every microbatch, so
it knows their shapes, which may differ between microbatches: no header travels.

To wait for the sends of an earlier exchange is always safe, since ``validate`` has proved that a
schedule ends even if each exchange blocks until all of its messages are over.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megabit.errors import RunError, first_line
from megabit.mesh import Axis
from megabit.pipeline.actions import Exchange, Message
from megabit.reduce import Purpose

MAX_SENDS = 8
"""Messages of which a rank keeps a copy until it looks whether they have left: gloo says that of a
send only when it is waited for."""


class PeerLost(RunError):
    """A rank of the pipeline does not answer any more."""


@dataclass
class _Transfer:
    message: Message
    tensor: Tensor
    work: dist.Work


@dataclass
class Mailbox:
    """What one rank sends and receives in one run of a schedule.

    Args:
        shape: of the tensors of a microbatch, by its number.
    """

    pp: Axis
    shape: Callable[[int], tuple[int, int]]
    dtype: torch.dtype
    device: torch.device
    _outgoing: dict[Message, Tensor] = field(default_factory=dict)
    _arrived: dict[Message, Tensor] = field(default_factory=dict)
    """From this rank's own other stages."""
    _arriving: dict[Message, _Transfer] = field(default_factory=dict)
    _leaving: deque[_Transfer] = field(default_factory=deque)

    def put(self, message: Message, tensor: Tensor) -> None:
        """Hand in what was computed, for a neighbour or for a stage of this rank."""
        own = message.peer == self.pp.rank
        (self._arrived if own else self._outgoing)[message] = tensor

    def post(self, exchange: Exchange) -> None:
        """Begin to send and receive all messages of ``exchange``."""
        self._forget_sent(max(MAX_SENDS - len(exchange.sends), 0))
        tensors = [self._outgoing.pop(message).contiguous() for message in exchange.sends]
        for message, tensor in zip(exchange.sends, tensors, strict=True):
            purpose: Purpose = (
                "activations" if message.kind == "activation" else "activation gradients"
            )
            self.pp.count(tensor.nbytes, purpose)
        tensors += [
            torch.empty(self.shape(message.microbatch), dtype=self.dtype, device=self.device)
            for message in exchange.receives
        ]
        messages = exchange.sends + exchange.receives
        works = self._begin(messages, tensors, len(exchange.sends))
        transfers = [*map(_Transfer, messages, tensors, works)]
        self._leaving += transfers[: len(exchange.sends)]
        for transfer in transfers[len(exchange.sends) :]:
            self._arriving[transfer.message] = transfer

    def _begin(
        self, messages: Sequence[Message], tensors: Sequence[Tensor], num_sends: int
    ) -> list[dist.Work]:
        """Post the messages, sends first."""
        calls = [dist.isend if i < num_sends else dist.irecv for i in range(len(messages))]
        peers = [self.pp.global_rank(message.peer) for message in messages]
        works: list[dist.Work] = []
        try:
            if self.device.type == "cuda" and messages:
                posts = zip(calls, tensors, peers, strict=True)
                works = dist.batch_isend_irecv(
                    [dist.P2POp(call, tensor, peer, self.pp.group) for call, tensor, peer in posts]
                )
                # NCCL has one for all.
                return works if len(works) == len(messages) else works * len(messages)
            # gloo has no batches; torch would post one by one, too, and take twice as long for it.
            for call, tensor, peer in zip(calls, tensors, peers, strict=True):
                work = call(tensor, peer, self.pp.group)
                assert work is not None
                works.append(work)
        except RuntimeError as error:
            self._lost(messages[len(works)], error)
        return works

    def take(self, message: Message) -> Tensor:
        """What ``message`` brings; blocks until it is there."""
        if message.peer == self.pp.rank:
            return self._arrived.pop(message)
        transfer = self._arriving.pop(message)
        self._wait(transfer)
        return transfer.tensor

    def finish(self) -> None:
        """Wait until everything has left."""
        self._forget_sent(0)

    def _forget_sent(self, keep: int) -> None:
        while self._leaving and (len(self._leaving) > keep or self._leaving[0].work.is_completed()):
            self._wait(self._leaving.popleft())

    def _wait(self, transfer: _Transfer) -> None:
        try:
            with self.pp.waiting():
                transfer.work.wait()
        except RuntimeError as error:
            self._lost(transfer.message, error)

    def _lost(self, message: Message, error: RuntimeError) -> NoReturn:
        raise PeerLost(
            f"pipeline rank {self.pp.rank}: rank {message.peer} of the pipeline (world rank "
            f"{self.pp.global_rank(message.peer)}) does not answer; lost the {message.kind} of "
            f"microbatch {message.microbatch} ({first_line(error)})"
        ) from error
