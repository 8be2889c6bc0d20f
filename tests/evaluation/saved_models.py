"""Models on disk with random weights, as runs of the tiny corpus would leave them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabit.checkpoint.ternary import write_training
from megabit.config import Config, load_config
from megabit.data.corpus import CorpusInfo
from megabit.evaluation.forward import ForwardRunner
from megabit.evaluation.opening import default_settings, load_runner
from megabit.evaluation.token_batches import Shapes
from megabit.interop.opening import open_source
from tests.interop.random_source import RandomSource
from tests.training.tiny import make_mesh, tiny

LENGTH = 24
"""Positions that a model is made for."""
BATCH = 3
"""Sequences in a microbatch; with ``LENGTH``, tokens of one can be split over 2 or 4 ranks."""


def save_model(out: Path, corpus: CorpusInfo, more: Mapping[str, Any] | None = None) -> Path:
    """A training checkpoint that says it is of a run on ``corpus``."""
    config = tiny(f"data.dir={corpus.dir}", f"data.seq_length={LENGTH}")
    source = RandomSource(
        assets={"tokenizer.json": corpus.tokenizer_path}, max_length=LENGTH, seed=3
    )
    run = {"config": dataclasses.asdict(config), "corpus": corpus.fingerprint, **(more or {})}
    write_training(source, out, run)
    return out


def settings_of(model: Path, *settings: str, batch: int = BATCH, ranks: int = 1) -> Config:
    """What ``megabit eval`` makes of ``settings`` for a model."""
    return load_config(
        [
            *default_settings(open_source(model)),
            *settings,
            f"train.micro_batch_size={batch}",
            f"train.global_batch_size={batch * ranks}",
        ],
        ranks,
    )


def load(model: Path, config: Config) -> tuple[ForwardRunner, Shapes]:
    """The model at the layout of ``config``, on the calling rank."""
    runner = load_runner(open_source(model), config, make_mesh(config))
    shapes = Shapes(config.train.micro_batch_size, config.data.seq_length, 4)
    return runner, shapes
