"""The rank processes of an engine: started, watched and ended by another process of this host.

That process needs no torch, and a rank that dies does not take it along. It holds one end of a
socket, the other one is rank 0's: lines of JSON (``messages``). And it holds the writing end of a
pipe that nothing is ever written to: when it is closed, by whatever end of the process, ranks end.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import socket, socketpair
from typing import Any

from megabit.config import EngineConfig, ServingConfig, ServingParallelConfig

ENDING_S = 5.0
"""How long ranks may take to end by themselves."""
CAUSE_S = 0.5
"""How long to wait for ranks that end because another one has."""


@dataclass(frozen=True)
class RankJob:
    """What a rank process is told, as JSON on its command line."""

    checkpoint: str
    parallel: dict[str, Any]
    engine: dict[str, Any]
    """Fields of ``ServingConfig``; ranks need no others, such as a key that clients must have."""
    rank: int
    world_size: int
    threads: int
    folder: str
    """For files of this engine only: where ranks meet, and what they say when they fail."""
    lifeline: int
    """File descriptor: at its end, the rank is to end."""
    socket: int | None
    """File descriptor of rank 0's end."""

    @property
    def serving(self) -> ServingConfig:
        return ServingConfig(ServingParallelConfig(**self.parallel), EngineConfig(**self.engine))

    @property
    def rendezvous(self) -> Path:
        return Path(self.folder) / "rendezvous"

    @property
    def error_file(self) -> Path:
        return Path(self.folder) / f"rank{self.rank}.error"


class RankProcesses:
    """The ranks of one engine.

    Attributes:
        socket: this process's end of the socket to rank 0, blocking.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        socket: socket,
        lifeline: int,
        folder: Path,
    ) -> None:
        self.socket = socket
        self._processes = processes
        self._lifeline: int | None = lifeline
        self._folder = folder

    @staticmethod
    def start(checkpoint: Path, serving: ServingConfig, log: Path | None = None) -> "RankProcesses":
        """Start ``tp · pp`` ranks. They have loaded the model when ``Ready`` comes.

        Args:
            log: file for what ranks print; default: where this process prints errors.
        """
        world_size = serving.parallel.tp * serving.parallel.pp
        threads = serving.engine.threads or max(1, usable_cores() // world_size)
        folder = Path(tempfile.mkdtemp(prefix="megabit-engine-"))
        own, theirs = socketpair()
        ending, lifeline = os.pipe()
        processes: list[subprocess.Popen[bytes]] = []
        output = None if log is None else log.open("ab")
        try:
            for rank in range(world_size):
                fds = [ending] + [theirs.fileno()] * (rank == 0)
                job = RankJob(
                    str(checkpoint),
                    asdict(serving.parallel),
                    asdict(serving.engine),
                    rank,
                    world_size,
                    threads,
                    str(folder),
                    ending,
                    theirs.fileno() if rank == 0 else None,
                )
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "megabit.inference.rank", json.dumps(asdict(job))],
                        stdin=subprocess.DEVNULL,
                        stdout=output or sys.stderr.fileno(),
                        stderr=output,
                        pass_fds=fds,
                        start_new_session=True,  # Ctrl-C is for the process that started them
                    )
                )
        except BaseException:
            os.close(lifeline)
            own.close()
            raise
        finally:
            theirs.close()
            os.close(ending)
            if output is not None:
                output.close()
        return RankProcesses(processes, own, lifeline, folder)

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [process.pid for process in self._processes]

    def exit_codes(self) -> list[int | None]:
        """By rank; None of those that run, and minus the signal of those that one has ended."""
        return [process.poll() for process in self._processes]

    def failure(self) -> str:
        """What made the engine fail, in a line: the first rank that failed, and what it said."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline and not all(c is not None for c in self.exit_codes()):
            time.sleep(0.02)
        codes = self.exit_codes()
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                return f"rank {rank} was ended by {signal.Signals(-code).name}"
        said = sorted(self._folder.glob("rank*.error"), key=lambda file: file.stat().st_mtime_ns)
        for file in said:
            if text := file.read_text(encoding="utf-8", errors="replace").strip():
                return text
        for rank, code in enumerate(codes):
            if code is not None:
                return f"rank {rank} ended with code {code}"
        return "the engine does not answer"

    def close(self) -> None:
        """Let ranks end by themselves, after ``Stop``; kill those that do not."""
        deadline = time.monotonic() + ENDING_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self.kill()

    def kill(self) -> None:
        """End all ranks now, stopped ones as well; may be called again."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        self.socket.close()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        shutil.rmtree(self._folder, ignore_errors=True)


def usable_cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
