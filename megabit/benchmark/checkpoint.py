"""Saving a checkpoint: what training waits for, and how long it takes until it is on disk.

The configuration trains with random tokens. It saves synchronously, then asynchronously while it
trains on, then only its codes (a snapshot). Beside it torch's distributed checkpoint saves the same
tensors, both ways; it takes no hash. All write to the same folder, in turns.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp

from megabit.benchmark.measure import WARMUP, random_batch
from megabit.benchmark.run import TIMEOUT_S
from megabit.checkpoint import CheckpointStore, Part
from megabit.config import Config
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.training.more_state import training_parts
from megabit.training.resume import manifest_of
from megabit.training.snapshot import ternary_parts
from megabit.training.step import TrainingState, train_step

SYNCHRONOUS, ASYNCHRONOUS = "megabit, synchronous", "megabit, asynchronous"
SNAPSHOT = "megabit, snapshot of codes"
TORCH, TORCH_ASYNC = "torch dcp.save", "torch dcp.async_save"


@dataclass(frozen=True)
class SaveTimes:
    """Seconds of each save, of the slowest rank."""

    all_blocked_s: list[float]
    """That training waits."""
    all_total_s: list[float]
    """Until all is on disk."""
    bytes: int
    """Of all ranks."""

    @property
    def blocked_s(self) -> float:
        """The median."""
        return median(self.all_blocked_s)

    @property
    def total_s(self) -> float:
        """The median."""
        return median(self.all_total_s)


@dataclass(frozen=True)
class CheckpointResult:
    """What was measured."""

    saves: dict[str, SaveTimes]
    """By how."""
    step_s: float
    """A step while nothing is saved."""
    step_while_saving_s: float
    """A step while an asynchronous save is under way."""


def run(
    config: Config, world_size: int, repeats: int, folder: Path, progress: Callable[[str], None]
) -> CheckpointResult:
    """Save ``repeats`` times each way, on so many ranks of this host, below ``folder``."""
    steps = WARMUP + 10_000
    config = replace(config, train=replace(config.train, steps=steps))
    with tempfile.TemporaryDirectory(prefix="megabit-bench-", dir=folder) as own:
        ranks = run_ranks(
            lambda: _Meter(config, repeats, Path(own), progress).run(), world_size, TIMEOUT_S
        )
    saves = {
        name: SaveTimes(
            [max(times) for times in zip(*(r.blocked_s[name] for r in ranks), strict=True)],
            [max(times) for times in zip(*(r.total_s[name] for r in ranks), strict=True)],
            sum(rank.bytes[name] for rank in ranks),
        )
        for name in ranks[0].total_s
    }
    return CheckpointResult(
        saves,
        step_s=max(median(rank.step_s) for rank in ranks),
        step_while_saving_s=max(median(rank.step_while_saving_s) for rank in ranks),
    )


@dataclass(frozen=True)
class _Record:
    """Of one rank."""

    blocked_s: dict[str, list[float]]
    total_s: dict[str, list[float]]
    bytes: dict[str, int]
    step_s: list[float]
    step_while_saving_s: list[float]


class _Meter:
    """Trains and saves on one rank."""

    def __init__(
        self, config: Config, repeats: int, folder: Path, progress: Callable[[str], None]
    ) -> None:
        self._config, self._repeats, self._folder = config, repeats, folder
        parallel = config.parallel
        mesh = ParallelMesh.create(parallel.tp, parallel.pp, torch.device("cpu"))
        self._state = TrainingState.create(config, mesh)
        self._progress = progress if mesh.is_main else lambda name: None
        self._step = 0
        self._record = _Record({}, {}, {}, [], [])

    def run(self) -> _Record:
        for _ in range(WARMUP):
            self._train()
        for _ in range(2 * self._repeats):
            self._record.step_s.append(self._train())
        saves = {
            SYNCHRONOUS: self._save_and_wait,
            ASYNCHRONOUS: self._save_and_train,
            SNAPSHOT: self._snapshot,
            TORCH: self._torch_save,
            TORCH_ASYNC: self._torch_async_save,
        }
        for repeat in range(self._repeats):
            for name, save in saves.items():
                self._progress(f"{name}, {repeat + 1} of {self._repeats}")
                self._measure(name, save)
        return self._record

    def _measure(self, name: str, save: Callable[[Path], tuple[float, float, int]]) -> None:
        folder = self._folder / "saved"
        if dist.is_initialized():
            dist.barrier()
        blocked_s, total_s, num_bytes = save(folder)
        self._record.blocked_s.setdefault(name, []).append(blocked_s)
        self._record.total_s.setdefault(name, []).append(total_s)
        self._record.bytes[name] = num_bytes
        if dist.is_initialized():
            dist.barrier()
        if self._state.mesh.is_main:
            shutil.rmtree(folder)
        os.sync()  # what one has left to be written is not the next one's to wait for

    def _train(self) -> float:
        batch = random_batch(self._config, self._state.mesh, self._step)
        started = perf_counter()
        train_step(self._state, batch, self._step)
        self._step += 1
        return perf_counter() - started

    def _save_and_wait(self, folder: Path) -> tuple[float, float, int]:
        store, parts = CheckpointStore(folder, self._state.mesh), training_parts(self._state)
        started = perf_counter()
        store.save(manifest_of(self._state, self._step, ""), parts, {})
        store.finish()
        seconds = perf_counter() - started
        store.close()
        return seconds, seconds, _nbytes(parts)

    def _save_and_train(self, folder: Path) -> tuple[float, float, int]:
        """Trains on until the checkpoint is there, as a run would."""
        store, parts = CheckpointStore(folder, self._state.mesh), training_parts(self._state)
        started = perf_counter()
        store.save(manifest_of(self._state, self._step, ""), parts, {})
        blocked_s = perf_counter() - started
        while True:
            self._record.step_while_saving_s.append(self._train())
            polled = perf_counter()
            ended = store.poll()
            blocked_s += perf_counter() - polled
            has_ended = torch.tensor(int(ended is not None))
            if dist.is_initialized():
                dist.broadcast(has_ended, 0)
            if has_ended:
                break
        total_s = perf_counter() - started
        store.finish()
        store.close()
        return blocked_s, total_s, _nbytes(parts)

    def _snapshot(self, folder: Path) -> tuple[float, float, int]:
        store = CheckpointStore(folder, self._state.mesh)
        manifest = replace(manifest_of(self._state, self._step, ""), kind="ternary")
        started = perf_counter()
        parts = ternary_parts(self._state)
        store.save(manifest, parts, {})
        blocked_s = perf_counter() - started
        store.finish()
        total_s = perf_counter() - started
        store.close()
        return blocked_s, total_s, _nbytes(parts)

    def _torch_save(self, folder: Path) -> tuple[float, float, int]:
        tensors = self._own_tensors()
        started = perf_counter()
        with _without_a_process_group():
            dcp.save(tensors, checkpoint_id=folder)
        seconds = perf_counter() - started
        return seconds, seconds, sum(tensor.nbytes for tensor in tensors.values())

    def _torch_async_save(self, folder: Path) -> tuple[float, float, int]:
        tensors = self._own_tensors()
        started = perf_counter()
        with _without_a_process_group():
            future = dcp.async_save(tensors, checkpoint_id=folder)
            blocked_s = perf_counter() - started
            assert isinstance(future, Future)
            future.result()
        total_s = perf_counter() - started
        return blocked_s, total_s, sum(tensor.nbytes for tensor in tensors.values())

    def _own_tensors(self) -> dict[str, Tensor]:
        """What this rank saves, under names of its own: torch would take equal ones for copies."""
        rank = self._state.mesh.world.rank
        return {f"{rank}/{part.name}": part.values for part in training_parts(self._state)}


def _nbytes(parts: list[Part]) -> int:
    return sum(part.values.nbytes for part in parts)


def _without_a_process_group() -> warnings.catch_warnings:
    """torch warns that it saves for one process, which is meant."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
