"""Launching ranks: what the launcher (torchrun, or anything that sets the same variables) says
about this process, and torchrun itself called as a library."""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from megabit.errors import UserError


@dataclass(frozen=True)
class Launch:
    """This process among those that were launched together; a process of its own is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Ranks on this host."""

    @staticmethod
    def is_present() -> bool:
        """Whether a launcher started this process."""
        return "RANK" in os.environ

    @staticmethod
    def from_environment() -> "Launch":
        """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun sets them."""
        try:
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            launch = Launch(
                rank=int(os.environ.get("RANK", "0")),
                local_rank=local_rank,
                world_size=int(os.environ.get("WORLD_SIZE", "1")),
                local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1)),
            )
        except ValueError as error:
            raise UserError(f"RANK, LOCAL_RANK, WORLD_SIZE: must be numbers ({error})") from None
        if not 0 <= launch.rank < launch.world_size:
            raise UserError(f"RANK: {launch.rank} is not below WORLD_SIZE={launch.world_size}")
        return launch


def speaks_for_host() -> bool:
    """Whether this process is the one that tells this host's user what went wrong."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def run_under_torchrun(command: Sequence[str], nproc_per_node: int) -> int:
    """Run ``megabit command`` on so many ranks of this host; returns the exit code.

    The same as ``torchrun --standalone --nproc-per-node N -m megabit …``, but ends without a
    traceback of the launcher's own when a rank fails or Ctrl-C stops the job.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # of this process, which does nothing but wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores, as torchrun has it
    launch = elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc_per_node,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
        ),
        sys.executable,
    )
    try:
        launch("-m", "megabit", *command)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode  # the rank has said why
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank {rank} was ended by {name}", file=sys.stderr)
        return 128 - failure.exitcode
    return 0
