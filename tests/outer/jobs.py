"""Islands that are jobs of their own, and the owner of their outer weights: real processes and
sockets."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabit.config import Config
from megabit.data.batches import Batch
from megabit.mesh import ParallelMesh
from megabit.outer.owner import Owner
from megabit.outer.stale import Stale
from megabit.training.step import TrainingState, train_step
from tests.training.tiny import SETTINGS, global_batch, make_mesh, tiny

SOON_S = 120.0
"""By when what must happen has happened, on a slow machine too."""


def stale_settings(port: int, island: int) -> tuple[str, ...]:
    return (
        *("outer.method=stale", "outer.islands=2", "outer.inner_steps=3"),
        *(f"outer.owner=127.0.0.1:{port}", f"outer.island={island}"),
        *("faults.retry_pause_s=0.05", "faults.retries=4000", "train.micro_batch_size=1"),
    )


def stale_config(port: int, island: int = 0, *settings: str) -> Config:
    """One of two islands that meet after 3 steps, unless told otherwise."""
    return tiny(*stale_settings(port, island), *settings)


def share_of(config: Config, mesh: ParallelMesh, step: int, island: int) -> Batch:
    """What a rank of an island computes of a step's global batch, ``[m, B, S]``."""
    batch = global_batch(config, step)
    shape = (-1, config.train.micro_batch_size, config.data.seq_length)

    def own(x: Tensor) -> Tensor:
        parts = x[0].chunk(config.outer.islands * mesh.dp.size)
        return parts[island * mesh.dp.size + mesh.dp.rank].reshape(shape)

    return Batch(own(batch.inputs), own(batch.targets), own(batch.mask))


@dataclass
class StaleRun:
    """The calling rank's island."""

    state: TrainingState
    outer: Stale
    steps: int = 0
    said: list[str] = field(default_factory=list)

    @staticmethod
    def create(config: Config) -> "StaleRun":
        state = TrainingState.create(config, make_mesh(config))
        said: list[str] = []
        return StaleRun(state, Stale(config, state.optimizer, said.append), said=said)

    def step(self) -> bool:
        """A step, and a meeting if there is one; whether masters have changed in it."""
        config = self.state.config
        batch = share_of(config, self.state.mesh, self.steps, config.outer.island)
        train_step(self.state, batch, self.steps)
        self.steps += 1
        return self.outer.after_step(self.steps)

    def train(self, steps: int) -> "StaleRun":
        """All of a run."""
        self.outer.begin()
        return self.go_on(steps)

    def go_on(self, steps: int) -> "StaleRun":
        """The rest of a run."""
        for _ in range(steps):
            self.step()
        self.outer.conclude(self.steps)
        return self

    def walk(self, seed: int) -> None:
        """A round, without a model: every weight moves at random, and the owner is met."""
        generator = torch.Generator().manual_seed(seed)
        for weights in self.masters():
            weights.add_(torch.randn(weights.shape, generator=generator), alpha=0.1)
        self.steps += self.state.config.outer.inner_steps
        self.state.optimizer.updates += 1
        self.outer.after_step(self.steps)

    def masters(self) -> list[Tensor]:
        """Views, by part."""
        return [piece.tensors["master"] for piece in self.state.optimizer.pieces()]

    def copies(self) -> list[Tensor]:
        return [x.clone() for x in self.masters()]


@contextmanager
def owner_here(
    folder: Path, *settings: str, port: int = 0
) -> Iterator[tuple[int, list[str], Owner]]:
    """An owner in a thread of this process: its port, what it reports, and itself."""
    stop = threading.Event()
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", port)) as listener:
        port = listener.getsockname()[1]
        config = stale_config(port, 0, *settings)
        owner = Owner(config, folder / "outer.safetensors", report=lines.append)
        thread = threading.Thread(target=owner.serve, args=(listener, stop), daemon=True)
        thread.start()
        try:
            yield port, lines, owner
        finally:
            stop.set()
            thread.join(SOON_S)
            assert not thread.is_alive()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def owner_process(
    port: int, state: Path, *settings: str
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """``megabit owner`` in a process, and the file of what it prints; killed at the end."""
    said = state.with_suffix(f".{time.monotonic_ns()}.log")
    config = [*SETTINGS, *stale_settings(port, 0), *settings]
    command = [sys.executable, "-m", "megabit", "owner", *config, "--state", str(state)]
    with said.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, text=True)
    try:
        wait_until(lambda: "listens" in said.read_text() or process.poll() is not None)
        yield process, said
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


@dataclass
class Job:
    """A function that runs in a fork of this process."""

    process: Any
    reader: Connection

    @staticmethod
    def start(function: Callable[[], Any]) -> "Job":
        fork = get_context("fork")
        reader, writer = fork.Pipe(duplex=False)
        process = fork.Process(target=_run, args=(function, writer))
        process.start()
        writer.close()
        return Job(process, reader)

    def result(self) -> Any:
        """What the function has returned."""
        assert self.reader.poll(SOON_S), "the job has not ended"
        is_well, value = pickle.loads(self.reader.recv_bytes())
        self.process.join()
        assert is_well, value
        return value

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def _run(function: Callable[[], Any], writer: Connection) -> None:
    torch.set_num_threads(1)
    try:
        message = True, function()
    except BaseException as error:
        message = False, "".join(traceback.format_exception(error))
    writer.send_bytes(pickle.dumps(message))
    writer.close()
    os._exit(0)


class Background(threading.Thread):
    """A call in a thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._error: BaseException | None = None
        self._value: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(SOON_S)
        assert not self.is_alive(), "it has not ended"
        if self._error is not None:
            raise self._error
        return self._value


@contextmanager
def both(port: int, *settings: str) -> Iterator[tuple[StaleRun, StaleRun]]:
    """Two islands in this process, which have joined."""
    runs = [StaleRun.create(stale_config(port, island, *settings)) for island in (0, 1)]
    for run in runs:
        run.outer.begin()
    try:
        yield runs[0], runs[1]
    finally:
        for run in runs:
            run.outer.close()
