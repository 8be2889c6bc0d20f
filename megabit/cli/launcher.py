"""Starting ranks: the launcher's options, and one job over the ranks of one host or of several.

``megabit train --nproc-per-node 8 --nnodes 1:4 …`` → ``LaunchOptions`` → ``cli.meeting`` (where
hosts meet) → ``cli.agent`` (starts this host's ranks, watches them, starts them again) → an exit
code. Underneath are torch's elastic agent and its rendezvous, as in torchrun; ranks can be started
by torchrun, srun or mpirun as well (``cli.environment``).
"""

import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from megabit.cli.environment import Launch
from megabit.errors import RunError, UserError, first_line

NprocPerNode = Annotated[
    int | None, typer.Option(help="Start so many ranks on this host.", min=1, show_default=False)
]
Nnodes = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Hosts of the job; run the same command on each. With 1:4 it begins with what is "
        "there, and goes on with fewer or more when hosts leave or join.",
    ),
]
RdzvEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where the hosts meet: one of them, the same for all.",
        show_default=False,
    ),
]
RdzvId = Annotated[
    str, typer.Option(help="Tells jobs apart that meet at the same place.", metavar="NAME")
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        help="This host's number, 0 at HOST: ranks are numbered in that order. Without it they are "
        "as hosts come.",
        min=0,
        show_default=False,
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        help="How often all ranks are started again, from the newest checkpoint, when one has died "
        "or a host is lost.",
        min=0,
    ),
]
StopGrace = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="How long ranks may take to save after SIGTERM or Ctrl-C.",
        min=0,
    ),
]

RDZV_ID = "megabit"
STOP_GRACE_S = 600.0


@dataclass(frozen=True)
class LaunchOptions:
    """Which ranks to start, on how many hosts."""

    nproc_per_node: int
    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: tuple[str, int] | None = None
    """Where hosts meet; None: there is one host."""
    rdzv_id: str = RDZV_ID
    node_rank: int | None = None
    max_restarts: int = 0
    stop_grace_s: float = STOP_GRACE_S

    @staticmethod
    def of(
        nproc_per_node: int,
        nnodes: str = "1",
        rdzv_endpoint: str | None = None,
        rdzv_id: str = RDZV_ID,
        node_rank: int | None = None,
        max_restarts: int = 0,
        stop_grace: float = STOP_GRACE_S,
    ) -> "LaunchOptions":
        """From what the command line says.

        Raises:
            UserError: an option makes no sense, or not with the others.
        """
        if Launch.is_present():
            raise UserError("--nproc-per-node: a launcher has started this process already")
        counts = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
        low = int(counts[1]) if counts else 0
        high = int(counts[2] or low) if counts else 0
        if not 1 <= low <= high:
            raise UserError(f"--nnodes: must be a number like 2, or a range like 1:4, not {nnodes}")
        endpoint = None
        if rdzv_endpoint is not None:
            endpoint = _parse_endpoint(rdzv_endpoint)
        elif high > 1:
            raise UserError(
                f"--rdzv-endpoint: --nnodes {nnodes} needs a place to meet; give host:port of one "
                "of the hosts"
            )
        if node_rank is not None:
            if low != high:
                raise UserError(
                    f"--node-rank: hosts cannot come and go in a fixed order; leave it out with "
                    f"--nnodes {nnodes}"
                )
            if node_rank >= high:
                raise UserError(f"--node-rank: {node_rank} is not below --nnodes {nnodes}")
        return LaunchOptions(
            nproc_per_node, low, high, endpoint, rdzv_id, node_rank, max_restarts, stop_grace
        )

    @property
    def world_sizes(self) -> list[int]:
        """With which the job may run, largest first."""
        nodes = range(self.max_nodes, self.min_nodes - 1, -1)
        return [number * self.nproc_per_node for number in nodes]


def _parse_endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--rdzv-endpoint: must be host:port, like node0:29400, not {text}")
    return host, int(port)


def launch(
    command: Sequence[str], options: LaunchOptions, retries: int = 0, retry_pause_s: float = 0.0
) -> int:
    """Run ``megabit command`` on this host's ranks, together with other hosts'.

    Args:
        retries: how often to try again to meet other hosts, so far apart.

    Returns:
        The exit code (``cli.exit_codes``); that of the rank that failed first, if one did.

    Raises:
        RunError: hosts do not come together, or lose the place where they meet.
    """
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

    from megabit.cli.agent import Ended, run_agent, say
    from megabit.retry import Retry

    where = "localhost" if options.endpoint is None else "{}:{}".format(*options.endpoint)
    with tempfile.TemporaryDirectory(prefix="megabit_") as folder, _for_the_job():
        # Of this process, which says itself what there is to say.
        logging.disable(logging.CRITICAL)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores, as torchrun has it
        try:
            ranks = [sys.executable, "-m", "megabit", *command]
            return run_agent(ranks, options, Path(folder), Retry(retries, retry_pause_s, say))
        except Ended as ended:
            return ended.code
        except RendezvousClosedError:
            raise RunError(
                f"--rdzv-endpoint: the job '{options.rdzv_id}' at {where} has ended on other hosts"
            ) from None
        except (RendezvousError, DistNetworkError, DistStoreError) as error:
            raise RunError(
                f"--rdzv-endpoint: lost the place where hosts meet, {where}, or too few came "
                f"({_reason(error)})"
            ) from None


@contextmanager
def _for_the_job() -> Iterator[None]:
    """Variables that are set for ranks go with the job: whatever this process starts later would
    take itself for a rank of it, and leave word in a folder that is gone."""
    before, level = dict(os.environ), logging.root.manager.disable
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        logging.disable(level)


def _reason(error: BaseException) -> str:
    """The first line of what is behind ``error``."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
