"""Time steps: contestants in turns, or the ranks of a layout together.

Each contestant is a process of its own, so that its peak memory is its own and no allocator is
shared. While one has its turn, the others wait in a barrier, which takes no time of a core.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megabit.benchmark.breakdown import Parts, time_parts
from megabit.benchmark.contestants import Contestant, Megabit, make_contestant
from megabit.config import Config
from megabit.data.batches import Batch
from megabit.mesh import ParallelMesh
from megabit.training.memory import peak_bytes

WARMUP = 2
"""Steps that do not count: memory is claimed, the optimizer makes its moments."""

Progress = Callable[[int, int], None]
"""Told by the first process how many steps were done, of how many."""


@dataclass(frozen=True)
class Record:
    """The measured steps of one contestant on one rank."""

    seconds: list[float]
    """Of each step."""
    losses: list[float]
    """Of each step, warm-up included."""
    waited_s: dict[str, float]
    """By axis: in which the rank was blocked in communication, mean over the steps."""
    sent_bytes: dict[str, float]
    """By axis: sent in a step, mean over the steps."""
    bubble: float
    """Time in the pipeline's schedule that the rank waited, for each unit that it computed."""
    peak_bytes: int
    """The most memory that the process ever had, Python and torch included."""
    parts: Parts | None
    """Where the time of one more step went, if that was asked for."""


def measure_in_turns(
    names: Sequence[str], config: Config, steps: int, breakdown: bool, progress: Progress
) -> Record:
    """One rank of as many as there are ``names``: the contestant of that name, step by step in turn
    with the others. Collective."""
    rank = dist.get_rank() if len(names) > 1 else 0
    contestant = make_contestant(names[rank], config)

    def take_turns(act: Callable[[], None]) -> None:
        for turn in range(len(names)):
            if turn == rank:
                act()
            if len(names) > 1:
                dist.barrier()

    return _measure(contestant, config, steps, breakdown, progress, rank == 0, take_turns)


def measure_layout(config: Config, steps: int, breakdown: bool, progress: Progress) -> Record:
    """One rank of the configured layout. Collective."""
    mesh = ParallelMesh.create(config.parallel.tp, config.parallel.pp, torch.device("cpu"))
    contestant = Megabit(config, mesh)
    return _measure(contestant, config, steps, breakdown, progress, mesh.is_main, lambda act: act())


def _measure(
    contestant: Contestant,
    config: Config,
    steps: int,
    breakdown: bool,
    progress: Progress,
    is_main: bool,
    in_turn: Callable[[Callable[[], None]], None],
) -> Record:
    meter = _Meter(contestant, config)
    for step in range(WARMUP + steps):
        if step == WARMUP:
            meter.begin()
        in_turn(meter.run_step)
        if is_main:
            progress(step + 1, WARMUP + steps)
    record = meter.record()  # before the profiler claims memory and slows a step down
    if not breakdown:
        return record
    in_turn(meter.run_profiled)
    return replace(record, parts=meter.parts)


class _Meter:
    """Runs steps of a contestant and adds up what they took."""

    def __init__(self, contestant: Contestant, config: Config) -> None:
        self._contestant = contestant
        self._config = config
        self._losses: list[float] = []
        self.parts: Parts | None = None
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        mesh = self._contestant.mesh
        self._seconds: list[float] = []
        self._pipeline_s = self._wait_s = 0.0
        self._waited_before, self._sent_before = mesh.waited_s(), mesh.sent_bytes()

    def run_step(self) -> None:
        """The next step; making its batch is not timed."""
        step = len(self._losses)
        batch = random_batch(self._config, self._contestant.mesh, step)
        started = time.perf_counter()
        outcome = self._contestant.step(batch, step)
        self._seconds.append(time.perf_counter() - started)
        self._losses.append(outcome.loss)
        self._pipeline_s += outcome.pipeline_s
        self._wait_s += outcome.wait_s

    def run_profiled(self) -> None:
        """More steps, on the same batch, of which only the parts are kept."""
        step = len(self._losses)
        batch = random_batch(self._config, self._contestant.mesh, step)
        self.parts = time_parts(lambda: self._contestant.step(batch, step), self._contestant.module)

    def record(self) -> Record:
        """Of the steps since ``begin``."""
        mesh, steps = self._contestant.mesh, len(self._seconds)
        return Record(
            seconds=self._seconds,
            losses=self._losses,
            waited_s=_per_step(mesh.waited_s(), self._waited_before, steps),
            sent_bytes=_per_step(mesh.sent_bytes(), self._sent_before, steps),
            bubble=self._wait_s / (self._pipeline_s - self._wait_s) if self._pipeline_s else 0.0,
            peak_bytes=peak_bytes(torch.device("cpu")),
            parts=None,
        )


def random_batch(config: Config, mesh: ParallelMesh, step: int) -> Batch:
    """This rank's part ``[m, B, S]`` of the batch of ``step``, the same one at every layout."""
    generator = torch.Generator().manual_seed(config.train.seed + step)
    shape = (config.train.global_batch_size, config.data.seq_length + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    own = tokens.chunk(mesh.dp.size)[mesh.dp.rank].unflatten(0, (-1, config.train.micro_batch_size))
    inputs, targets = own[..., :-1].contiguous(), own[..., 1:].contiguous()
    return Batch(inputs, targets, torch.ones_like(inputs, dtype=torch.bool))


def _per_step(after: dict[str, float], before: dict[str, float], steps: int) -> dict[str, float]:
    return {axis: (total - before[axis]) / steps for axis, total in after.items()}
