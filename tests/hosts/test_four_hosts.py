"""Four hosts, one rank on each: links are cut and healed, hosts go down and come back, and the
losses are those of one process that nothing ever happened to."""

import re
from pathlib import Path

import pytest

from megabit.cli.exit_codes import STOPPED
from tests.command import megabit
from tests.hosts.job import Job, hosts, losses_of
from tests.training.tiny import SETTINGS, tiny_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MBIT_PER_S = 4
"""So that a step takes half a second, mostly of waiting."""
HANG_S = 6


def settings(folder: Path) -> list[str]:
    return [
        *SETTINGS,
        # 12 microbatches, for 1, 2, 3 and 4 ranks.
        *("train.global_batch_size=12", "train.micro_batch_size=1", "train.steps=1000"),
        # Sums over other numbers of ranks differ in their last bits. In double precision no weight
        # is so near to where it would take another code that this could matter.
        "precision.compute=float64",
        *(f"data.text={folder / 'text'}", f"data.dir={folder / 'corpus'}"),
        *("checkpoint.save_interval=3", "checkpoint.keep_last=2"),
        *(f"faults.hang_s={HANG_S}", "faults.heartbeat_s=0.5"),
    ]


def test_hosts_go_and_come(tmp_path: Path) -> None:
    tiny_corpus(tmp_path)
    with hosts(4) as cluster:
        cluster.limit(MBIT_PER_S)
        options = ("--nproc-per-node=1", "--nnodes=1:4", "--max-restarts=20")
        job = Job(cluster, tmp_path / "run", settings(tmp_path), *options)
        job.start(0, 1, 2, 3)
        job.wait_for_steps_on(0, 1, 2, 3, steps=5)  # so that there is a checkpoint

        cluster.cut(3)
        seconds = {"cut": job.wait_for_steps_on(0, 1, 2)}
        named = rf"nothing has moved for {HANG_S} s .* rank \d \(host3, pid \d+\) has given no sign"
        assert re.search(named, job.logs()), job.logs()
        cluster.heal(3)
        job.revive(3)  # it comes back by itself, unless it has given up meanwhile
        seconds["healed"] = job.wait_for_steps_on(0, 1, 2, 3)

        cluster.kill(1)
        seconds["killed"] = job.wait_for_steps_on(0, 2, 3)
        cluster.heal(1)
        job.start(1)
        seconds["back"] = job.wait_for_steps_on(0, 1, 2, 3)

        job.stop(2)  # one of them is told, and all save
        assert job.codes(0, 1, 2, 3) == [STOPPED] * 4, job.logs()
        assert "Traceback" not in job.logs()
    print({what: f"{value:.0f} s" for what, value in seconds.items()})

    losses = losses_of(job.folder)
    assert list(losses) == list(range(1, len(losses) + 1))
    stop = f"faults.drills=[{{fault: term, rank: 0, step: {len(losses)}}}]"
    code, _, err = megabit("train", *settings(tmp_path), f"run.dir={tmp_path / 'alone'}", stop)
    assert code == STOPPED, err
    alone = losses_of(tmp_path / "alone")
    # The order of sums over ranks, in double precision: see ``settings``. Other samples, or a step
    # that counts twice, would be seen in the second digit.
    assert losses == pytest.approx({step: alone[step] for step in losses}, rel=1e-12)
