"""``megabit export``: models for other tools."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megabit.cli.progress import bar
from megabit.units import file_size_text

if TYPE_CHECKING:
    from megabit.checkpoint.source import ModelSource
    from megabit.checkpoint.ternary import Origin

app = typer.Typer(no_args_is_help=True)

Source = Annotated[
    Path,
    typer.Argument(
        metavar="CKPT",
        help="A checkpoint or a run's folder (then its newest checkpoint), or a folder of Hugging "
        "Face's.",
        show_default=False,
    ),
]


@app.callback()
def export() -> None:
    """Write a model for other tools. What was there before is never overwritten.

    Example: megabit export hf runs/default exported/
    """


@app.command("hf")
def hf(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.", show_default=False)],
    mode: Annotated[
        Literal["offline", "online"],
        typer.Option(
            help="offline: packed codes and scales. online: master weights, which transformers "
            "quantizes in every forward pass; needs a training checkpoint."
        ),
    ] = "offline",
    linear_class: Annotated[
        Literal["autobitlinear", "bitlinear"],
        typer.Option(
            help="Which of transformers' layers reads it: autobitlinear multiplies by the scale, "
            "bitlinear divides by it."
        ),
    ] = "autobitlinear",
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        typer.Option(help="Of embedding, head and norms, and of master weights."),
    ] = "bfloat16",
) -> None:
    """Write a BitNetForCausalLM that transformers loads, with its tokenizer.

    Example: megabit export hf runs/default exported/ --mode online --dtype float32
    """
    from megabit.interop.huggingface import export_huggingface

    model = _open(source)
    with bar() as progress:
        report = export_huggingface(model, out, mode, linear_class, dtype, report=progress)
    print(f"Wrote {report.path}: {report.tensors} tensors, {file_size_text(report.bytes)}")
    if report.changed_codes:
        share = report.changed_codes / report.total_codes
        print(
            f"note: {report.changed_codes} of {report.total_codes} codes ({share:.3%}) change, as "
            f"{dtype} rounds the master weights; --dtype float32 or --mode offline keeps them"
        )


@app.command("gguf")
def gguf(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new file.", show_default=False)],
    type: Annotated[
        Literal["TQ2_0", "TQ1_0", "I2_S"],
        typer.Option(
            help="Of the ternary weights: TQ2_0 and TQ1_0 are llama.cpp's (2.06 and 1.69 bits a "
            "weight), I2_S is bitnet.cpp's."
        ),
    ] = "TQ2_0",
    embedding: Annotated[
        Literal["F16", "F32"], typer.Option(help="Of the embedding, which is also the head.")
    ] = "F16",
) -> None:
    """Write a GGUF file for llama.cpp or bitnet.cpp, with its tokenizer.

    Says so where such a tool is known to compute something else.

    Example: megabit export gguf runs/default model.gguf --type TQ1_0
    """
    from megabit.interop.gguf_export import export_gguf

    model = _open(source)
    with bar() as progress:
        report = export_gguf(model, out, type, embedding, progress)
    print(f"Wrote {report.path}: {report.tensors} tensors, {file_size_text(report.bytes)}")
    if report.scale_change:
        print(f"note: scales are fp16 in this type, off by {report.scale_change:.1e} at most")
    for warning in report.warnings:
        print(f"warning: {warning}")


@app.command("safetensors")
def safetensors(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.", show_default=False)],
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(
            help="Of embedding and head; default: bfloat16 where they are stored so, else "
            "float32. Norms and scales are float32 always.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write packed codes and scales: a ternary checkpoint of one file that describes itself.

    All megabit commands that take a checkpoint read it; it cannot be trained further.

    Example: megabit export safetensors runs/default packed/
    """
    from megabit.checkpoint.ternary import write_ternary

    model = _open(source)
    with bar() as progress:
        written = write_ternary(model, out, _origin(model), dtype, progress)
    print(
        f"Wrote {written.path}: {written.tensors} tensors, {file_size_text(written.bytes)}, "
        f"of which codes and scales are {file_size_text(written.ternary_bytes)}"
    )


def _open(path: Path) -> "ModelSource":
    """Open a model that is what was saved (a copy of a damaged one would have hashes that are
    right), and say so if a ternary one is about to be made of one that never was."""
    from megabit.checkpoint.model_source import CheckpointSource
    from megabit.interop.huggingface import HuggingFaceSource
    from megabit.interop.opening import open_verified

    with bar() as progress:
        source = open_verified(path, progress)
    is_dense = isinstance(source, HuggingFaceSource) and source.quantization is None
    if is_dense or (isinstance(source, CheckpointSource) and source.was_never_ternary):
        print(
            f"warning: {path} was not trained as a ternary model; its weights are rounded to codes "
            "here, which spoils it. Import it and train it first"
        )
    return source


def _origin(source: "ModelSource") -> "Origin":
    """What a checkpoint knows of the run that made it."""
    from megabit.checkpoint.model_source import CheckpointSource
    from megabit.checkpoint.ternary import Origin

    if not isinstance(source, CheckpointSource):
        return Origin(run={"exported from": source.path.name})
    return Origin(source.manifest.step, source.manifest.updates, source.manifest.run)
