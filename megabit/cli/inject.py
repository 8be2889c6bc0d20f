"""``megabit inject``: faults for drills, planned for a run or done to one."""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from megabit.errors import UserError

app = typer.Typer(no_args_is_help=True)

SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
    "term": signal.SIGTERM,
}

RunDir = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="A run's folder (run.dir).", show_default=False)
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Seed = Annotated[int, typer.Option(help="The same seed does the same.", min=0)]


@app.callback()
def inject() -> None:
    """Break things on purpose, to see that a run survives it.

    Example: megabit inject plan --seed 7 --ranks 4 --steps 200 > drills.yaml

    Example: megabit inject signal runs/default kill --rank 1
    """


@app.command("plan")
def plan(
    ranks: Annotated[int, typer.Option(help="Of the run.", min=1)],
    steps: Annotated[int, typer.Option(help="Of the run.", min=1)],
    seed: Seed = 0,
    mean_steps: Annotated[float, typer.Option(help="Between two faults.")] = 50.0,
    faults: Annotated[
        str | None,
        typer.Option(
            help="To choose from, with commas between; default: those that end a process.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print drills (faults.drills) as settings: at random steps, on random ranks.

    Example: megabit inject plan --seed 7 --ranks 4 --steps 200 --mean-steps 50 --faults kill,hang
    """
    from megabit.faults.plan import ENDING, plan_drills

    if not mean_steps > 0:
        raise UserError(f"--mean-steps: must be greater than 0, not {mean_steps}")
    chosen = ENDING if faults is None else tuple(fault.strip() for fault in faults.split(","))
    drills = plan_drills(seed, ranks, steps, mean_steps, chosen)
    print(f"# megabit inject plan --seed {seed}: {len(drills)} faults in {steps} steps")
    print("faults:\n  drills:" + ("" if drills else " []"))
    for drill in drills:
        print(f"    - {{fault: {drill.fault}, rank: {drill.rank}, step: {drill.step}}}")


@app.command("signal")
def send(
    run_dir: RunDir,
    name: Annotated[
        Literal["kill", "stop", "continue", "term"],
        typer.Argument(metavar="SIGNAL", help="kill, stop, continue or term.", show_default=False),
    ],
    rank: Annotated[int, typer.Option(help="Of the world.", min=0)],
    yes: Yes = False,
) -> None:
    """Send a signal to one rank of a run that is going on, on this host.

    Example: megabit inject signal runs/default stop --rank 1
    """
    from megabit.faults.members import members_file, read_members

    path = members_file(run_dir)
    members = {member.rank: member for member in read_members(path)}
    if rank not in members:
        raise UserError(f"--rank: {rank} is not among the ranks 0 to {max(members)} of {run_dir}")
    member = members[rank]
    if member.host != socket.gethostname():
        raise UserError(
            f"--rank: {rank} is on {member.host}; there, run: megabit inject signal {run_dir} "
            f"{name} --rank {rank}"
        )
    if not member.is_running:
        raise UserError(f"--rank: {rank} of {run_dir} is not running; {path} has its last process")
    what = f"{SIGNALS[name].name} to rank {rank} (process {member.pid})"
    _ask(f"Send {what} of {run_dir}?", yes)
    try:
        os.kill(member.pid, SIGNALS[name])
    except OSError as error:
        raise UserError(f"--rank: {rank} cannot be sent a signal ({error.strerror})") from error
    print(f"sent {what} of {run_dir}")


@app.command("damage")
def damage(
    run_dir: RunDir,
    kind: Annotated[
        Literal["bit_flip", "truncate", "delete_shard"],
        typer.Argument(
            metavar="DAMAGE", help="bit_flip, truncate or delete_shard.", show_default=False
        ),
    ],
    seed: Seed = 0,
    yes: Yes = False,
) -> None:
    """Harm one rank's file of the run's newest checkpoint.

    Example: megabit inject damage runs/default bit_flip --seed 3
    """
    from megabit.checkpoint.folder import find_checkpoint
    from megabit.faults.damage import choose, damage_file

    checkpoint = find_checkpoint(run_dir)
    shards = sorted(checkpoint.glob("*.safetensors"))
    if not shards:
        raise UserError(f"{checkpoint}: has no files with tensors")
    shard = choose(shards, seed)
    _ask(f"Harm {shard} ({kind})?", yes)
    print(damage_file(shard, kind, seed))


def _ask(question: str, yes: bool) -> None:
    """Go on if the user says so."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError("--yes: is needed where nobody can be asked")
    typer.confirm(question, abort=True)
