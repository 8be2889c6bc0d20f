"""The engine of one layout: the loop that computes requests, on all of its ranks together.

The way of a step, on the rank that schedules (``Relay.schedules``): requests wait in the
``Scheduler`` → it puts a ``Batch`` together → the batch is announced to the stage's other ranks →
``StageRunner`` computes the first stage's layers → batch and hidden states go to the next stage,
which does the same, and so on → the last stage's answer comes back → ``Scheduler.update`` makes
messages of it. With p stages, p batches are under way at once, each of other sequences. All other
ranks ``follow``: they take the next batch, compute it, and pass it on.

Every rank computes all batches in the order in which they were put together. So whatever ranks
decide together is told by a batch: when to report, and when to end.
"""

import secrets
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from megabit.errors import UserError
from megabit.inference.batch import Batch, Kind
from megabit.inference.block_pool import BlockPool
from megabit.inference.kv_cache import KVCache, bytes_per_block
from megabit.inference.messages import AbortRequest, AddRequest, Message
from megabit.inference.relay import Relay
from megabit.inference.report import RankReport, gather_reports
from megabit.inference.runner import StageRunner
from megabit.inference.scheduler import Limits, Scheduled, Scheduler
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages
from megabit.reduce import all_reduce
from megabit.units import MIB


@dataclass(frozen=True)
class CoreSettings:
    """Of an engine; see ``config.EngineConfig``."""

    max_model_len: int
    max_sequences: int = 64
    max_batched_tokens: int = 512
    block_size: int = 16
    num_blocks: int | None = None
    """Default: what ``kv_cache_mb`` has room for."""
    kv_cache_mb: float = 512.0
    kv_dtype: torch.dtype | None = None
    """Default: that of the hidden states."""
    prefix_cache: bool = True
    num_ids: int | None = None
    """Tokens from this id on are never drawn."""


class EngineCore:
    """One rank's part of an engine; made by all ranks of ``mesh.tp`` × ``mesh.pp`` together.

    Raises:
        UserError: on all ranks, where there is not enough memory for one sequence.
    """

    def __init__(self, stages: CausalLMStages, mesh: ParallelMesh, settings: CoreSettings) -> None:
        self.mesh, self.settings = mesh, settings
        self.num_blocks = _num_blocks(stages, mesh, settings)
        kv_heads, head_dim = _heads(stages)
        cache = KVCache(
            stages.attentions,
            self.num_blocks,
            settings.block_size,
            kv_heads,
            head_dim,
            settings.kv_dtype or stages.hidden_dtype,
            mesh.device,
        )
        self.runner = StageRunner(stages, cache, settings.num_ids)
        self.relay = Relay(mesh, stages.hidden_size, stages.hidden_dtype)
        pool = BlockPool(self.num_blocks, settings.block_size, settings.prefix_cache)
        limits = Limits(
            settings.max_sequences,
            settings.max_batched_tokens,
            settings.max_model_len,
            mesh.pp.size,
        )
        self.scheduler = Scheduler(limits, pool)
        self._under_way: deque[Scheduled] = deque()
        # Of requests that name none: no two engines draw the same.
        self._next_seed = secrets.randbits(63)

    # On the rank that schedules:

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return self.scheduler.has_work or bool(self._under_way)

    def handle(self, message: AddRequest | AbortRequest) -> list[Message]:
        """Take a request in, or forget one."""
        if isinstance(message, AbortRequest):
            return self.scheduler.abort(message.id, message.index)
        self._next_seed += 1
        self.scheduler.add(message, self._next_seed)
        return []

    def step(self) -> list[Message]:
        """Compute one batch more, if there is one, and tell what is done.

        Waits for the oldest batch where as many are under way as there are stages, or where nothing
        else can be done.
        """
        scheduled = None
        if len(self._under_way) < self.mesh.pp.size:
            scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self._start(scheduled)
        messages: list[Message] = []
        is_full = scheduled is None or len(self._under_way) == self.mesh.pp.size
        while self._under_way and (is_full or self.relay.has_answer()):
            messages += self._finish()
            is_full = False
        return messages

    def report(self) -> list[RankReport]:
        """How every rank is; all of them take part. Waits for what is under way."""
        self._tell(Batch(Kind.REPORT, 0))
        return self._gather_reports()

    def end(self) -> None:
        """Let the other ranks' ``follow`` return. What is under way is done first."""
        while self._under_way:
            self._finish()
        self._tell(Batch(Kind.END, 0))
        self.relay.settle()

    # On all other ranks:

    def follow(self) -> None:
        """Compute batches until ``end``."""
        while True:
            batch, hidden = self.relay.receive()
            if batch.kind is Kind.FORWARD:
                self._compute(batch, hidden)
                continue
            self.relay.pass_on(batch, None)
            if batch.kind is Kind.END:
                self.relay.settle()
                return
            self._gather_reports()

    def _start(self, scheduled: Scheduled) -> None:
        self._under_way.append(scheduled)
        self.relay.expect(scheduled.batch)
        self.relay.announce(scheduled.batch)
        self._compute(scheduled.batch, None)

    def _compute(self, batch: Batch, hidden: Tensor | None) -> None:
        hidden = self.runner.hidden(batch, hidden)
        self.relay.pass_on(batch, hidden)
        if self.relay.is_last_stage:
            answer = self.runner.answer(batch, hidden)
            if self.relay.answers:
                self.relay.answer(answer)

    def _finish(self) -> list[Message]:
        answer = self.relay.next_answer()
        return self.scheduler.update(self._under_way.popleft(), answer.numpy())

    def _tell(self, batch: Batch) -> None:
        self.relay.announce(batch)
        self.relay.pass_on(batch, None)

    def _gather_reports(self) -> list[RankReport]:
        own = RankReport.of(self.mesh, self.runner)
        return gather_reports(own, self.mesh)


def _num_blocks(stages: CausalLMStages, mesh: ParallelMesh, settings: CoreSettings) -> int:
    """Blocks that every rank has memory for, whatever its layers."""
    size = settings.block_size
    least = -(-settings.max_model_len // size)
    if settings.num_blocks is not None:
        return max(least, settings.num_blocks)
    own = float(settings.max_sequences * least)  # more are of use to the prefix cache only
    if stages.attentions:
        dtype = settings.kv_dtype or stages.hidden_dtype
        block = bytes_per_block(len(stages.attentions), size, *_heads(stages), dtype)
        own = settings.kv_cache_mb * MIB // block
    agreed = torch.tensor([-own], dtype=torch.float64, device=mesh.device)
    for axis in (mesh.tp, mesh.pp):
        agreed = all_reduce(agreed, axis, "max")
    found = int(-agreed)
    if found < least:
        raise UserError(
            f"engine.kv_cache_mb: {settings.kv_cache_mb:g} MiB are {found} blocks of {size} tokens "
            f"on some rank, and a sequence of engine.max_model_len={settings.max_model_len} needs "
            f"{least}"
        )
    return found


def _heads(stages: CausalLMStages) -> tuple[int, int]:
    """KV heads that this rank has, and their dimension; any where it has no layer."""
    for attention in stages.attentions.values():
        return len(attention.kv_heads.split.kv), attention.head_dim
    return 1, 1
