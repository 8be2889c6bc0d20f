"""The launcher's options, what other launchers tell a process, and hosts with fixed numbers."""

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
)

from megabit.cli import environment
from megabit.cli import meeting as meeting_module
from megabit.cli.environment import Launch, adopt_scheduler, first_node
from megabit.cli.fixed_nodes import FixedNodes
from megabit.cli.launcher import LaunchOptions
from megabit.cli.meeting import open_meeting
from megabit.config import load_config
from megabit.errors import RunError, UserError
from tests.command import refused
from tests.patience import eventually

# Options.


def test_the_worlds_that_may_be() -> None:
    assert LaunchOptions.of(4).world_sizes == [4]
    options = LaunchOptions.of(2, "1:3", "node0:29400")
    assert options.world_sizes == [6, 4, 2]
    assert options.endpoint == ("node0", 29400)
    assert LaunchOptions.of(1, "2", "[fe80::1]:29400", node_rank=1).endpoint == ("fe80::1", 29400)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "0"], "--nnodes: must be a number like 2, or a range like 1:4, not 0"),
        (["--nnodes", "3:2"], "--nnodes: must be a number like 2, or a range like 1:4, not 3:2"),
        (["--nnodes", "many"], "--nnodes: must be a number like 2, or a range like 1:4, not many"),
        (
            ["--nnodes", "2"],
            "--rdzv-endpoint: --nnodes 2 needs a place to meet; give host:port of one of the hosts",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "node0"],
            "--rdzv-endpoint: must be host:port, like node0:29400, not node0",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "node0:99999"],
            "--rdzv-endpoint: must be host:port, like node0:29400, not node0:99999",
        ),
        (
            ["--nnodes", "1:2", "--rdzv-endpoint", "node0:1", "--node-rank", "0"],
            "--node-rank: hosts cannot come and go in a fixed order; leave it out with "
            "--nnodes 1:2",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "node0:1", "--node-rank", "2"],
            "--node-rank: 2 is not below --nnodes 2",
        ),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], message: str) -> None:
    assert refused("train", "--nproc-per-node", "1", *arguments) == message


def test_options_without_ranks_to_start() -> None:
    assert refused("train", "--max-restarts", "2") == (
        "--nproc-per-node: say how many ranks to start on each host"
    )


def test_a_launcher_within_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="a launcher has started this process already"):
        LaunchOptions.of(2)


# Schedulers.


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            ("3", "4", "3", "4", "127.0.0.1", "29500"),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MASTER_ADDR": "host0"},
            ("1", "2", "0", None, "host0", "29500"),
        ),
        (
            {
                "SLURM_PROCID": "9",
                "SLURM_STEP_NUM_TASKS": "16",
                "SLURM_NTASKS": "32",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_NODELIST": "gpu[07-08]",
                "SLURM_JOB_ID": "1234567",
                "SLURM_STEP_ID": "2",
            },
            ("9", "16", "1", None, "gpu07", "21971"),
        ),
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_NODELIST": "one",
                "SLURM_NTASKS_PER_NODE": "2",
                "MASTER_PORT": "4000",
            },
            ("1", "2", "1", "2", "127.0.0.1", "4000"),
        ),
    ],
    ids=["open-mpi", "mpich", "slurm", "slurm-one-host"],
)
def test_what_schedulers_tell(variables: dict[str, str], expected: tuple[str | None, ...]) -> None:
    adopt_scheduler(variables)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert tuple(map(variables.get, names)) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {},
        # In a batch script and in a shell of salloc.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_NODELIST": "a"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "a"},
    ],
    ids=["none", "batch", "one-task"],
)
def test_a_process_of_its_own(variables: dict[str, str]) -> None:
    before = dict(variables)
    adopt_scheduler(variables)
    assert variables == before


def test_where_rank_0_is_has_to_be_told_to_ranks_of_mpi_on_several_hosts() -> None:
    variables = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(UserError, match=r"^MASTER_ADDR: mpirun does not say where"):
        adopt_scheduler(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-010,014],cpu1", "gpu003"),
        ("rack[1,3]-ib,other", "rack1-ib"),
        ("a-b[09-11]", "a-b09"),
    ],
)
def test_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_the_site_sets_what_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_IB_HCA", "")  # so that it is put back
    monkeypatch.delenv("NCCL_IB_HCA")
    config = load_config(["site.environment.NCCL_DEBUG=WARN", "site.environment.NCCL_IB_HCA=mlx5"])
    environment.set_site(config)
    assert os.environ["NCCL_DEBUG"] == "INFO"
    assert os.environ["NCCL_IB_HCA"] == "mlx5"


def test_the_flight_recorder_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"),
        *("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    )
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torch's agent sets it
    environment.set_flight_recorder(Path("run/faults/nccl_trace_rank_"))
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "run/faults/nccl_trace_rank_"


def test_ranks_by_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Launch.from_environment() == Launch(5, 1, 8, 4)
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(UserError, match="RANK: 8 is not below WORLD_SIZE=8"):
        Launch.from_environment()
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(UserError, match="must be numbers"):
        Launch.from_environment()


# Hosts with fixed numbers.


def test_hosts_meet_in_their_order_and_again() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    met: dict[tuple[int, int], tuple[int, int, str, int]] = {}
    meetings: list[RendezvousHandler] = []  # as a launcher has its own until its job is over

    def host(node: int) -> None:
        options = LaunchOptions.of(1, "3", f"127.0.0.1:{port}", node_rank=node)
        meeting = open_meeting(options)
        meetings.append(meeting)
        for round in range(2):
            info = meeting.next_rendezvous()
            place = info.bootstrap_store_info
            met[node, round] = (info.rank, info.world_size, place.master_addr, place.master_port)

    threads = [threading.Thread(target=host, args=(node,)) for node in range(3)]
    for thread in reversed(threads):  # the one that has the store comes last
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(met) == 6
    ports = [{met[node, round][3] for node in range(3)} for round in range(2)]
    assert [len(each) for each in ports] == [1, 1]
    assert ports[0] != ports[1]  # old keys are out of the way
    for (node, _), (rank, size, address, _) in met.items():
        assert (rank, size, address) == (node, 3, "127.0.0.1")


class Hosts:
    """Launchers' ends of a meeting at one real store, each of which waits in a thread."""

    def __init__(self, nodes: int, join_s: float = 60) -> None:
        self.nodes, self.join_s = nodes, join_s
        self.store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
        self.said: list[str] = []

    def launcher(self, node: int) -> FixedNodes:
        """With a connection of its own."""
        store = TCPStore("127.0.0.1", self.store.port, timeout=timedelta(seconds=60))
        return FixedNodes(
            store, "job", node, self.nodes, "127.0.0.1", self.join_s, self.said.append
        )

    def meet(self, *launchers: FixedNodes) -> list[RendezvousInfo | Exception]:
        """What each gets, together."""
        waits = [self.waiting(launcher) for launcher in launchers]
        return [wait() for wait in waits]

    def waiting(self, launcher: FixedNodes) -> Callable[[], RendezvousInfo | Exception]:
        """Waits from now on; the result is to be called for."""
        results: list[RendezvousInfo | Exception] = []

        def wait() -> None:
            try:
                results.append(launcher.next_rendezvous())
            except Exception as error:
                results.append(error)

        thread = threading.Thread(target=wait)
        thread.start()

        def result() -> RendezvousInfo | Exception:
            thread.join(120)
            return results[0]

        return result


def ports(met: list[RendezvousInfo | Exception]) -> list[int]:
    """Where ranks meet, as each host was told."""
    assert all(isinstance(each, RendezvousInfo) for each in met), met
    return [each.bootstrap_store_info.master_port for each in met]  # type: ignore[union-attr]


def test_a_launcher_that_was_started_again_finds_the_round_of_the_others() -> None:
    hosts = Hosts(2)
    first, second = hosts.launcher(0), hosts.launcher(1)
    seen = set(ports(hosts.meet(first, second)))
    seen |= set(ports(hosts.meet(first, second)))
    seen |= set(ports(hosts.meet(first, hosts.launcher(1))))
    assert len(seen) == 3  # each round has a port of its own
    # Host 0 as well, where another host has the store.
    third = hosts.launcher(1)
    assert len(set(ports(hosts.meet(hosts.launcher(0), third)))) == 1


@pytest.mark.slow
def test_a_launcher_that_died_while_it_waited_is_not_there() -> None:
    hosts = Hosts(2)
    hosts.store.set("job/0/here/1", "dead 7")
    wait = hosts.waiting(hosts.launcher(0))
    eventually(lambda: hosts.said)  # after TELL_S, which is longer than FRESH_S
    assert not hosts.store.check(["job/0/members"])
    assert hosts.said == ["waiting for host 1 of 2"]
    assert len(set(ports([*hosts.meet(hosts.launcher(1)), wait()]))) == 1


def test_who_has_not_come_is_named() -> None:
    hosts = Hosts(3, join_s=0.5)
    found = hosts.meet(hosts.launcher(0))
    assert str(found[0]) == "--nnodes: waited 0.5 s in vain for host 1, 2 of 3"


def test_two_launchers_with_one_number() -> None:
    hosts = Hosts(2)
    older = hosts.launcher(1)
    wait = hosts.waiting(older)
    eventually(lambda: hosts.store.check(["job/0/here/1"]))
    met = hosts.waiting(hosts.launcher(1))
    error = wait()
    assert isinstance(error, RunError)
    assert str(error) == "--node-rank: another launcher has come as host 1"
    older.shutdown()  # that of the other one goes on
    assert len(set(ports([*hosts.meet(hosts.launcher(0)), met()]))) == 1


def test_who_waits_learns_that_another_has_left_for_good() -> None:
    hosts = Hosts(2)
    first, second = hosts.launcher(0), hosts.launcher(1)
    ports(hosts.meet(first, second))
    wait = hosts.waiting(first)
    second.shutdown()
    assert isinstance(wait(), RendezvousClosedError)


def test_a_name_that_leads_nowhere_is_told_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^--rdzv-endpoint: no host is called nowhere\.invalid \("):
        open_meeting(LaunchOptions.of(1, "2", "nowhere.invalid:29400"))
    assert time.monotonic() - began < 60  # and not ten minutes; it depends on the host's resolver


def test_what_is_waited_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(meeting_module, "JOIN_S", 1)
    monkeypatch.setattr(meeting_module, "_is_own_address", lambda host: False)
    said: list[str] = []
    with pytest.raises(RunError, match=f"nobody answers at 127.0.0.1:{port}"):
        open_meeting(LaunchOptions.of(1, "2", f"127.0.0.1:{port}"), say=said.append)
    assert said == [f"waiting for an answer at 127.0.0.1:{port}, for up to 1 s"]
