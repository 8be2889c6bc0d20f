"""Hosts in network namespaces are what the tests beside this one take them for."""

import subprocess
import time
from collections.abc import Iterator

import pytest

from megabit.benchmark.link import BURST_KB, Network
from megabit.errors import UserError
from tests.hosts.job import hosts
from tests.patience import PATIENCE_S

RECEIVE = """
import socket
server = socket.create_server(("", 5000))
print("listening", flush=True)
connection, _ = server.accept()
connection.settimeout(4)
received = 0
try:
    while data := connection.recv(1 << 16):
        received += len(data)
        print(received, flush=True)
    print("closed", flush=True)
except TimeoutError:
    print("silence", flush=True)
"""
SEND = """
import socket, sys
connection = socket.create_connection(("host0", 5000))
for line in sys.stdin:
    connection.sendall(bytes(int(line)))
"""


@pytest.fixture
def pair() -> Iterator[Network]:
    with hosts(2) as made:
        yield made


def run(pair: Network, host: int, program: str) -> "subprocess.Popen[str]":
    command = pair.run_on(host, ["python3", "-c", program])
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def receive_on_the_first(pair: Network) -> "subprocess.Popen[str]":
    receiver = run(pair, 0, RECEIVE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "listening\n"
    return receiver


def test_a_host_knows_itself_and_the_others(pair: Network) -> None:
    names = "import socket\nprint(socket.gethostname(), socket.gethostbyname('host1'))"
    told, _ = run(pair, 0, names).communicate()
    assert told.split() == ["host0", pair.address(1)]


def test_a_limit_holds_and_bytes_are_counted(pair: Network) -> None:
    pair.limit(8)
    receiver, count = receive_on_the_first(pair), 1_000_000
    before = pair.sent_bytes(1)
    started = time.monotonic()
    run(pair, 1, SEND).communicate(f"{count}\n")
    told, _ = receiver.communicate()
    assert told.split()[-2:] == [str(count), "closed"]
    # A megabyte a second, less what passes at once at either end of the wire.
    assert time.monotonic() - started > (count - 2 * 1024 * BURST_KB) / 1e6
    assert count < pair.sent_bytes(1) - before < 1.2 * count  # with headers


def test_a_cut_wire_delivers_when_it_is_healed(pair: Network) -> None:
    receiver, sender = receive_on_the_first(pair), run(pair, 1, SEND)
    assert sender.stdin is not None
    assert receiver.stdout is not None
    print(1, file=sender.stdin, flush=True)
    assert receiver.stdout.readline() == "1\n"
    pair.cut(1)
    before = pair.sent_bytes(1)
    print(1, file=sender.stdin, flush=True)
    time.sleep(0.3)
    assert pair.sent_bytes(1) == before  # and the sender was told nothing
    assert sender.poll() is None
    pair.heal(1)
    assert receiver.stdout.readline() == "2\n"
    sender.communicate()
    receiver.communicate()


def test_a_host_that_goes_down_closes_nothing(pair: Network) -> None:
    receiver, sender = receive_on_the_first(pair), run(pair, 1, SEND)
    assert sender.stdin is not None
    assert receiver.stdout is not None
    print(1, file=sender.stdin, flush=True)
    assert receiver.stdout.readline() == "1\n"
    pair.kill(1)
    assert sender.wait(PATIENCE_S) != 0
    assert receiver.communicate()[0] == "silence\n"


def test_packets_can_be_delayed(pair: Network) -> None:
    try:
        pair.delay(20)
    except UserError as error:
        pytest.skip(f"this kernel cannot delay packets: {error}")
    receive_on_the_first(pair)
    started = time.monotonic()
    run(pair, 1, SEND).communicate("1\n")
    assert time.monotonic() - started > 0.08  # a handshake: there and back, 20 ms at each end


def test_nothing_is_left() -> None:
    with hosts(2) as made:
        sleeper = subprocess.Popen(made.run_on(1, ["sleep", "60"]))
        time.sleep(0.2)
    assert sleeper.wait(PATIENCE_S) != 0
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in (*made.hosts, made.switch) if name in left]
