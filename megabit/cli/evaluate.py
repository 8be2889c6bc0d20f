"""``megabit eval``: how good a model on disk is."""

import io
import sys
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megabit.cli.arguments import ModelPath, Settings
from megabit.cli.device import device_of
from megabit.cli.environment import Launch, set_site
from megabit.cli.evaluation_results import (
    check_new,
    introduce,
    print_heading,
    print_tasks,
    print_text,
    write_results,
)
from megabit.cli.launcher import LaunchOptions, launch
from megabit.config import Config, load_config
from megabit.errors import UserError

if TYPE_CHECKING:
    from megabit.checkpoint.source import ModelSource
    from megabit.evaluation.forward import ForwardRunner
    from megabit.evaluation.lm_eval_tasks import TaskResult
    from megabit.evaluation.text_loss import Evaluation
    from megabit.evaluation.text_sets import TextSet
    from megabit.mesh import ParallelMesh


@dataclass(frozen=True)
class _Wanted:
    """What is to be found out."""

    text: list[str]
    tasks: list[str]
    include_path: Path | None
    limit: int | None

    @property
    def has_tasks(self) -> bool:
        return bool(self.tasks) or self.include_path is not None

    @property
    def is_default(self) -> bool:
        """Whether nothing was named: then it is the texts of the run."""
        return not self.text and not self.has_tasks


def evaluate(
    ckpt: ModelPath,
    settings: Settings = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(help="Start so many ranks on this host, by torchrun's launcher.", min=1),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A file or folder to evaluate on, of a kind that data.text may be; may be given "
            "again.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-evaluation-harness, by commas: YAML files, or names.",
            show_default=False,
        ),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            help="A folder of such YAML files; without --tasks all of them are run.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Windows of each text, spread evenly, and documents of each task.", min=1
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Sequences in a forward pass; default: train.micro_batch_size of its run, or 1.",
            min=1,
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the results to this new file.", show_default=False),
    ] = None,
) -> None:
    """Compute the loss, perplexity and bits per byte of texts, or run tasks, at any layout.

    Without --text and --tasks it takes the held-out text in data.dir of the model's run, if that is
    there still, and its validation sets. SETTINGS name a layout (parallel.*), or change what is
    taken over from the run: precision.compute, data.dir, data.seq_length and the like. A ternary
    model gives the same bits at every layout.

    Example: megabit eval runs/default parallel.tp=2 --nproc-per-node 2 --text other_texts/
    """
    named = [name.strip() for name in (tasks or "").split(",")]
    wanted = _Wanted(text or [], [name for name in named if name], include_path, limit)
    if out is not None:
        check_new(out)
    if nproc_per_node is not None:
        options = LaunchOptions.of(nproc_per_node)
        # So that a mistake is told before anything starts.
        _, config = _open(ckpt, settings or [], batch_size, nproc_per_node, wanted)
        set_site(config)
        sys.exit(launch(_without_nproc(sys.argv[1:]), options))
    launched = Launch.from_environment()
    source, config = _open(ckpt, settings or [], batch_size, launched.world_size, wanted)
    set_site(config)

    from megabit.mesh import open_mesh
    from megabit_kernels.allocator import keep_freed_memory

    keep_freed_memory()
    device = device_of(config, launched)
    timeout = timedelta(seconds=config.run.timeout_s)
    tp, pp = config.parallel.tp, config.parallel.pp
    with open_mesh(tp, pp, launched.rank, launched.world_size, device, timeout=timeout) as mesh:
        texts, done = _evaluate(source, config, mesh, wanted)
        if mesh.is_main and out is not None:
            write_results(out, source, mesh, texts, done)


def _open(
    ckpt: Path, settings: list[str], batch_size: int | None, world_size: int, wanted: _Wanted
) -> tuple["ModelSource", Config]:
    """The model and the settings to evaluate it with."""
    from megabit.data.validation import set_names
    from megabit.evaluation.lm_eval_tasks import check_harness
    from megabit.evaluation.opening import check_settings, default_settings
    from megabit.interop.opening import open_source
    from megabit.pipeline.plan import plan_stages

    if wanted.has_tasks:
        check_harness()
    for path in set_names(wanted.text, "--text").values():
        if not path.exists():
            raise UserError(f"--text: {path} does not exist; give a text file or a folder")
    source = open_source(ckpt)
    defaults = default_settings(source)
    if batch_size is None:
        key = "train.micro_batch_size="
        saved = [setting for setting in defaults if setting.startswith(key)]
        batch_size = int(saved[0].removeprefix(key)) if saved else 1
    config = load_config(
        [
            *defaults,
            *settings,
            f"train.micro_batch_size={batch_size}",
            # Of which a multiple of it fits any layout; there are no training steps.
            f"train.global_batch_size={batch_size * world_size}",
        ],
        world_size,
    )
    check_settings(config, source)
    parallel = config.parallel
    plan_stages(config, world_size // (parallel.tp * parallel.pp))
    return source, config


def _evaluate(
    source: "ModelSource", config: Config, mesh: "ParallelMesh", wanted: _Wanted
) -> tuple[dict[str, "Evaluation"], dict[str, "TaskResult"]]:
    """Load the model, evaluate and print; collective over the mesh."""
    from megabit.checkpoint import on_all_ranks
    from megabit.evaluation.lm_eval_tasks import load_tasks, run_tasks
    from megabit.evaluation.opening import load_runner, model_tokenizer
    from megabit.evaluation.text_sets import encoded_texts
    from megabit.evaluation.token_batches import Shapes

    length, batch_size = config.data.seq_length, config.train.micro_batch_size
    with ExitStack() as stack:
        sets: Mapping[str, TextSet] = {}
        if wanted.is_default:
            sets = _sets_of_run(source, config, mesh)
        elif wanted.text:
            tokenizer = model_tokenizer(source)
            texts = encoded_texts(
                wanted.text,
                config.data.text_field,
                tokenizer.tokenizer,
                tokenizer.end_of_text,
                length,
            )
            sets = on_all_ranks(lambda: stack.enter_context(texts), mesh)
        if not mesh.is_main:  # the harness draws bars, each rank the same
            stack.enter_context(redirect_stderr(io.StringIO()))
        loaded = None
        if wanted.has_tasks:
            loaded = on_all_ranks(lambda: load_tasks(wanted.tasks, wanted.include_path), mesh)
        runner = load_runner(source, config, mesh)
        if mesh.is_main:
            introduce(source)
        found = _evaluate_sets(runner, sets, batch_size, wanted.limit)
        done: dict[str, TaskResult] = {}
        if loaded is not None:
            shapes = Shapes(batch_size, length, config.model.num_attention_heads)
            done = run_tasks(runner, model_tokenizer(source), shapes, loaded, wanted.limit)
            if mesh.is_main:
                print_tasks(done)
        return found, done


def _sets_of_run(
    source: "ModelSource", config: Config, mesh: "ParallelMesh"
) -> Mapping[str, "TextSet"]:
    """The held-out text and the validation sets of the run that saved the model."""
    from megabit.checkpoint import on_all_ranks
    from megabit.evaluation.opening import corpus_of
    from megabit.evaluation.text_sets import open_sets

    def find() -> Any:
        corpus = corpus_of(source, config)
        if isinstance(corpus, str):
            raise UserError(f"{corpus}; give a text (--text), or its corpus (data.dir=…)")
        return corpus

    corpus = on_all_ranks(find, mesh)
    return open_sets(config, corpus, mesh)


def _evaluate_sets(
    runner: "ForwardRunner", sets: Mapping[str, "TextSet"], batch_size: int, limit: int | None
) -> dict[str, "Evaluation"]:
    """One after the other, each printed when it is done."""
    from megabit.evaluation.text_loss import evaluate_text

    found = {}
    is_main = runner.mesh.is_main
    if sets and is_main:
        print_heading([*sets])
    for name, text in sets.items():
        found[name] = evaluate_text(runner, text, batch_size, limit)
        if is_main:
            print_text(name, found[name], [*sets])
    return found


def _without_nproc(arguments: list[str]) -> list[str]:
    """The command line for the ranks."""
    option = "--nproc-per-node"
    kept = []
    words = iter(arguments)
    for word in words:
        if word == option:
            next(words)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept
