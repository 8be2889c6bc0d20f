"""Whether a model fits the layout that it is to be served at, before any rank is started."""

from pathlib import Path
from typing import Literal

from megabit.checkpoint.folder import find_checkpoint
from megabit.checkpoint.manifest import Manifest
from megabit.config import (
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    ServingConfig,
    TrainConfig,
    find_problems,
)
from megabit.errors import UserError


def fitting_config(
    path: Path,
    model: ModelConfig,
    max_length: int,
    serving: ServingConfig,
    compute: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
) -> Config:
    """The model and its layout, as settings of a run that computes as the server does.

    Args:
        path: of the model, for messages.
        max_length: positions that it was made for.

    Raises:
        UserError: the settings do not fit the model, with every problem found.
    """
    parallel = serving.parallel
    wanted = serving.engine.max_model_len or max_length
    problems = []
    if wanted > max_length:
        problems.append(
            f"engine.max_model_len: {wanted} is more than the {max_length} positions that the "
            f"model in {path} was made for"
        )
    config = Config(
        model=model,
        parallel=ParallelConfig(
            tp=parallel.tp,
            pp=parallel.pp,
            layers_per_stage=parallel.layers_per_stage,
            # Where a message is not rounded, it is sent in this way.
            row_reduce="int32" if parallel.row_reduce == "int32" else "exact16",
        ),
        precision=PrecisionConfig(compute=compute),
        data=DataConfig(seq_length=wanted),
        train=TrainConfig(micro_batch_size=1, global_batch_size=1),
    )
    problems += find_problems(config, parallel.tp * parallel.pp)
    if problems:
        raise UserError(*problems)
    return config


def check_fit(path: Path, serving: ServingConfig) -> None:
    """Look at a checkpoint's manifest; needs no torch. Of a folder of Hugging Face's, ranks find
    out: to read all of its fields takes torch.

    Raises:
        UserError: with every problem found.
    """
    if not (path / "config.json").is_file():
        manifest = Manifest.read(find_checkpoint(path))
        fitting_config(path, manifest.model, manifest.max_length, serving)
