"""What ``megabit eval`` prints and writes."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megabit.errors import UserError

if TYPE_CHECKING:
    from megabit.checkpoint.source import ModelSource
    from megabit.evaluation.lm_eval_tasks import TaskResult
    from megabit.evaluation.text_loss import Evaluation
    from megabit.mesh import ParallelMesh


def introduce(source: "ModelSource") -> None:
    """Say which model it is, and warn of one that is spoilt here."""
    from megabit.checkpoint.model_source import CheckpointSource
    from megabit.model.words import model_text

    step = f", step {source.manifest.step}" if isinstance(source, CheckpointSource) else ""
    print(f"{source.path}{step}: {model_text(source.model)}", flush=True)
    if _never_ternary(source):
        print(
            "warning: it was not trained as a ternary model; its weights are rounded to codes "
            "here, which spoils it"
        )


def print_heading(names: Sequence[str]) -> None:
    """Of the table of texts with these names."""
    print(f"{'set':<{_width(names)}}  {'tokens':>12}  {'loss':>8}  {'perplexity':>10}  bits/byte")


def print_text(name: str, result: "Evaluation", names: Sequence[str]) -> None:
    """A row of that table."""
    print(
        f"{name:<{_width(names)}}  {result.num_tokens:>12,}  {result.loss:>8.4f}  "
        f"{result.perplexity:>10.4g}  {result.bits_per_byte:>9.4f}",
        flush=True,
    )


def _width(names: Sequence[str]) -> int:
    return max(map(len, ["set", *names]))


def print_tasks(done: Mapping[str, "TaskResult"]) -> None:
    """The table of tasks."""
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


def check_new(out: Path, option: str = "--json") -> None:
    """Refuse to overwrite results, or to find out at the end that they cannot be written."""
    if out.exists():
        raise UserError(f"{option}: {out} exists already; name a new file")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{option}: {out} cannot be written: there is no folder {out.parent}")


def write_results(
    out: Path,
    source: "ModelSource",
    mesh: "ParallelMesh",
    texts: Mapping[str, "Evaluation"],
    done: Mapping[str, "TaskResult"],
) -> None:
    """All results as JSON.

    Raises:
        UserError: ``out`` exists, or cannot be written.
    """
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
    check_new(out)  # somebody else may have written it meanwhile
    try:
        write_text(out, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--json: cannot write {out} ({error.strerror})") from error


def _never_ternary(source: "ModelSource") -> bool:
    from megabit.checkpoint.model_source import CheckpointSource
    from megabit.interop.huggingface import HuggingFaceSource

    if isinstance(source, HuggingFaceSource):
        return source.quantization is None
    return isinstance(source, CheckpointSource) and source.was_never_ternary


def _number(value: float) -> float | None:
    """JSON has no word for what is not a number, or infinite."""
    return value if math.isfinite(value) else None
