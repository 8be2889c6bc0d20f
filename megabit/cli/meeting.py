"""Where the hosts of a job meet, and get their numbers: torch's rendezvous, set up to notice a dead
host in seconds.

The host of the endpoint has a store; every launcher joins through it. When a host goes, ranks on
all others fail (their connections break, or their watchdogs run out), and the launchers meet again
without it. With ``--node-rank`` hosts are numbered as told, and all of them must be there.
"""

import socket
import time
from contextlib import closing
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from megabit.errors import RunError
from megabit.retry import Retry

if TYPE_CHECKING:
    from megabit.cli.launcher import LaunchOptions

KEEP_ALIVE_S = 2
KEEP_ALIVE_ATTEMPTS = 4
"""A launcher that was not heard of for 2 × 4 s is dead: the others meet without it. They compare
their clocks here, which must agree to a few seconds."""
LAST_CALL_S = 5
"""How long hosts wait for more once ``min_nodes`` are there. Who comes later is let in by a restart
of all, after a checkpoint has been saved for it."""
JOIN_S = 600
"""How long hosts wait until ``min_nodes`` are there."""
LOCAL = "127.0.0.1"


def open_meeting(options: "LaunchOptions", retry: Retry | None = None) -> RendezvousHandler:
    """The rendezvous of the job's launchers; opening it is tried again as ``retry`` says.

    Raises:
        RunError: nobody is at the endpoint.
        RendezvousError: this host cannot listen or talk there.
    """
    return (retry or Retry())(lambda: _open(options), "meeting other hosts")


def _open(options: "LaunchOptions") -> RendezvousHandler:
    if options.endpoint is None:
        host, port, is_host, own = LOCAL, 0, True, LOCAL
    else:
        host, port = options.endpoint
        is_host = _is_own_address(host) and not _listens(host, port)
        if not is_host:
            _wait_for(host, port)
        own = _address_towards(host, port)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        run_id=options.rdzv_id,
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        local_addr=own,
        is_host=is_host,
        join_timeout=JOIN_S,
        last_call_timeout=LAST_CALL_S,
        keep_alive_interval=KEEP_ALIVE_S,
        keep_alive_max_attempt=KEEP_ALIVE_ATTEMPTS,
    )
    backend, store = create_backend(parameters)
    if options.node_rank is not None:
        return FixedNodes(store, options.rdzv_id, options.node_rank, options.max_nodes, own)
    return create_handler(store, backend, parameters)


class FixedNodes(RendezvousHandler):
    """A meeting of hosts that know their numbers; a restart is another round of it."""

    use_agent_store = False

    def __init__(self, store: Store, run_id: str, node_rank: int, nodes: int, address: str) -> None:
        self._store, self._run_id = store, run_id
        self._node_rank, self._nodes, self._address = node_rank, nodes, address
        self._round = 0

    def get_backend(self) -> str:
        """Its name."""
        return "fixed"

    def get_run_id(self) -> str:
        """Tells jobs apart."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all hosts. Each restarts as often as the others: when ranks of one fail, those
        of all do."""
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        self._round += 1
        store.set(f"here/{self._node_rank}", "1")
        keys = [f"here/{node}" for node in range(self._nodes)]
        deadline = time.monotonic() + JOIN_S
        while not store.check(keys):  # not store.wait: it is deaf to signals
            if time.monotonic() > deadline:
                missing = [node for node in range(self._nodes) if not store.check([keys[node]])]
                raise RunError(f"--nnodes: host {missing[0]} of {self._nodes} has not come")
            time.sleep(0.1)
        place = RendezvousStoreInfo.build(self._node_rank, store, self._address)
        return RendezvousInfo(store, self._node_rank, self._nodes, place)

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: nobody else can come."""

    def num_nodes_waiting(self) -> int:
        """None: nobody else can come."""
        return 0

    def shutdown(self) -> bool:
        """Nothing to do."""
        return True


def _is_own_address(host: str) -> bool:
    """Whether this host can listen at ``host``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, None, type=socket.SOCK_STREAM
        )[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def _wait_for(host: str, port: int) -> None:
    """Until somebody listens there: hosts start in any order."""
    deadline = time.monotonic() + JOIN_S
    while not _listens(host, port):
        if time.monotonic() > deadline:
            raise RunError(f"--rdzv-endpoint: nobody answers at {host}:{port}")
        time.sleep(0.5)


def _address_towards(host: str, port: int) -> str:
    """This host's address in the network in which ``host`` is."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
