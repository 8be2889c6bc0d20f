"""Where the hosts of a job meet, and get their numbers: torch's rendezvous, set up to notice a dead
host in seconds.

The host of the endpoint has a store; every launcher joins through it. When a host goes, ranks on
all others fail (their connections break, or their watchdogs run out), and the launchers meet again
without it. With ``--node-rank`` hosts are numbered as told (``fixed_nodes``).
"""

import socket
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from megabit.cli.fixed_nodes import FixedNodes
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


def open_meeting(
    options: "LaunchOptions",
    retry: Retry | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> RendezvousHandler:
    """The rendezvous of the job's launchers; opening it is tried again as ``retry`` says.

    Args:
        say: is told what is waited for.

    Raises:
        RunError: nobody is at the endpoint, or no host has that name.
        RendezvousError: this host cannot listen or talk there.
    """
    return (retry or Retry())(lambda: _open(options, say), "meeting other hosts")


def _open(options: "LaunchOptions", say: Callable[[str], None]) -> RendezvousHandler:
    if options.endpoint is None:
        host, port, is_host, own = LOCAL, 0, True, LOCAL
    else:
        host, port = options.endpoint
        _look_up(host)
        is_host = _is_own_address(host) and not _listens(host, port)
        if not is_host:
            _wait_for(host, port, say)
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
        place = (options.rdzv_id, options.node_rank, options.max_nodes, own)
        return FixedNodes(store, *place, JOIN_S, say)
    return create_handler(store, backend, parameters)


def _look_up(host: str) -> None:
    """Find out now whether there is such a host, not when ten minutes have gone by.

    Raises:
        RunError: its name leads nowhere. In clusters that give names to hosts when they start, it
            may do so later.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise RunError(f"--rdzv-endpoint: no host is called {host} ({error.strerror})") from error


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


def _wait_for(host: str, port: int, say: Callable[[str], None]) -> None:
    """Until somebody listens there: hosts start in any order."""
    deadline = time.monotonic() + JOIN_S
    is_told = False
    while not _listens(host, port):
        if not is_told:
            say(f"waiting for an answer at {host}:{port}, for up to {JOIN_S} s")
            is_told = True
        if time.monotonic() > deadline:
            raise RunError(f"--rdzv-endpoint: nobody answers at {host}:{port}")
        time.sleep(0.5)


def _address_towards(host: str, port: int) -> str:
    """This host's address in the network in which ``host`` is."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
