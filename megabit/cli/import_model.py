"""``megabit import``: models of other tools as checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabit.cli.progress import watched
from megabit.cli.words import model_text, size_text
from megabit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megabit.interop.huggingface import HuggingFaceSource

app = typer.Typer(no_args_is_help=True)


@app.callback()
def import_model() -> None:
    """Make checkpoints of other tools' models.

    Example: megabit import hf downloaded/bitnet imported/
    """


@app.command("hf")
def hf(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A folder with config.json and safetensors files: a BitNetForCausalLM, packed "
            "(offline) or with master weights (online), or a dense LLaMA-style model.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A new folder: the checkpoint.", show_default=False),
    ],
    check_tokens: Annotated[
        int,
        typer.Option(
            help="Also compare logits for so many random tokens: transformers' arithmetic with "
            "megabit's int8 products. 0: don't.",
            min=0,
        ),
    ] = 0,
) -> None:
    """Make a checkpoint of a Hugging Face model, after a look at all of its values.

    Master weights and dense models become a training checkpoint, with which a run can begin
    (run.init_from). Packed codes become a ternary checkpoint: it can be evaluated and exported, but
    not trained further.

    Example: megabit import hf downloaded/bitnet imported/ --check-tokens 64
    """
    from megabit.checkpoint.ternary import Origin, write_ternary, write_training
    from megabit.interop.huggingface import HuggingFaceSource

    source = HuggingFaceSource(path)
    tokens = _random_tokens(source, check_tokens) if check_tokens else None
    source.verify()
    print(f"Read {path}: {model_text(source.model)}", flush=True)
    run = {"imported from": path.absolute().name}
    with watched(source) as model:
        if source.has_masters:
            written = write_training(model, out, run)
        else:
            written = write_ternary(model, out, Origin(run=run))
    print(f"Wrote {out}: {written.kind}, {written.tensors} tensors, {size_text(written.bytes)}")
    if source.quantization is None:
        print(
            "It was not trained as a ternary model: its layers become ternary, with norms before "
            "o_proj and down_proj where it had none (gains of one). Train it before use."
        )
    if not source.has_masters:
        print(
            "It has codes and scales and no master weights: it can be evaluated and exported, but "
            "not trained further."
        )
    else:
        print(f"To train it further: megabit train run.init_from={out} …")
    if tokens is not None:
        from megabit.training.import_check import compare_with_huggingface

        print("Beside transformers: " + str(compare_with_huggingface(source, tokens)))


def _random_tokens(source: "HuggingFaceSource", length: int) -> "Tensor":
    """``[1, length]``, the same each time; refused before anything is written if they can't be
    compared on."""
    import torch

    from megabit.interop.huggingface import mode_of

    if length > source.max_length:
        raise UserError(
            f"--check-tokens: must be {source.max_length} at most, the positions that the model "
            f"was made for, not {length}"
        )
    try:
        mode_of(source)
    except UserError as error:
        raise UserError(f"--check-tokens: {error}") from error
    generator = torch.Generator().manual_seed(0)
    return torch.randint(source.model.vocab_size, (1, length), generator=generator)
