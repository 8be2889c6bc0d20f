"""Hosts with fixed numbers (``--node-rank``): one that is lost and comes back is let in again.

Hosts are launchers on this machine, of one rank each.
"""

import signal
from pathlib import Path

import pytest

from tests.faults.runs import children, is_alive, run, started, steps_of
from tests.faults.test_elastic import free_port, listens
from tests.training.runs import assert_same_tensors, checkpoint, rows
from tests.training.tiny import tiny_corpus

STEPS = 26
JOB = (
    *(f"train.steps={STEPS}", "checkpoint.save_interval=5", "faults.heartbeat_s=0.5"),
    # Steps slow enough that hosts are lost in the middle of some.
    *("model.hidden_size=128", "model.intermediate_size=256", "model.num_hidden_layers=4"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def host(node: int, port: int) -> tuple[str, ...]:
    """Its options."""
    return (
        *("--nproc-per-node", "1", "--nnodes", "2", "--node-rank", str(node)),
        *("--max-restarts", "3", "--rdzv-endpoint", f"127.0.0.1:{port}"),
    )


def test_a_lost_host_comes_back_twice(tmp_path: Path) -> None:
    tiny_corpus(tmp_path)
    port = free_port()
    with started(tmp_path, *JOB, *host(0, port), name="first") as first:
        first.wait_for(lambda: listens(port))
        for time, step in enumerate((7, 17)):
            with started(tmp_path, *JOB, *host(1, port), name=f"second_{time}") as second:
                first.wait_for_step(step)
                ranks = children(second.process.pid)
                second.process.kill()  # and its rank with it, as when a host is lost
                second.process.wait()
                first.wait_for(lambda ranks=ranks: not any(map(is_alive, ranks)))
        with started(tmp_path, *JOB, *host(1, port), name="third") as third:
            assert (third.wait(), first.wait()) == (0, 0), first.output + third.output
        assert "(restart 2 of 3)" in first.output
        assert first.output.count("Resuming after step") == 2
        assert "Traceback" not in first.output + third.output
    code, said = run(tmp_path, *JOB, "run.dir=straight", "--nproc-per-node", "2", name="straight")
    assert code == 0, said
    assert [row["step"] for row in steps_of(tmp_path / "run")] == [*range(1, STEPS + 1)]
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")
    assert_same_tensors(
        checkpoint(tmp_path / "run", STEPS), checkpoint(tmp_path / "straight", STEPS)
    )


def test_without_the_host_where_they_meet_the_others_end_with_a_line(tmp_path: Path) -> None:
    tiny_corpus(tmp_path)
    port = free_port()
    job = (*JOB, "train.steps=100000")
    with started(tmp_path, *job, *host(0, port), name="first") as first:
        first.wait_for(lambda: listens(port))
        with started(tmp_path, *job, *host(1, port), name="second") as second:
            first.wait_for_step(3)
            first.process.send_signal(signal.SIGKILL)
            assert second.wait() == 1
            *_, last = second.output.splitlines()
            assert last.startswith(
                f"error: --rdzv-endpoint: lost the place where hosts meet, 127.0.0.1:{port}"
            )
            assert "Traceback" not in second.output


def test_a_host_that_does_not_exist(tmp_path: Path) -> None:
    tiny_corpus(tmp_path)
    options = ("--nproc-per-node", "1", "--nnodes", "2", "--rdzv-endpoint", "nowhere.invalid:29400")
    code, said = run(tmp_path, "faults.retries=1", "faults.retry_pause_s=0.1", *options)
    assert code == 1
    told, last = said.splitlines()
    assert "no host is called nowhere.invalid" in told
    assert told.endswith("retry 1 of 1 in 0.1 s")
    assert last.startswith("error: --rdzv-endpoint: no host is called nowhere.invalid (")
