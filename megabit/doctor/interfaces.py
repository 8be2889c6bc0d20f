"""Network interfaces: whether those that are named exist, and which would be taken otherwise.

``GLOO_SOCKET_IFNAME`` names whole interfaces, several with commas between them; without it gloo
takes the address that the host's own name has. ``NCCL_SOCKET_IFNAME`` has a syntax of its own: a
list of *prefixes*; with ``=`` before it, of whole names; with ``^`` before it, of what to leave
out (``^=``: whole names).

Read from Linux' ``/sys/class/net`` and ``/proc/net/route``; elsewhere nothing is known.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megabit.doctor.finding import Finding
from megabit.doctor.places import Cluster
from megabit.doctor.software import differing

INTERFACES = Path("/sys/class/net")
ROUTES = Path("/proc/net/route")
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Interfaces:
    """Of one host, with what the environment of a rank says about them."""

    mtu: dict[str, int]
    """Bytes of a packet, of all interfaces that are up but the loopback's."""
    routed: list[str]
    """Those of them that lead anywhere."""
    default: str | None
    """That of the default route."""
    named: dict[str, str]
    """``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``, where they are set."""

    @staticmethod
    def here(environment: Mapping[str, str]) -> "Interfaces":
        """Of this process."""
        mtu = {
            path.name: int(_text(path / "mtu") or 0)
            for path in sorted(INTERFACES.glob("*"))
            if path.name != "lo" and _text(path / "operstate") in ("up", "unknown")
        }
        routes = [line.split() for line in _text(ROUTES).splitlines()[1:]]
        return Interfaces(
            mtu,
            [name for name in mtu if any(route[0] == name for route in routes)],
            next((route[0] for route in routes if route[1] == "00000000"), None),
            {name: environment[name] for name in (GLOO, NCCL) if environment.get(name)},
        )

    def chosen(self, on_gpu: bool) -> str | None:
        """That which ranks talk over, as far as one can tell."""
        names = list(self.mtu)
        if on_gpu and NCCL in self.named:
            return next(iter(nccl_choice(self.named[NCCL], names)), None)
        if not on_gpu and GLOO in self.named:
            return self.named[GLOO].split(",")[0]
        return self.default or next(iter(self.routed), None)


def missing(environment: Mapping[str, str], on_gpu: bool) -> str | None:
    """Why no process group could be made on this host: a name of an interface that it lacks."""
    existing = [name for _, name in socket.if_nameindex()]
    wanted = environment.get(NCCL if on_gpu else GLOO, "")
    here = f"{socket.gethostname()} has {', '.join(existing)}"
    if not wanted:
        return None
    if on_gpu:
        good = nccl_choice(wanted, existing)
        return None if good else f"{NCCL}: {wanted!r} fits no interface; {here}"
    if wanted.startswith(("^", "=")):
        return f"{GLOO}: takes whole names only, not {wanted!r} as NCCL does; {here}"
    lacking = [name for name in wanted.split(",") if name not in existing]
    return f"{GLOO}: no interface is called {lacking[0]!r}; {here}" if lacking else None


def nccl_choice(wanted: str, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that NCCL may take when ``NCCL_SOCKET_IFNAME`` is ``wanted``."""
    excludes = wanted.startswith("^")
    wanted = wanted.removeprefix("^")
    exact = wanted.startswith("=")
    listed = wanted.removeprefix("=").split(",")
    fits = {
        name
        for name in names
        if any(name == entry if exact else name.startswith(entry) for entry in listed)
    }
    return [name for name in names if (name in fits) != excludes]


def judge(everyone: Sequence[Interfaces], cluster: Cluster, on_gpu: bool) -> Iterator[Finding]:
    """What may send traffic the wrong way; nothing on a single host, where none leaves it."""
    if len(cluster.hosts) == 1:
        return
    variable = NCCL if on_gpu else GLOO
    speakers = [host.speaker for host in cluster.hosts]
    unsure = [
        rank
        for rank in speakers
        if variable not in everyone[rank].named and len(everyone[rank].routed) > 1
    ]
    if unsure:
        yield Finding(
            "warning",
            "interfaces",
            f"{cluster.names(unsure)}: {', '.join(everyone[unsure[0]].routed)} all lead somewhere, "
            "and nothing says which one ranks use",
            f"set {variable} to the fast one (site.environment.{variable}=…)",
        )
    for name in (GLOO, NCCL):
        values = [everyone[rank].named.get(name, "not set") for rank in speakers]
        for value, found, common in differing(values):
            yield Finding(
                "note",
                "interfaces",
                f"{cluster.names([speakers[i] for i in found])}: {name} is {value}, elsewhere "
                f"{common}",
            )
    mtus = [
        str(interfaces.mtu.get(interfaces.chosen(on_gpu) or "", "not known"))
        for interfaces in (everyone[rank] for rank in speakers)
    ]
    for value, found, common in differing(mtus):
        if "not known" not in (value, common):
            yield Finding(
                "warning",
                "interfaces",
                f"{cluster.names([speakers[i] for i in found])}: packets have up to {value} bytes "
                f"(MTU), elsewhere {common}",
                "set the same on all hosts and switches, else large messages are slow or stall",
            )


def figures(everyone: Sequence[Interfaces], on_gpu: bool) -> Iterator[tuple[str, str]]:
    """What the first host talks over."""
    first = everyone[0]
    name = first.chosen(on_gpu)
    if name is not None:
        yield "interface", f"{name}, MTU {first.mtu.get(name, 'not known')}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
