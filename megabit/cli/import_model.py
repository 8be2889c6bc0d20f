"""``megabit import``: models of other tools as checkpoints."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megabit.cli.progress import bar
from megabit.config import model_to_yaml
from megabit.errors import UserError
from megabit.units import file_size_text

if TYPE_CHECKING:
    from torch import Tensor

    from megabit.interop.huggingface import HuggingFaceSource

app = typer.Typer(no_args_is_help=True)

SETTINGS = "model.yaml"
"""Of the model, to train it with."""


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
    from megabit.checkpoint.manifest import ASSETS, NEVER_TERNARY
    from megabit.checkpoint.ternary import Origin, write_ternary, write_training
    from megabit.data.corpus import TOKENIZER
    from megabit.interop.huggingface import HuggingFaceSource
    from megabit.model.words import model_text

    source = HuggingFaceSource(path)
    tokens = _random_tokens(source, check_tokens) if check_tokens else None
    source.verify()
    print(f"Read {path}: {model_text(source.model)}", flush=True)
    run: dict[str, Any] = {"imported from": path.absolute().name}
    if source.quantization is None:
        run[NEVER_TERNARY] = True
    with bar() as progress, TemporaryDirectory() as folder:
        if source.has_masters:
            settings = Path(folder) / SETTINGS
            settings.write_text(model_to_yaml(source.model), encoding="utf-8")
            written = write_training(source, out, run, {SETTINGS: settings}, progress)
        else:
            written = write_ternary(source, out, Origin(run=run), report=progress)
    print(
        f"Wrote {out}: {written.kind}, {written.tensors} tensors, {file_size_text(written.bytes)}"
    )
    if source.quantization is None:
        print(
            "It was not trained as a ternary model: its layers become ternary. Train it before "
            "use, best with model.norm_placement=subln: that inserts norms before o_proj and "
            "down_proj (gains of one), as BitNet has them."
        )
    if not source.has_masters:
        print(
            "It has codes and scales and no master weights: it can be evaluated and exported, but "
            "not trained further."
        )
    else:
        print(f"To train it further: megabit train {out / ASSETS / SETTINGS} run.init_from={out} …")
        if TOKENIZER in source.assets:
            print(f"Its tokenizer, for a text of yours: data.tokenizer={out / ASSETS / TOKENIZER}")
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
