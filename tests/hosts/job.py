"""A training job on hosts that can be cut off and switched off (``megabit.benchmark.link``)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from megabit.benchmark.link import Network, network
from megabit.errors import UserError
from megabit.faults.members import members_file, read_members

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400
PATIENCE_S = 120
"""Longer than anything here takes, on a machine that does other things as well."""


@contextmanager
def hosts(number: int) -> Iterator[Network]:
    """So many hosts, or the test is skipped with the reason."""
    try:
        context = network(number)
        made = context.__enter__()
    except UserError as error:
        pytest.skip(f"this machine has no network namespaces for us: {error}")
    try:
        yield made
    finally:
        context.__exit__(None, None, None)


class Job:
    """One launcher on each host, all with the same command.

    Args:
        folder: run.dir, which hosts share; what launchers print is there, too.
    """

    def __init__(
        self, hosts: Network, folder: Path, settings: Sequence[str], *options: str
    ) -> None:
        self.hosts, self.folder = hosts, folder
        self._command = [sys.executable, "-m", "megabit", "train", *settings, f"run.dir={folder}"]
        self._command += [f"--rdzv-endpoint={hosts.name(0)}:{PORT}", *options]
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._revived: set[int] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, *numbers: int, options: Sequence[str] = ()) -> None:
        """Start the launchers of these hosts."""
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        for host in numbers:
            with (self.folder / f"host{host}.log").open("ab") as log:
                self._launchers[host] = subprocess.Popen(
                    self.hosts.run_on(host, [*self._command, *options]),
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def stop(self, host: int) -> None:
        """SIGTERM to the launcher of one host."""
        self._launchers[host].send_signal(signal.SIGTERM)

    def codes(self, *numbers: int) -> list[int]:
        """Exit codes of the launchers of these hosts; waits for them."""
        deadline = time.monotonic() + PATIENCE_S
        return [
            self._launchers[host].wait(max(0.1, deadline - time.monotonic())) for host in numbers
        ]

    def revive(self, host: int) -> None:
        """From now on start its launcher again when it has failed, as a service manager would."""
        self._revived.add(host)

    def wait_for(self, what: str, condition: Callable[[], bool]) -> float:
        """Until it is so; returns the seconds that it took."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > PATIENCE_S:
                pytest.fail(f"waited {PATIENCE_S} s for: {what}\n{self.logs()}")
            self.start(*(host for host in self._revived if self._launchers[host].poll()))
            time.sleep(0.1)
        return time.monotonic() - started

    def wait_for_steps_on(self, *numbers: int, steps: int = 2) -> float:
        """Until exactly these hosts train, and have taken ``steps`` steps from when that was seen;
        returns seconds."""
        names = {self.hosts.name(host) for host in numbers}
        seconds = self.wait_for(f"ranks on {names}", lambda: self.members() == names)
        first = self.last_step()
        return seconds + self.wait_for(
            f"steps on {names}",
            lambda: self.members() == names and self.last_step() >= first + steps,
        )

    def members(self) -> set[str]:
        """The hosts that the run has ranks on, by what it has written when it began."""
        try:
            return {member.host for member in read_members(members_file(self.folder))}
        except UserError:
            return set()

    def last_step(self) -> int:
        """Of those that are written down."""
        return max(losses_of(self.folder), default=0)

    def logs(self) -> str:
        """What all launchers and ranks have printed."""
        files = sorted(self.folder.glob("host*.log"))
        return "\n".join(f"--- {file.stem}\n{file.read_text()}" for file in files)


def losses_of(run: Path) -> dict[int, float]:
    """The loss of each step of a run that stands; no step may be there twice."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert len(dict(losses)) == len(losses), losses
    return dict(losses)
