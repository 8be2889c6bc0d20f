"""``megabit doctor``: is this machine, or this cluster, fit for a job?"""

import os
import sys
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from megabit.cli.arguments import Settings
from megabit.cli.device import device_of
from megabit.cli.environment import Launch, leave, set_site
from megabit.cli.evaluation_results import check_new
from megabit.cli.launcher import (
    RDZV_ID,
    LaunchOptions,
    Nnodes,
    NodeRank,
    NprocPerNode,
    RdzvEndpoint,
    RdzvId,
    launch,
)
from megabit.cli.progress import bar
from megabit.config import leaves, load_config, to_yaml
from megabit.errors import RunError, UserError

if TYPE_CHECKING:
    from megabit.doctor import Plan


def doctor(
    settings: Settings = None,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = "1",
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = RDZV_ID,
    node_rank: NodeRank = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--storage",
            metavar="DIR",
            help="The shared folder of the job. Default: run.dir, or what there is above it.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller messages, files and products.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a rank waits for another one.", min=1)
    ] = 120.0,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Also write all measurements to this new file.", show_default=False
        ),
    ] = None,
) -> None:
    """Check a machine or a cluster before a job does: devices, software, clocks, shared storage,
    disk, the network between every pair, collectives, and each rank's arithmetic.

    Start it as the job will be started: with the same SETTINGS, by the same launcher, on the same
    hosts. Says what is wrong in words, and what to do. Exits with 1 if something is wrong; warnings
    don't count.

    Example: megabit doctor examples/model/tiny.yaml --nproc-per-node 2
    """
    arguments = settings or []
    config = load_config(arguments)
    set_site(config)
    if json is not None:
        check_new(json)
    if nproc_per_node is not None:
        options = LaunchOptions.of(nproc_per_node, nnodes, rdzv_endpoint, rdzv_id, node_rank)
        command = ["doctor", *arguments, "--timeout", f"{timeout:g}", *["--quick"] * quick]
        command += [] if folder is None else ["--storage", str(folder)]
        command += [] if json is None else ["--json", str(json)]
        sys.exit(launch(command, options))
    if nnodes != "1" or rdzv_endpoint is not None:
        raise UserError("--nproc-per-node: say how many ranks to start on each host")

    # Read when torch is imported: what it logs of a failure is no line for people.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

    import yaml

    from megabit.doctor import Plan

    plan = Plan(
        config=config,
        has_settings=bool(arguments),
        # Two hosts may see the same folder in different places.
        settings={
            **{key: str(value) for key, value in leaves(yaml.safe_load(to_yaml(config)))},
            "--quick": str(quick),
        },
        folder=(folder or Path(config.run.dir)).absolute(),
        folder_may_be_new=folder is None,
        is_quick=quick,
    )
    _examine(plan, timeout, json)


def _examine(plan: "Plan", timeout_s: float, json: Path | None) -> NoReturn:
    """As one of the ranks; ends the process."""
    launched = Launch.from_environment()

    from rich.console import Console

    from megabit.doctor import examine, interfaces
    from megabit.doctor.places import Place
    from megabit.doctor.reach import explain
    from megabit.doctor.report import print_diagnosis, to_json
    from megabit.files import write_text
    from megabit.mesh import open_mesh
    from megabit.reduce import any_rank

    device = device_of(plan.config, launched)
    if launched.world_size > 1:
        problem = interfaces.missing(os.environ, device.type == "cuda")
        if problem is not None:
            raise UserError(problem)
    place = Place.here(
        launched.rank, launched.local_rank, launched.local_world_size, str(device), os.environ
    )
    with ExitStack() as open_parts:
        wait = timedelta(seconds=timeout_s)
        try:
            mesh = open_parts.enter_context(
                open_mesh(1, 1, launched.rank, launched.world_size, device, timeout=wait)
            )
        except (RuntimeError, ValueError) as error:  # what torch raises, for many reasons
            raise RunError(explain(error, os.environ)) from error
        with bar() if mesh.is_main else nullcontext(_quiet) as progress:
            found = examine(mesh.world, place, device, plan, os.environ, progress)
        if mesh.is_main:
            print_diagnosis(found, plan.checkpoint_bytes, Console())
            if json is not None:
                write_text(json, to_json(found))
        # A launcher ends the others as soon as one ends with an error.
        any_rank(False, mesh.world, device)
    leave(0 if found.is_fine else 1)


def _quiet(name: str, share: float) -> None:
    pass
