"""Who the ranks of a run are: host and process of each, gathered once when it begins.

The main rank writes them to ``run.dir/faults/ranks.json``, for people and for ``megabit inject``:
``[{"rank": 0, "host": "node-a", "pid": 1234, "started": 56789}, …]`` in the order of ranks.
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megabit.errors import UserError
from megabit.files import write_text
from megabit.mesh import Axis
from megabit.reduce import gather_json


@dataclass(frozen=True)
class Member:
    """A rank of the world, and where it runs."""

    rank: int
    host: str
    pid: int
    started: int = 0
    """When its process began, in ticks since its host was booted: a number that a later process
    with the same pid does not have. 0 where the system does not tell."""

    @property
    def is_running(self) -> bool:
        """Whether the process is still there; asked on its host."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # somebody else's, so it is there
        return self.started in (0, start_of(self.pid))

    @property
    def text(self) -> str:
        """For people."""
        return f"rank {self.rank} on {self.host}"


def gather_members(world: Axis, device: torch.device) -> list[Member]:
    """All ranks, in order; collective over ``world``."""
    pid = os.getpid()
    own = (socket.gethostname(), pid, start_of(pid))
    return [Member(rank, *of_rank) for rank, of_rank in enumerate(gather_json(own, world, device))]


def start_of(pid: int) -> int:
    """``Member.started`` of a process of this host; 0 if it cannot be found out."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(status.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def members_file(run: Path) -> Path:
    """Where they are written, in the folder of a run."""
    return run / "faults" / "ranks.json"


def write_members(path: Path, members: Sequence[Member]) -> None:
    """Write ``ranks.json``; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"  {json.dumps(asdict(member))}" for member in members)
    write_text(path, f"[\n{rows}\n]\n")


def read_members(path: Path) -> list[Member]:
    """What ``ranks.json`` says.

    Raises:
        UserError: there is none, or it is not one.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        members = [
            Member(row["rank"], row["host"], row["pid"], row.get("started", 0)) for row in rows
        ]
        for member in members:
            numbers = (member.rank, member.pid, member.started)
            # A pid of 0 or -1 would mean many processes.
            if {*map(type, numbers)} != {int} or member.pid < 2 or type(member.host) is not str:
                raise TypeError
    except OSError as error:
        raise UserError(
            f"{path}: cannot read it ({error.strerror}); a run writes it when it begins"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: is damaged; a run writes it when it begins") from error
    return members
