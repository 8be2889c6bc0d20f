"""Real ``megabit train`` processes under the launcher, for tests that break them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S
from tests.training.tiny import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
}
PLACES = ("data.dir=corpus", "run.dir=run")


@dataclass
class Job:
    """A launcher that runs, and where its run writes."""

    process: subprocess.Popen[str]
    folder: Path
    said: Path

    @property
    def output(self) -> str:
        """What it and its ranks have printed so far."""
        return self.said.read_text()

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(PATIENCE_S)

    def wait_for(self, what: Callable[[], Any]) -> None:
        """Until ``what`` holds; the job must be alive until then."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, self.output
            assert self.process.poll() is None, self.output
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Until the metrics of so many steps are written."""
        self.wait_for(lambda: any(row.get("step", 0) >= step for row in steps_of(self.folder)))


@contextmanager
def started(
    folder: Path, *arguments: str, name: str = "job", command: Sequence[str] = ("megabit",)
) -> Iterator[Job]:
    """``megabit train`` with the tiny model, in ``folder``, where a corpus is; nothing of it is
    left afterwards."""
    said = folder / f"{name}.txt"
    with said.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "train", *SETTINGS, *PLACES, *arguments],
            cwd=folder,
            env=ENVIRONMENT,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
    run = next((a.removeprefix("run.dir=") for a in arguments if a.startswith("run.dir=")), "run")
    job = Job(process, folder / run, said)
    try:
        yield job
    finally:
        pids = set(children(process.pid))
        for pid in (process.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def run(folder: Path, *arguments: str, **options: Any) -> tuple[int, str]:
    """``started``, to its end: exit code and output."""
    with started(folder, *arguments, **options) as job:
        return job.wait(), job.output


def children(pid: int) -> list[int]:
    """Process ids of a process' children."""
    with suppress(OSError):
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return []


def is_alive(pid: int) -> bool:
    """Whether a process is there that has not ended."""
    return state_of(pid) not in ("X", "Z")


def state_of(pid: int | None) -> str:
    """R, S, T or Z, as the kernel has it; X if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of steps of a run that is being written."""
    with suppress(OSError):
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if "loss" in row]
    return []
