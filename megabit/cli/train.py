"""``megabit train``: one process of a training job."""

import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabit.cli.arguments import Settings
from megabit.cli.device import device_of
from megabit.cli.launcher import Launch, run_under_torchrun
from megabit.config import Config, load_config
from megabit.errors import UserError

if TYPE_CHECKING:
    from megabit.mesh import ParallelMesh


def train(
    settings: Settings = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(help="Start so many ranks on this host, by torchrun's launcher.", min=1),
    ] = None,
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
    several hosts start it under torchrun instead of giving --nproc-per-node; see
    examples/two_nodes.sh.

    Example: megabit train examples/model/tiny.yaml examples/parallel/tp2_pp2.yaml
    data.text=my_texts/ --nproc-per-node 4
    """
    settings = [*(settings or []), *["checkpoint.auto_fallback=true"] * auto_fallback]
    if nproc_per_node is not None:
        if Launch.is_present():
            raise UserError("--nproc-per-node: a launcher has started this process already")
        # So that a mistake is told before anything starts.
        _check(load_config(settings, nproc_per_node), nproc_per_node)
        sys.exit(run_under_torchrun(["train", *settings], nproc_per_node))
    launch = Launch.from_environment()
    config = load_config(settings, launch.world_size)
    _check(config, launch.world_size)

    from rich.console import Console

    from megabit.mesh import open_mesh
    from megabit.training import trainer
    from megabit_kernels.allocator import keep_freed_memory

    keep_freed_memory()
    if config.parallel.exact == "full":
        import torch

        torch.set_num_threads(1)  # bf16 products are cut over threads, which changes their sums
    if launch.local_rank:  # one rank of a host says it
        warnings.filterwarnings("ignore", message="megabit_kernels has no native CPU kernels")
    device = device_of(config, launch)
    timeout = timedelta(seconds=config.run.timeout_s)
    tp, pp = config.parallel.tp, config.parallel.pp
    with open_mesh(tp, pp, launch.rank, launch.world_size, device, timeout=timeout) as mesh:
        _prepare(config, launch, mesh)
        finished = trainer.train(config, mesh, Console(quiet=not mesh.is_main))
    if not finished:
        sys.exit(130)


def _check(config: Config, world_size: int) -> None:
    """Refuse, before anything is written, what only a look beyond the settings can tell."""
    from megabit.pipeline.plan import plan_stages
    from megabit.telemetry import AlertBook

    plan_stages(config, world_size // (config.parallel.tp * config.parallel.pp))
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


def _prepare(config: Config, launch: Launch, mesh: "ParallelMesh") -> None:
    """Let one rank of each host prepare the corpus; all fail if one does."""
    from megabit.data.prepare import prepare_corpus
    from megabit.reduce import first_problem

    problem: str | None = None
    if launch.local_rank == 0:
        report = print if mesh.is_main else lambda line: None
        try:
            prepare_corpus(config.data, config.model.vocab_size, config.train.seed, report)
        except UserError as error:
            problem = str(error)
    problem = first_problem(problem, mesh.world, mesh.device)
    if problem is not None:
        raise UserError(problem)
