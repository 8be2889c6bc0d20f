"""What the environment says about this process: which rank it is, and who started it.

Ranks are started by megabit's launcher or torchrun (RANK, WORLD_SIZE, …), by Slurm's srun, by
mpirun of Open MPI, MPICH or Intel MPI, or are a process of their own. ``Launch.from_environment``
reads what these set, and sets torchrun's variables in place of the others', so that whatever starts
later finds one kind only.
"""

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megabit.cli.exit_codes import FAILED
from megabit.config import Config
from megabit.errors import RunError, UserError
from megabit.files import write_text

DEFAULT_PORT = 29500
"""Of MASTER_PORT, as torch has it."""
OUTCOME = "MEGABIT_OUTCOME"
"""Names the file in which ranks leave word for megabit's launcher (``leave``)."""
LAUNCHER_PID = "MEGABIT_LAUNCHER_PID"


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
        """Whether torchrun, or a launcher that sets the same variables, started this process."""
        return "RANK" in os.environ

    @staticmethod
    def from_environment() -> "Launch":
        """As whoever started this process has set it; sets RANK and the like where it was srun or
        mpirun.

        Raises:
            UserError: variables are missing or make no sense.
        """
        if not Launch.is_present():
            adopt_scheduler(os.environ)
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


@dataclass(frozen=True)
class Scheduler:
    """The variables in which a scheduler numbers the processes that it starts."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    """The first that is set counts."""
    local_rank: str
    local_world_size: str
    needs: tuple[str, ...] = ()
    """One of these has to be set, too; else the others mean something else."""


SCHEDULERS = (
    Scheduler(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # In a batch script and in a shell of salloc there is SLURM_PROCID, too: that of the script.
    # SLURM_STEP_… is set by srun only.
    Scheduler(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
        needs=("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
    ),
    Scheduler("mpirun", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""The first that is there counts: Open MPI's under srun knows more than srun."""


def adopt_scheduler(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as srun or
    mpirun has numbered this process; nothing if neither has started it, or it is the only one.

    Raises:
        UserError: it does not follow where ranks are to meet.
    """
    scheduler = next((one for one in SCHEDULERS if _is_there(one, environment)), None)
    if scheduler is None:
        return
    size = next(environment[name] for name in scheduler.world_size if name in environment)
    if size == "1":
        return
    environment["RANK"] = environment[scheduler.rank]
    environment["WORLD_SIZE"] = size
    environment["LOCAL_RANK"] = environment.get(scheduler.local_rank, "0")
    local_size = environment.get(scheduler.local_world_size)
    if local_size is not None:
        environment["LOCAL_WORLD_SIZE"] = local_size
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = _master(scheduler, environment, is_one_host=local_size == size)
    environment.setdefault("MASTER_PORT", str(_port(environment)))


def _is_there(scheduler: Scheduler, environment: Mapping[str, str]) -> bool:
    names = (scheduler.world_size, scheduler.needs) if scheduler.needs else (scheduler.world_size,)
    return scheduler.rank in environment and all(
        any(name in environment for name in group) for group in names
    )


def _master(scheduler: Scheduler, environment: Mapping[str, str], is_one_host: bool) -> str:
    """The host of rank 0."""
    if is_one_host:
        return "127.0.0.1"
    if scheduler.name == "srun":
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
        if nodes:
            return first_node(nodes)
        if address := environment.get("SLURM_LAUNCH_NODE_IPADDR"):
            return address
    raise UserError(
        f"MASTER_ADDR: {scheduler.name} does not say where rank 0 is; set MASTER_ADDR to its host "
        "for all ranks (Open MPI: mpirun -x MASTER_ADDR=host0; MPICH: -genv MASTER_ADDR host0)"
    )


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[003-010,014],cpu1`` → ``gpu003``."""
    first = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    assert first is not None, "it matches everything"
    prefix, number, suffix = first.groups(default="")
    return f"{prefix}{number}{suffix}"


def _port(environment: Mapping[str, str]) -> int:
    """The same on all ranks of a job, and another one for each step of a Slurm job."""
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "0")
    if not (job.isdecimal() and step.isdecimal()):
        return DEFAULT_PORT
    # Below the ports that systems hand out by themselves, 32768 and up.
    return 20000 + (int(job) * 7 + int(step)) % 10000


def launcher_pid() -> int | None:
    """The process of the launcher or agent that must not die before this rank; None where something
    else sees to that (srun, mpirun), or this process is nobody's rank."""
    if LAUNCHER_PID in os.environ:
        return int(os.environ[LAUNCHER_PID])
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def speaks_for_host() -> bool:
    """Whether this process is the one that tells this host's user what went wrong."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def set_site(config: Config) -> None:
    """Set the variables of ``site.environment`` that are not set already; to be called before torch
    is imported."""
    for name, value in config.site.environment.items():
        os.environ.setdefault(name, value)


def hush_torch() -> None:
    """Let torch's C++ code print errors only, unless the user wants more. Else each lost connection
    is a page of stack traces, beside the line that megabit prints. To be called before torch is
    imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def set_flight_recorder(prefix: Path) -> None:
    """Have NCCL's flight recorder on: if a collective times out, each rank writes what it had in
    flight to ``prefix`` and its number. To be called before the process group exists.

    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    # torch's agent sets 1 (abort the communicators, then end) where the user has set nothing; 3
    # ends without cleaning up, which leaves time for the dump and cannot hang itself.
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # newer torch
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")  # the same in older ones
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix))
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(prefix))


def leave(code: int) -> NoReturn:
    """End this rank with ``code``, on purpose: it is not to be started again.

    Under megabit's launcher word is left in a file and the exit code is 0: for torch's agent any
    other one is a failure, after which it ends the other ranks, which may still be saving. Under
    torchrun itself that cannot be helped: with restarts left it starts the ranks again, unless it
    was itself asked to stop.
    """
    note_outcome(code)
    sys.exit(0 if OUTCOME in os.environ else code)


def give_up(error: RunError) -> NoReturn:
    """Say why, and end this process as it is, with code 1: to close process groups, as a normal
    end does, would wait for a rank that is gone."""
    if speaks_for_host():
        print(f"error: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)


def note_outcome(code: int) -> None:
    """Let megabit's launcher, if there is one, know that the job is to end with ``code``."""
    if OUTCOME in os.environ:
        write_text(Path(os.environ[OUTCOME]), str(code))
