"""Hosts come and go: the job goes on with who is there, on the same samples.

Hosts are launchers on this machine, of one rank each. Training is layout-exact, so that every loss
must be that of one process that was never disturbed.
"""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.faults.runs import children, run, started, steps_of
from tests.training.tiny import tiny_corpus

EXACT = (
    *("parallel.exact=full", "train.steps=100000", "checkpoint.save_interval=10"),
    # Steps slow enough that a new host comes in the middle of some.
    *("model.hidden_size=128", "model.intermediate_size=256", "model.num_hidden_layers=4"),
)
HOST = ("--nproc-per-node", "1", "--nnodes", "1:2", "--max-restarts", "3")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_host_is_lost_and_another_one_comes(tmp_path: Path) -> None:
    tiny_corpus(tmp_path)
    port = free_port()
    job = (*EXACT, *HOST, "--rdzv-endpoint", f"127.0.0.1:{port}", "faults.heartbeat_s=0.5")
    with started(tmp_path, *job, name="first") as first:
        first.wait_for(lambda: listens(port))  # it is the one where hosts meet
        with started(tmp_path, *job, name="second") as second:
            first.wait_for(lambda: "× DP 2" in first.output + second.output)
            first.wait_for_step(11)
            ranks = children(second.process.pid)
            killed_at = time.monotonic()
            second.process.kill()  # and its rank with it, as when a host is lost
            first.wait_for(lambda: "× DP 1" in first.output)
            went_on = len(steps_of(first.folder))
            first.wait_for(lambda: len(steps_of(first.folder)) > went_on)
            assert time.monotonic() - killed_at < 60  # 8 s until it counts as gone, 5 s for others
            assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
        with started(tmp_path, *job, name="third") as third:
            # With the newcomer as rank 0 or as rank 1.
            first.wait_for(lambda: (first.output + third.output).count("× DP 2") == 2)
            grown_at = steps_of(first.folder)[-1]["step"]
            first.wait_for(lambda: steps_of(first.folder)[-1]["step"] > grown_at)
            third.process.send_signal(signal.SIGTERM)  # one host is enough
            assert (third.wait(), first.wait()) == (75, 75), first.output + third.output
        assert "hosts have come; saving, and starting again with them" in (
            first.output + third.output
        )
        assert "Traceback" not in first.output + third.output
    steps = steps_of(first.folder)
    assert [row["step"] for row in steps] == [*range(1, len(steps) + 1)]

    with started(tmp_path, *EXACT, "run.dir=straight", name="straight") as straight:
        straight.wait_for_step(len(steps))
        straight.process.send_signal(signal.SIGTERM)
        assert straight.wait() == 75, straight.output
    expected = steps_of(straight.folder)[: len(steps)]
    for key in ("loss", "grad_norm", "lr"):
        assert [row[key] for row in steps] == [row[key] for row in expected], key


def test_a_host_too_many_for_the_batch_ends_the_job_with_a_line(tmp_path: Path) -> None:
    tiny_corpus(tmp_path)
    meeting = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    job = ("train.global_batch_size=2", "train.steps=2", "--nproc-per-node", "1", *meeting)
    code, said = run(tmp_path, *job)
    assert code == 0, said  # alone it fits
    assert said.startswith(
        "megabit: with 2 ranks the job would end: train.global_batch_size: 2 is not a multiple of "
        "dp=2 × train.micro_batch_size=2 = 4; dp may be one of 1\n"
    )
