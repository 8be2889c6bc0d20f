"""A slow network on one machine: two network namespaces joined by a link of limited bandwidth.

Needs Linux, root and the commands ``ip`` and ``tc`` (Debian, Ubuntu: iproute2). Nothing outside the
two namespaces is touched or reachable.
"""

import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megabit.errors import UserError

ADDRESSES = ("10.77.0.1", "10.77.0.2")
BURST_KB = 64
"""What passes at full speed before the limit holds."""


@dataclass(frozen=True)
class Link:
    """Two hosts and the wire between them."""

    hosts: tuple[str, str]
    """Names of the namespaces."""
    device: str
    """Name of the network interface in each."""

    def run_on(self, host: int, command: Sequence[str]) -> list[str]:
        """``command``, to run on one of the two hosts."""
        return ["ip", "netns", "exec", self.hosts[host], *command]

    def limit(self, mbit_per_s: float) -> None:
        """Let so much pass in each direction."""
        for host in (0, 1):
            limit = ["rate", f"{mbit_per_s:.3f}mbit", "burst", f"{BURST_KB}kb", "latency", "400ms"]
            tbf = ["tc", "qdisc", "replace", "dev", self.device, "root", "tbf", *limit]
            _run(self.run_on(host, tbf))


@contextmanager
def two_hosts() -> Iterator[Link]:
    """A link for the length of the block.

    Raises:
        UserError: this machine does not let us make one; says why.
    """
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise UserError(f"needs the command {command!r} (Debian, Ubuntu: apt install iproute2)")
    own = secrets.token_hex(4)
    hosts = (f"megabit-{own}-0", f"megabit-{own}-1")
    link = Link(hosts, "wire")
    try:
        for host in hosts:
            _run(["ip", "netns", "add", host])
        ends = ["type", "veth", "peer", "name", "wire", "netns", hosts[1]]
        _run(["ip", "link", "add", "wire", "netns", hosts[0], *ends])
        for number, address in enumerate(ADDRESSES):
            _run(link.run_on(number, ["ip", "address", "add", f"{address}/24", "dev", "wire"]))
            for device in ("lo", "wire"):
                _run(link.run_on(number, ["ip", "link", "set", device, "up"]))
        yield link
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        why = result.stderr.strip().splitlines() or ["no reason given"]
        raise UserError(f"needs network namespaces: {' '.join(command)}: {why[-1]}")
