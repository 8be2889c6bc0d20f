"""An engine as the rank that schedules has it: requests and their answers, and how it is.

Around ``EngineCore``: the accuracy guard's own requests among those of clients, and reports.
"""

import dataclasses
import sys
import time

from megabit.config import ModelConfig
from megabit.inference.accuracy_guard import AccuracyGuard
from megabit.inference.core import EngineCore
from megabit.inference.messages import (
    AbortRequest,
    AddRequest,
    Message,
    PromptLogprobs,
    Ready,
    Stats,
    Tokens,
)
from megabit.inference.rebalance import StageTimes
from megabit.inference.report import summed


class EngineSession:
    """On the rank that schedules; the others ``follow`` meanwhile.

    Args:
        guard: switches rounded sums off; None: there are none, or nobody watches them.
    """

    def __init__(
        self,
        core: EngineCore,
        model: ModelConfig,
        layers_per_stage: tuple[int, ...],
        guard: AccuracyGuard | None = None,
    ) -> None:
        self._core, self._guard = core, guard
        self._layers_per_stage = layers_per_stage
        size = core.runner.stages.hidden_dtype.itemsize
        self._times = StageTimes(model, layers_per_stage, dense_bytes=size)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return self._core.has_work or self._is_check_due

    def ready(self, description: str) -> Ready:
        """What is said of an engine when it begins."""
        core = self._core
        return Ready(
            core.settings.max_model_len,
            core.num_blocks,
            core.settings.block_size,
            core.mesh.tp.size,
            core.mesh.pp.size,
            self._layers_per_stage,
            description,
        )

    def handle(self, message: AddRequest | AbortRequest) -> list[Message]:
        """Take a request in, or forget one."""
        return self._core.handle(message)

    def step(self) -> list[Message]:
        """Compute one batch more, and tell what is done."""
        if self._guard is not None and self._is_check_due:
            is_exact = not self._guard.is_lossy_turn
            for request in self._guard.begin(time.monotonic()):
                self._core.handle(dataclasses.replace(request, is_exact=is_exact))
        messages = self._core.step()
        if self._guard is None:
            return messages
        for message in messages:
            if isinstance(message, PromptLogprobs | Tokens) and self._guard.receive(message):
                self._judge(self._guard)
        return [m for m in messages if not _is_guards(m)]

    def stats(self) -> Stats:
        """How the engine is; all ranks tell. Waits for what is under way."""
        reports = self._core.report()
        scheduler = self._core.scheduler
        counters, pool = scheduler.counters, scheduler.pool
        sent, fallbacks = summed(reports)
        waited: dict[str, float] = {}
        calls: dict[str, int] = {}
        for report in reports:
            for axis, seconds in report.waited.items():
                waited[axis] = max(seconds, waited.get(axis, 0.0))
            for axis, count in report.calls.items():
                calls[axis] = max(count, calls.get(axis, 0))
        stages = self._core.mesh.pp.size
        seconds_of = [
            max(report.seconds for report in reports if report.stage == stage)
            for stage in range(stages)
        ]
        guard = self._guard
        lossy = self._core.runner.stages.context.lossy_sums
        stats = Stats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            blocks_used=pool.num_used,
            blocks_total=pool.num_blocks,
            **dataclasses.asdict(counters),
            batch_tokens=scheduler.take_batch_tokens(),
            comm_bytes=sent,
            comm_seconds=waited,
            comm_calls=calls,
            comm_fallbacks=fallbacks,
            is_lossy=lossy is not None and scheduler.may_round,
            accuracy_loss=None if guard is None else guard.loss,
            accuracy_exact_loss=None if guard is None else guard.exact_loss,
            rank_memory=tuple(report.memory for report in reports),
            rank_memory_limit=tuple(report.memory_limit for report in reports),
            stage_seconds=tuple(seconds_of),
        )
        return dataclasses.replace(stats, proposed_layers=self._times.add(stats))

    def end(self) -> None:
        """Let the other ranks go."""
        self._core.end()

    def _judge(self, guard: AccuracyGuard) -> None:
        """After one of the guard's turns."""
        if guard.verdict is False and self._core.scheduler.may_round:
            self._core.scheduler.stop_rounding()
        lossy = self._core.runner.stages.context.lossy_sums
        if guard.loss is not None and lossy is not None and not lossy.rounded:
            print(
                "warning: engine.accuracy_guard: its text makes messages that are too small to be "
                "rounded (engine.int8_min_kib), so it watches nothing",
                file=sys.stderr,
            )

    @property
    def _is_check_due(self) -> bool:
        return self._guard is not None and self._guard.due(time.monotonic())


def _is_guards(message: Message) -> bool:
    return isinstance(message, Tokens | PromptLogprobs) and AccuracyGuard.owns(message.id)
