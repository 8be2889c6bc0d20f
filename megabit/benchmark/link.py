"""Hosts on one machine: network namespaces, each with a wire to one switch, a bridge.

A wire has a bandwidth (``limit``), can be cut and healed, and counts its bytes; a host can be
switched off. What runs on a host sees the others by name, ``host0`` to ``host{N-1}``, and nothing
else: neither the machine's own network nor the world's.

Needs Linux, root and the commands ``ip``, ``tc`` and ``unshare`` (Debian, Ubuntu: iproute2,
util-linux). Nothing outside the namespaces is touched or reachable.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megabit.errors import UserError

BURST_KB = 64
"""What passes at full speed before a limit holds."""
HOSTS_FILES = Path("/etc/netns")
"""Where ``ip netns exec`` looks for what a namespace sees under ``/etc``."""
SET_HOSTNAME = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'


@dataclass(frozen=True)
class Network:
    """Hosts and the wires between them and their switch."""

    hosts: tuple[str, ...]
    """Names of the namespaces."""
    switch: str
    """Name of the namespace with the bridge; its port ``wire{n}`` leads to host n."""
    device: str = "wire"
    """Name of the network interface in each host."""

    @staticmethod
    def name(host: int) -> str:
        """What a host calls itself, and others call it."""
        return f"host{host}"

    @staticmethod
    def address(host: int) -> str:
        """Its IPv4 address."""
        return f"10.77.0.{host + 1}"

    def run_on(self, host: int, command: Sequence[str]) -> list[str]:
        """``command``, to run on a host."""
        inside = ["ip", "netns", "exec", self.hosts[host], "unshare", "--uts"]
        return [*inside, "sh", "-c", SET_HOSTNAME, self.name(host), *command]

    def limit(self, mbit_per_s: float, *hosts: int) -> None:
        """Let so much pass in each direction on the wires of ``hosts``; default: of all."""
        rate = ["rate", f"{mbit_per_s:.3f}mbit", "burst", f"{BURST_KB}kb", "latency", "400ms"]
        self._shape(hosts, ["tbf", *rate])

    def delay(self, milliseconds: float, *hosts: int) -> None:
        """Let packets take so long in each direction, in place of a limit.

        Raises:
            UserError: the kernel has no ``netem``.
        """
        self._shape(hosts, ["netem", "delay", f"{milliseconds:.3f}ms"])

    def cut(self, host: int) -> None:
        """Pull a host's wire out of the switch: nobody is told, packets just don't arrive."""
        _run(["ip", "-n", self.switch, "link", "set", f"wire{host}", "down"])

    def heal(self, host: int) -> None:
        """Put it back."""
        _run(["ip", "-n", self.switch, "link", "set", f"wire{host}", "up"])

    def kill(self, host: int) -> None:
        """Switch a host off. As when power fails, no connection is closed: its wire is cut first.

        ``heal`` and new processes make it a host that has been switched on again.
        """
        self.cut(host)
        deadline = time.monotonic() + 10
        while (running := self._processes(host)) and time.monotonic() < deadline:
            for process in running:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)

    def sent_bytes(self, host: int) -> int:
        """What has left a host since it exists, with the headers of all layers."""
        shown = _run(["ip", "-n", self.switch, "-s", "-json", "link", "show", "dev", f"wire{host}"])
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])

    def _shape(self, hosts: Sequence[int], discipline: Sequence[str]) -> None:
        for host in hosts or range(len(self.hosts)):
            for namespace, device in (
                (self.hosts[host], self.device),
                (self.switch, f"wire{host}"),
            ):
                place = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root"]
                _run([*place, *discipline])

    def _processes(self, host: int) -> list[int]:
        return [int(line) for line in _run(["ip", "netns", "pids", self.hosts[host]]).split()]


@contextmanager
def network(hosts: int = 2) -> Iterator[Network]:
    """So many hosts for the length of the block; then whatever runs on them is killed.

    Raises:
        UserError: this machine does not let us make them; says why.
    """
    for command, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(command) is None:
            raise UserError(
                f"needs the command {command!r} (Debian, Ubuntu: apt install {package})"
            )
    own = f"megabit-{secrets.token_hex(4)}"
    made = Network(tuple(f"{own}-{host}" for host in range(hosts)), f"{own}-switch")
    try:
        _make_switch(made.switch)
        for host in range(hosts):
            _make_host(made, host)
        yield made
    finally:
        for host, namespace in enumerate(made.hosts):
            with suppress(UserError):  # one that was not made
                made.kill(host)
            shutil.rmtree(HOSTS_FILES / namespace, ignore_errors=True)
        for namespace in (*made.hosts, made.switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _make_switch(namespace: str) -> None:
    _run(["ip", "netns", "add", namespace])
    _run(["ip", "-n", namespace, "link", "add", "name", "switch", "type", "bridge"])
    _run(["ip", "-n", namespace, "link", "set", "switch", "up"])


def _make_host(made: Network, host: int) -> None:
    namespace, port = made.hosts[host], f"wire{host}"
    _run(["ip", "netns", "add", namespace])
    other_end = ["type", "veth", "peer", "name", port, "netns", made.switch]
    _run(["ip", "-n", namespace, "link", "add", "name", made.device, *other_end])
    _run(["ip", "-n", made.switch, "link", "set", port, "master", "switch", "up"])
    for device in ("lo", made.device):
        _run(["ip", "-n", namespace, "link", "set", device, "up"])
    _run(["ip", "-n", namespace, "address", "add", f"{made.address(host)}/24", "dev", made.device])
    names = [("127.0.0.1", "localhost")]
    names += [(made.address(other), made.name(other)) for other in range(len(made.hosts))]
    (HOSTS_FILES / namespace).mkdir(parents=True)
    (HOSTS_FILES / namespace / "hosts").write_text("".join(f"{a} {name}\n" for a, name in names))


def _run(command: Sequence[str]) -> str:
    """What it prints."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        why = result.stderr.strip().splitlines() or ["no reason given"]
        raise UserError(
            f"the kernel, or this user's rights, do not do: {' '.join(command)}: {why[-1]}"
        )
    return result.stdout
