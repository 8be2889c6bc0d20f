"""Whether a model fits the layout that it is to be served at, before any rank is started."""

from pathlib import Path

from megabit.checkpoint.folder import find_checkpoint
from megabit.checkpoint.manifest import Manifest
from megabit.config import (
    Config,
    DataConfig,
    ParallelConfig,
    ServingConfig,
    TrainConfig,
    find_problems,
)
from megabit.errors import UserError


def check_fit(path: Path, serving: ServingConfig) -> None:
    """Look at a checkpoint's manifest. Of a folder of Hugging Face's, ranks find out: to read all
    of its fields takes torch.

    Raises:
        UserError: with every problem found.
    """
    if (path / "config.json").is_file():
        return
    manifest = Manifest.read(find_checkpoint(path))
    parallel, wanted = serving.parallel, serving.engine.max_model_len
    problems = []
    if wanted is not None and wanted > manifest.max_length:
        problems.append(
            f"engine.max_model_len: {wanted} is more than the {manifest.max_length} positions that "
            f"the model in {path} was made for"
        )
    config = Config(
        model=manifest.model,
        parallel=ParallelConfig(
            tp=parallel.tp, pp=parallel.pp, layers_per_stage=parallel.layers_per_stage
        ),
        data=DataConfig(seq_length=manifest.max_length),
        train=TrainConfig(micro_batch_size=1, global_batch_size=1),
    )
    problems += find_problems(config, parallel.tp * parallel.pp)
    if problems:
        raise UserError(*problems)
