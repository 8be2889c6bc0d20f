"""``megabit train``: the launcher of a training job, or one of its processes."""

import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from megabit.cli.arguments import Settings
from megabit.cli.device import device_of
from megabit.cli.environment import (
    Launch,
    give_up,
    hush_torch,
    launcher_pid,
    leave,
    note_outcome,
    set_flight_recorder,
    set_site,
)
from megabit.cli.exit_codes import FAILED, INTERRUPTED, REFUSED, REGROUP, STOPPED
from megabit.cli.launcher import (
    RDZV_ID,
    STOP_GRACE_S,
    LaunchOptions,
    MaxRestarts,
    Nnodes,
    NodeRank,
    NprocPerNode,
    RdzvEndpoint,
    RdzvId,
    StopGrace,
    launch,
)
from megabit.config import Config, load_config
from megabit.config.validate_cluster import islands_in_world
from megabit.errors import UserError
from megabit.faults.parent import end_with_parent

if TYPE_CHECKING:
    from megabit.mesh import ParallelMesh


def train(
    settings: Settings = None,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = "1",
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = RDZV_ID,
    node_rank: NodeRank = None,
    max_restarts: MaxRestarts = 0,
    stop_grace: StopGrace = STOP_GRACE_S,
    auto_fallback: Annotated[
        bool,
        typer.Option(
            "--auto-fallback",
            help="If the newest checkpoint is damaged, go on from the one before: "
            "checkpoint.auto_fallback=true.",
        ),
    ] = False,
) -> None:
    """Train a model, evaluate it on held-out text, print a sample and draw the loss curve.

    Goes on from the newest checkpoint in run.dir, if there is one, whatever layout wrote it. For
    several hosts run it on each of them with --nnodes and --rdzv-endpoint, or start the ranks by
    torchrun, srun or mpirun instead of giving --nproc-per-node; see examples/launch.

    Ends with 0 if it has finished, 75 if SIGTERM has stopped it and 130 if Ctrl-C has (it is saved,
    and the same command goes on), 2 if the settings are wrong, and 1 or another code if it failed.

    Example: megabit train examples/model/tiny.yaml examples/parallel/tp2_pp2.yaml
    data.text=my_texts/ --nproc-per-node 4
    """
    hush_torch()
    settings = [*(settings or []), *["checkpoint.auto_fallback=true"] * auto_fallback]
    if nproc_per_node is not None:
        options = LaunchOptions.of(
            nproc_per_node, nnodes, rdzv_endpoint, rdzv_id, node_rank, max_restarts, stop_grace
        )
        # So that a mistake is told before anything starts.
        config = _check_worlds(settings, options.world_sizes)
        set_site(config)
        faults = config.faults
        sys.exit(launch(["train", *settings], options, faults.retries, faults.retry_pause_s))
    if nnodes != "1" or rdzv_endpoint is not None or max_restarts:
        raise UserError("--nproc-per-node: say how many ranks to start on each host")
    _train(settings, Launch.from_environment())


def _train(settings: Sequence[str], launched: Launch) -> NoReturn:
    """As one rank of the job; ends the process."""
    launcher = launcher_pid()
    if launcher is not None:
        end_with_parent(launcher)
    config = _load(settings, launched)

    from rich.console import Console

    from megabit.faults.watchdog import RankLost
    from megabit.mesh import Topology, open_mesh
    from megabit.training import trainer
    from megabit.training.measures import Stopped
    from megabit.training.stop import StopReason, StopSignal
    from megabit_kernels.allocator import keep_freed_memory

    keep_freed_memory()
    if config.parallel.exact == "full":
        import torch

        torch.set_num_threads(1)  # bf16 products are cut over threads, which changes their sums
    if launched.local_rank:  # one rank of a host says it
        warnings.filterwarnings("ignore", message="megabit_kernels has no native CPU kernels")
    device = device_of(config, launched)
    if device.type == "cuda":
        set_flight_recorder(Path(config.run.dir) / "faults" / "nccl_trace_rank_")
    timeout = timedelta(seconds=config.run.timeout_s)
    tp, pp = config.parallel.tp, config.parallel.pp
    topology = Topology.of(config, launched.local_rank)
    with open_mesh(
        tp, pp, launched.rank, launched.world_size, device, timeout=timeout, topology=topology
    ) as mesh:
        _prepare(config, launched, mesh)
        stop = StopSignal(mesh.world, mesh.device)
        try:
            finished = trainer.train(config, mesh, Console(quiet=not mesh.is_main), stop)
        except RankLost as error:
            give_up(error)
        except Stopped:
            note_outcome(FAILED)  # it would stop again
            raise
    if finished:
        sys.exit()
    codes = {
        StopReason.TERMINATE: STOPPED,
        StopReason.INTERRUPT: INTERRUPTED,
        StopReason.REGROUP: REGROUP,
    }
    leave(codes[stop.reason])


def _load(settings: Sequence[str], launched: Launch) -> Config:
    """The settings, if they are right for this world.

    Each host says what is wrong with its own settings; that the world does not fit is the same
    everywhere, and rank 0 says it.
    """
    config = load_config(settings)
    set_site(config)
    try:
        config = load_config(settings, launched.world_size)
        _check(config, launched.world_size)
    except UserError:
        if launched.rank == 0:
            raise
        sys.exit(REFUSED)
    return config


def _check_worlds(settings: Sequence[str], world_sizes: Sequence[int]) -> Config:
    """Settings that fit one at least of the worlds that may be; says which do not.

    Raises:
        UserError: they fit none; the problems of the largest.
    """
    problems: dict[int, UserError] = {}
    fitting: Config | None = None
    for world_size in world_sizes:
        try:
            config = load_config(settings, world_size)
            _check(config, world_size)
            fitting = fitting or config
        except UserError as error:
            problems[world_size] = error
    if fitting is None:
        raise problems[world_sizes[0]]
    for world_size, refused in problems.items():
        print(
            f"megabit: with {world_size} ranks the job would end: {refused.problems[0]}",
            file=sys.stderr,
        )
    return fitting


def _check(config: Config, world_size: int) -> None:
    """Refuse, before anything is written, what only a look beyond the settings can tell."""
    from megabit.pipeline.plan import plan_stages
    from megabit.telemetry import AlertBook

    parallel = config.parallel
    plan_stages(config, world_size // (islands_in_world(config.outer) * parallel.tp * parallel.pp))
    AlertBook(config.telemetry.alerts)
    for key, path in (
        ("run.init_from", config.run.init_from),
        ("loss.teacher", config.loss.teacher),
    ):
        if path is not None and not Path(path).exists():
            raise UserError(
                f"{key}: {path} does not exist; give a checkpoint, a run's folder, or one of "
                "Hugging Face's"
            )


def _prepare(config: Config, launched: Launch, mesh: "ParallelMesh") -> None:
    """Let one rank of each host prepare the corpus; all fail if one does."""
    from megabit.checkpoint import on_all_ranks
    from megabit.data.prepare import prepare_corpus

    def prepare() -> None:
        if launched.local_rank == 0:
            report = print if mesh.is_main else lambda line: None
            prepare_corpus(config.data, config.model.vocab_size, config.train.seed, report)

    on_all_ranks(prepare, mesh)
