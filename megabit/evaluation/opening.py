"""A model on disk, opened to be evaluated: which settings fit it, its tokenizer, its stages."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabit.checkpoint import on_all_ranks
from megabit.checkpoint.model_source import CheckpointSource
from megabit.checkpoint.source import ModelSource
from megabit.config import Config
from megabit.data.corpus import CorpusInfo, load_corpus
from megabit.errors import UserError
from megabit.evaluation.forward import ForwardRunner
from megabit.inference.model_text import ModelTokenizer, settings_of_run
from megabit.inference.opening import check_bytes
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.model.load import load_stages
from megabit.pipeline.plan import agree_on_plan

TAKEN_OVER = (
    "precision.compute",
    "data.dir",
    "data.validation",
    "data.text_field",
    "data.tokenizer",
    "data.end_of_text",
    "train.micro_batch_size",
)
"""Settings of the run that saved a model which its evaluation begins with. Not those of the layout:
any layout will do."""


def default_settings(source: ModelSource) -> list[str]:
    """``key=value`` of a model, and of the run that it is from where that is known."""
    saved = _saved_settings(source)
    values = {
        **{f"model.{key}": value for key, value in vars(source.model).items()},
        "data.seq_length": source.max_length,
        **{key: saved[key] for key in TAKEN_OVER if key in saved},
    }
    return [f"{key}={_as_typed(value)}" for key, value in values.items()]


def check_settings(config: Config, source: ModelSource) -> None:
    """Refuse settings that are of another model, or that it was not made for."""
    problems = [
        f"model.{key}: the model in {source.path} has {theirs!r}, not {wanted!r}; leave it out"
        for key, wanted in vars(config.model).items()
        if (theirs := getattr(source.model, key)) != wanted
    ]
    if config.data.seq_length > source.max_length:
        problems.append(
            f"data.seq_length: {config.data.seq_length} is more than the {source.max_length} "
            f"positions that the model in {source.path} was made for"
        )
    if problems:
        raise UserError(*problems)


def load_runner(source: ModelSource, config: Config, mesh: ParallelMesh) -> ForwardRunner:
    """The model at the layout of ``mesh``, after a look at all of its bytes; collective over it.

    Raises:
        UserError: it is not what was saved, or does not fit the layout.
    """
    check_bytes(source, mesh)
    plan = agree_on_plan(config, mesh)
    stages = build_stages(config, mesh, plan).eval()
    on_all_ranks(lambda: load_stages(stages, source), mesh)
    return ForwardRunner(stages, plan.schedule.placement, mesh)


def model_tokenizer(source: ModelSource) -> ModelTokenizer:
    """That of ``source``.

    Raises:
        UserError: it has none, or nothing says which token ends a text.
    """
    return ModelTokenizer.read(source.path, source.assets, _run(source))


def corpus_of(source: ModelSource, config: Config) -> CorpusInfo | str:
    """The corpus in ``data.dir`` if the model was trained on it, or why not."""
    folder = config.data.dir
    trained_on = source.manifest.run.get("corpus") if isinstance(source, CheckpointSource) else None
    if trained_on is None:
        return f"{source.path}: does not say which text it was trained on"
    try:
        corpus = load_corpus(Path(folder))
    except UserError as error:
        return f"data.dir: {error}"
    if corpus.fingerprint != trained_on:
        return f"data.dir: {folder} is not the corpus that {source.path} was trained on"
    return corpus


def _as_typed(value: Any) -> str:
    """As one would write it on the command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _saved_settings(source: ModelSource) -> Mapping[str, Any]:
    return settings_of_run(_run(source))


def _run(source: ModelSource) -> Mapping[str, Any]:
    """What a checkpoint says of the run that saved it."""
    return source.manifest.run if isinstance(source, CheckpointSource) else {}
