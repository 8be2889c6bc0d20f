"""A doctor's visit to three hosts with planted faults. Needs root, ip and tc."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megabit.benchmark.link import Network
from tests.hosts.job import hosts as hosts_or_skip

MBIT, SLOW_MBIT = 200, 8


@pytest.fixture
def hosts() -> Iterator[Network]:
    with hosts_or_skip(3) as made:
        yield made


@pytest.mark.slow
def test_the_slow_pair_and_other_faults_are_named(hosts: Network, tmp_path: Path) -> None:
    """Of three links one is slow in one direction, one host has small packets, and one has another
    folder in the place of the shared one."""
    slow_down(hosts, 1, 2)
    tool("ip", "-n", hosts.hosts[0], "link", "set", hosts.device, "mtu", "1400")
    other = tmp_path / "other"
    other.mkdir()
    ranks = [
        subprocess.Popen(
            hosts.run_on(rank, doctor(rank, tmp_path if rank < 2 else other)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    print(*(text for output in outputs for text in output))
    assert [rank.returncode for rank in ranks] == [1, 1, 1]
    assert [err for _, err in outputs] == [""] * 3
    first, *others = [out for out, _ in outputs]
    assert others == ["", ""]  # one speaks for all
    lines = first.splitlines()
    wrong = [line.removeprefix("wrong    ") for line in lines if line.startswith("wrong ")]
    # The slowest comes first; on a busy machine others may look slow, too.
    link = next(line for line in wrong if line.startswith("network: "))
    assert link.startswith("network: host1 → host2: ")
    assert "Mbit/s, the other way" in link
    assert any(line.startswith("storage: host2: has another folder than rank 0") for line in wrong)
    assert (
        "warning  interfaces: host0: packets have up to 1400 bytes (MTU), elsewhere 1500" in lines
    )
    assert "clocks" in first
    assert "things are wrong" in lines[-1]


def doctor(rank: int, folder: Path) -> list[str]:
    """The command of one of three ranks, each on a host of its own."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "RANK": rank,
        "WORLD_SIZE": 3,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": Network.name(0),
        "MASTER_PORT": 29500,
    }
    environment = ["env", *(f"{name}={value}" for name, value in variables.items())]
    command = ["-m", "megabit", "doctor", "--quick", "--storage", str(folder)]
    return [*environment, sys.executable, *command]


def slow_down(hosts: Network, sender: int, receiver: int) -> None:
    """Let little pass from one host to another one; and so much between all others that ranks which
    wait for a core do not count."""
    hosts.limit(MBIT, *{0, 1, 2} - {sender})
    to = ["match", "ip", "dst", f"{Network.address(receiver)}/32"]
    for what, *arguments in (
        ["qdisc", "root", "handle", "1:", "htb", "default", "1"],
        ["class", "parent", "1:", "classid", "1:1", "htb", "rate", f"{MBIT}mbit"],
        ["class", "parent", "1:", "classid", "1:2", "htb", "rate", f"{SLOW_MBIT}mbit"],
        ["filter", "parent", "1:", "protocol", "ip", "prio", "1", "u32", *to, "flowid", "1:2"],
    ):
        tool("tc", "-n", hosts.hosts[sender], what, "add", "dev", hosts.device, *arguments)


def tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
