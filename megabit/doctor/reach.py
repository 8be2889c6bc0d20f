"""Why ranks do not find each other, in words: nothing can be checked before they do."""

import re
import socket
from collections.abc import Mapping

from megabit.errors import first_line


def explain(error: BaseException, environment: Mapping[str, str]) -> str:
    """One line for what torch has raised when the process group was to be made."""
    text = str(error)
    endpoint = f"{environment.get('MASTER_ADDR', '?')}:{environment.get('MASTER_PORT', '?')}"
    rank, world = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return (
            f"the port of {endpoint} is in use on this host: another job has it, or two processes "
            "have RANK=0; choose another MASTER_PORT (torchrun: --rdzv-endpoint)"
        )
    if missing := re.search(r"Unable to find address for: (\S+)", text):
        return f"GLOO_SOCKET_IFNAME: this host has no interface {missing[1]!r} with an address"
    if re.search(r"connectFullMesh|remote=\[", text):
        other = re.search(r"remote=\[([^\]]+)\]", text)
        where = f" at {other[1]}" if other else ""
        loopback = bool(other and other[1].startswith("127."))
        return f"rank {rank} cannot connect to another rank{where}: " + (
            "that host's name leads to its loopback address (see its /etc/hosts); set "
            "GLOO_SOCKET_IFNAME there"
            if loopback
            else "a firewall, or the wrong interface; open all ports between the hosts, or set "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
    if not _is_host(environment.get("MASTER_ADDR", "")):
        return f"{endpoint}: no such host; check MASTER_ADDR (torchrun: --rdzv-endpoint)"
    if re.search(r"clients joined|waiting for clients", text):
        joined = re.search(r"(\d+)/\d+ clients joined", text)
        return (
            f"{joined[1] if joined else 'not all'} of {world} ranks have come to {endpoint} in "
            "time; start the others, and check that they have the same MASTER_ADDR, MASTER_PORT "
            "and WORLD_SIZE"
        )
    if re.search(r"timed out|timeout|refused|connect", text, re.IGNORECASE):
        return (
            f"rank {rank} gets no answer from {endpoint}: check that rank 0 runs there, its "
            "address, and that no firewall is between (MASTER_ADDR, MASTER_PORT; torchrun: "
            "--rdzv-endpoint)"
        )
    return f"rank {rank} cannot join the others at {endpoint}: {first_line(error)}"


def _is_host(name: str) -> bool:
    try:
        socket.getaddrinfo(name or None, 0)
    except OSError:
        return False
    return True
