"""Two hosts with two ranks each: in two steps, a host's ranks first, less crosses the slow link."""

from pathlib import Path

import pytest

from tests.hosts.job import Job, hosts, losses_of
from tests.training.tiny import SETTINGS, tiny_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

STEPS = 10
MBIT_PER_S = 100
SIZES = ("model.hidden_size=128", "model.intermediate_size=256", "train.micro_batch_size=1")


def crossing(folder: Path, topology: str) -> tuple[float, dict[int, float]]:
    """Bytes that a host has sent to the other one in a whole run, and the run's losses."""
    settings = [*SETTINGS, *SIZES, f"train.steps={STEPS}", f"communication.topology={topology}"]
    settings += [f"data.text={folder / 'text'}", f"data.dir={folder / 'corpus'}"]
    with hosts(2) as cluster:
        cluster.limit(MBIT_PER_S)
        options = ("--nproc-per-node=2", "--nnodes=2")
        job = Job(cluster, folder / topology, settings, *options)
        for host in (0, 1):
            job.start(host, options=[f"--node-rank={host}"])
        assert job.codes(0, 1) == [0, 0], job.logs()
        return (cluster.sent_bytes(0) + cluster.sent_bytes(1)) / 2, losses_of(job.folder)


def test_less_crosses_the_slow_link(tmp_path: Path) -> None:
    tiny_corpus(tmp_path)
    flat, flat_losses = crossing(tmp_path, "flat")
    both, losses = crossing(tmp_path, "hierarchical")
    # Two ranks of a host share what they send: half of it. What is left is what all ranks agree on
    # in any case, and what connections and the meeting itself cost.
    print(f"{flat / 1e6:.2f} MB flat, {both / 1e6:.2f} MB hierarchical: × {flat / both:.2f}")
    assert flat / both > 1.7
    # The ranks of a host are neighbours in the tree of the sum: it is the same one.
    assert losses == flat_losses
