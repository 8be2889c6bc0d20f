"""``megabit eval``: how good a model on disk is."""

import io
import json
import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stderr
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megabit.cli.arguments import Settings
from megabit.cli.device import device_of
from megabit.cli.launcher import Launch, run_under_torchrun
from megabit.cli.words import model_text
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
    ckpt: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT",
            help="A checkpoint, a run's folder (then its newest checkpoint), or a folder of "
            "Hugging Face's.",
            show_default=False,
        ),
    ],
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
    wanted = _Wanted(text or [], (tasks or "").split(",") if tasks else [], include_path, limit)
    if out is not None:
        _check_new(out)
    if nproc_per_node is not None:
        if Launch.is_present():
            raise UserError("--nproc-per-node: a launcher has started this process already")
        # So that a mistake is told before anything starts.
        _open(ckpt, settings or [], batch_size, nproc_per_node, wanted)
        sys.exit(run_under_torchrun(_without_nproc(sys.argv[1:]), nproc_per_node))
    launch = Launch.from_environment()
    source, config = _open(ckpt, settings or [], batch_size, launch.world_size, wanted)

    from megabit.mesh import open_mesh
    from megabit_kernels.allocator import keep_freed_memory

    keep_freed_memory()
    device = device_of(config, launch)
    timeout = timedelta(seconds=config.run.timeout_s)
    tp, pp = config.parallel.tp, config.parallel.pp
    with open_mesh(tp, pp, launch.rank, launch.world_size, device, timeout=timeout) as mesh:
        texts, done = _evaluate(source, config, mesh, wanted)
        if mesh.is_main and out is not None:
            _write(out, source, mesh, texts, done)


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
            _introduce(source)
        found = _evaluate_sets(runner, sets, batch_size, wanted.limit)
        done: dict[str, TaskResult] = {}
        if loaded is not None:
            shapes = Shapes(batch_size, length, config.model.num_attention_heads)
            done = run_tasks(runner, model_tokenizer(source), shapes, loaded, wanted.limit)
            if mesh.is_main:
                _print_tasks(done)
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
    width = max([len(name) for name in sets] + [len("set")])
    is_main = runner.mesh.is_main
    if sets and is_main:
        print(f"{'set':<{width}}  {'tokens':>12}  {'loss':>8}  {'perplexity':>10}  bits/byte")
    for name, text in sets.items():
        result = found[name] = evaluate_text(runner, text, batch_size, limit)
        if is_main:
            print(
                f"{name:<{width}}  {result.num_tokens:>12,}  {result.loss:>8.4f}  "
                f"{result.perplexity:>10.4g}  {result.bits_per_byte:>9.4f}",
                flush=True,
            )
    return found


def _introduce(source: "ModelSource") -> None:
    from megabit.checkpoint.model_source import CheckpointSource

    step = f", step {source.manifest.step}" if isinstance(source, CheckpointSource) else ""
    print(f"{source.path}{step}: {model_text(source.model)}", flush=True)
    if _never_ternary(source):
        print(
            "warning: it was not trained as a ternary model; its weights are rounded to codes "
            "here, which spoils it"
        )


def _never_ternary(source: "ModelSource") -> bool:
    from megabit.checkpoint.model_source import CheckpointSource
    from megabit.interop.huggingface import HuggingFaceSource

    if isinstance(source, HuggingFaceSource):
        return source.quantization is None
    return isinstance(source, CheckpointSource) and source.was_never_ternary


def _print_tasks(done: Mapping[str, "TaskResult"]) -> None:
    rows = [
        (name, "" if result.documents is None else f"{result.documents}", metric, f"{value:.4f}")
        for name, result in done.items()
        for metric, value in result.metrics.items()
    ]
    rows.insert(0, ("task", "documents", "metric", "value"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, documents, metric, value in rows:
        print(
            f"{name:<{widths[0]}}  {documents:>{widths[1]}}  {metric:<{widths[2]}}  "
            f"{value:>{widths[3]}}"
        )


def _check_new(out: Path) -> None:
    if out.exists():
        raise UserError(f"--json: {out} exists already; name a new file")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--json: {out} cannot be written: there is no folder {out.parent}")


def _write(
    out: Path,
    source: "ModelSource",
    mesh: "ParallelMesh",
    texts: Mapping[str, "Evaluation"],
    done: Mapping[str, "TaskResult"],
) -> None:
    from megabit.checkpoint.model_source import CheckpointSource
    from megabit.files import write_text

    content = {
        "model": str(source.path),
        "step": source.manifest.step if isinstance(source, CheckpointSource) else None,
        "layout": {"tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size},
        "sets": {
            name: {
                "tokens": result.num_tokens,
                "loss": _number(result.loss),
                "perplexity": _number(result.perplexity),
                "bits_per_byte": _number(result.bits_per_byte),
            }
            for name, result in texts.items()
        },
        "tasks": {name: asdict(result) for name, result in done.items()},
    }
    _check_new(out)  # somebody else may have written it meanwhile
    try:
        write_text(out, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--json: cannot write {out} ({error.strerror})") from error


def _number(value: float) -> float | None:
    """JSON has no word for what is not a number, or infinite."""
    return value if math.isfinite(value) else None


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
