"""``megabit doctor`` as a user starts it: what it prints, and its exit code."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megabit.doctor.reach import explain
from tests.command import megabit, refused


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # which the command sets, for good


@pytest.mark.usefixtures("_quiet")
def test_one_process(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    code, out, err = megabit("doctor", "--quick", "--storage", tmp_path, "--json", file)
    assert (code, err) == (0, [])
    assert out[0].strip() == "1 rank on 1 host"
    assert out[-1].startswith("Nothing is wrong")
    found = json.loads(file.read_text())
    assert found["is_fine"] is True
    assert found["settings"]["parallel.tp"] == "1"
    assert found["storage"]["folder"] == str(tmp_path)
    assert found["disks"][0]["written_bytes"] == 2**23
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert "found.json exists already" in refused("doctor", "--json", file)


@pytest.mark.usefixtures("_quiet")
def test_what_is_wrong_is_said_with_what_to_do(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    code, out, _ = megabit("doctor", "--quick", "--storage", missing)
    assert code == 1
    wrong = out.index(f"wrong    storage: rank 0: {missing} does not exist")
    assert out[wrong + 1].strip().startswith("→ mount the same shared folder")
    assert out[-1].startswith("1 thing is wrong")


def test_wrong_arguments_are_refused() -> None:
    assert "model.hiden_size" in refused("doctor", "model.hiden_size=3")
    assert "--nproc-per-node" in refused("doctor", "--nnodes", "2")


@pytest.mark.slow
def test_launched_ranks(tmp_path: Path) -> None:
    """Settings that do not fit the ranks are a finding; all ranks end with the same code."""
    settings = ["train.global_batch_size=3", "train.micro_batch_size=1", f"run.dir={tmp_path}/new"]
    options = ["--nproc-per-node", "2", "--quick", "--json", str(tmp_path / "found.json")]
    done = run(["doctor", *settings, *options])
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("wrong    settings: train.global_batch_size") == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["storage"]["folder"] == str(tmp_path)  # what there is above the new folder
    assert len(found["locals"][0]["pairs"]) == 1
    assert {timing["kind"] for timing in found["collectives"]} == {
        "all-reduce",
        "all-gather",
        "all-to-all",
    }
    assert len({rank["digest"] for rank in found["products"]}) == 1


# What goes wrong before ranks have found each other: one line each.


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.slow
def test_a_port_that_is_in_use(taken_port: int) -> None:
    said = said_of_rank(0, taken_port)
    assert said.startswith(f"error: the port of 127.0.0.1:{taken_port} is in use on this host")


@pytest.mark.slow
def test_nobody_is_at_the_endpoint() -> None:
    said = said_of_rank(1, free_port())
    assert said.startswith("error: rank 1 gets no answer from 127.0.0.1:")


@pytest.mark.slow
def test_the_others_do_not_come() -> None:
    said = said_of_rank(0, free_port())
    assert said.startswith("error: 1 of 2 ranks have come to 127.0.0.1:")


@pytest.mark.slow
def test_a_rank_that_dies_meanwhile(tmp_path: Path) -> None:
    """The other one says during which check, and leaves nothing behind."""
    endpoint = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "megabit", "doctor", "--storage", str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), **endpoint},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 100
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        ranks[1].kill()
    out, err = ranks[0].communicate(timeout=100)
    ranks[1].communicate()
    assert (ranks[0].returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert "another rank is gone" in line or "waits in vain for rank 1" in line
    assert list(tmp_path.iterdir()) == []


def test_an_interface_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("GLOO_SOCKET_IFNAME", "eth77")):
        monkeypatch.setenv(name, value)
    assert refused("doctor").startswith("GLOO_SOCKET_IFNAME: no interface is called 'eth77'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: "
            "Connection refused, remote=[127.0.0.1]:4242 (rank=8, size=16)",
            "set GLOO_SOCKET_IFNAME there",
        ),
        (
            "Gloo connectFullMesh failed with timed out connecting: remote=[10.0.0.7]:4242",
            "cannot connect to another rank at 10.0.0.7: a firewall",
        ),
        ("[enforce fail] ifa != nullptr. Unable to find address for: ib7", "no interface 'ib7'"),
        ("something else\nwith a traceback", "cannot join the others at localhost:1: something"),
    ],
)
def test_words_for_what_torch_says(text: str, expected: str) -> None:
    endpoint = {"RANK": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert expected in explain(RuntimeError(text), endpoint)


def test_a_host_that_has_no_address() -> None:
    endpoint = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "1"}
    said = explain(RuntimeError("The client socket has timed out"), endpoint)
    assert said.startswith("no-such-host.invalid:1: no such host")


def said_of_rank(rank: int, port: int) -> str:
    """What one of two ranks says when it fails, without the other."""
    endpoint = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = run(["doctor", "--timeout", "2"], RANK=str(rank), WORLD_SIZE="2", **endpoint)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    # The tests' own choice of what torch logs, which the command would keep to.
    own = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    return subprocess.run(
        [sys.executable, "-m", "megabit", *command],
        env={**own, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
