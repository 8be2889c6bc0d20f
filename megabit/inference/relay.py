"""The way of a batch: from the rank that schedules, along the pipeline, and the answer back.

The scheduling rank is the first of TP on the first stage. There a batch is broadcast over TP; then
each rank hands it to the same TP rank of the next stage, in front of its hidden states, as soon as
it has computed them. The first TP rank of the last stage answers. What is sent is not waited for
until the next batch is to be sent, so that all stages compute at once.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megabit.inference.batch import Batch
from megabit.mesh import Axis, ParallelMesh
from megabit.reduce import broadcast


class Relay:
    """One rank's part of the way.

    Args:
        hidden_size: H of the hidden states ``[T, H]``.
        dtype: of those.
    """

    def __init__(self, mesh: ParallelMesh, hidden_size: int, dtype: torch.dtype) -> None:
        self._tp, self._pp, self._device = mesh.tp, mesh.pp, mesh.device
        self._hidden_size, self._dtype = hidden_size, dtype
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._expected: deque[tuple[dist.Work | None, Tensor]] = deque()

    @property
    def is_first_stage(self) -> bool:
        return self._pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self._pp.rank == self._pp.size - 1

    @property
    def schedules(self) -> bool:
        """Whether this rank puts batches together."""
        return self.is_first_stage and self._tp.rank == 0

    @property
    def answers(self) -> bool:
        """Whether this rank tells what a batch brought."""
        return self.is_last_stage and self._tp.rank == 0

    def receive(self) -> tuple[Batch, Tensor | None]:
        """The next batch, and the hidden states ``[T, H]`` that the stage before made of it; none
        on the first stage. Not for the rank that schedules."""
        if self.is_first_stage:
            with _idle(self._tp):
                size = broadcast(self._empty(1, torch.int64), 0, self._tp)
            data = broadcast(self._empty(int(size), torch.uint8), 0, self._tp)
            return _decoded(data), None
        source = self._pp.rank - 1
        with _idle(self._pp):
            size = self._receive(self._empty(1, torch.int64), source)
        batch = _decoded(self._receive(self._empty(int(size), torch.uint8), source))
        if not batch.num_tokens:
            return batch, None
        hidden = torch.empty(
            batch.num_tokens, self._hidden_size, dtype=self._dtype, device=self._device
        )
        return batch, self._receive(hidden, source)

    def announce(self, batch: Batch) -> None:
        """Tell the other TP ranks of the first stage; by the rank that schedules."""
        if self._tp.size > 1:
            data = self._encoded(batch)
            broadcast(torch.tensor([len(data)], device=self._device), 0, self._tp)
            broadcast(data, 0, self._tp)

    def pass_on(self, batch: Batch, hidden: Tensor | None) -> None:
        """Hand a batch to the next stage, if there is one."""
        if self.is_last_stage:
            return
        self.settle()
        data = self._encoded(batch)
        target = self._pp.rank + 1
        self._send(torch.tensor([len(data)], device=self._device), target)
        self._send(data, target)
        if hidden is not None:
            self._send(hidden.contiguous(), target)

    def expect(self, batch: Batch) -> None:
        """Prepare for the answer to ``batch``; by the rank that schedules, before it computes."""
        answer = self._empty(batch.result_shape, torch.float64)
        work = None
        if not self.answers:
            source = self._pp.global_rank(self._pp.size - 1)
            work = dist.irecv(answer, source, group=self._pp.group)
        self._expected.append((work, answer))

    def answer(self, result: Tensor) -> None:
        """What a batch brought, fp64 as ``Batch.result_shape`` says; by the rank that answers."""
        if self.schedules:
            self._expected[-1][1].copy_(result)
        else:
            self.settle()
            self._send(result, 0)

    def has_answer(self) -> bool:
        """Whether the answer to the oldest batch under way is there."""
        work, _ = self._expected[0]
        return work is None or work.is_completed()

    def next_answer(self) -> Tensor:
        """The answer to the oldest batch under way; waits for it."""
        work, answer = self._expected.popleft()
        if work is not None:
            with self._pp.waiting():
                work.wait()
        return answer.cpu()

    def settle(self) -> None:
        """Wait until what was sent has been taken."""
        with self._pp.waiting():
            for work, _ in self._sent:
                work.wait()
        self._sent = []

    def _empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _encoded(self, batch: Batch) -> Tensor:
        return torch.from_numpy(batch.encode()).to(self._device)

    def _receive(self, x: Tensor, source: int) -> Tensor:
        with self._pp.waiting():
            dist.recv(x, self._pp.global_rank(source), group=self._pp.group)
        return x

    def _send(self, x: Tensor, target: int) -> None:
        self._pp.count(x.numel() * x.element_size(), "activations")
        work = dist.isend(x, self._pp.global_rank(target), group=self._pp.group)
        assert work is not None
        self._sent.append((work, x))


@contextmanager
def _idle(axis: Axis) -> Iterator[None]:
    """Waiting for something to do is not waiting for a collective."""
    waited_s, calls = axis.waited_s, axis.calls
    yield
    axis.waited_s, axis.calls = waited_s, calls


def _decoded(data: Tensor) -> Batch:
    return Batch.decode(np.ascontiguousarray(data.cpu().numpy()))
