"""From a model on disk to an engine that is ready, on each of its ranks."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from megabit.checkpoint import on_all_ranks
from megabit.checkpoint.source import ModelSource
from megabit.config import ServingConfig
from megabit.data.corpus import TOKENIZER
from megabit.data.tokenizer import num_ids, read_tokenizer
from megabit.errors import UserError
from megabit.inference.accuracy_guard import AccuracyGuard, cut_windows
from megabit.inference.core import CoreSettings, EngineCore
from megabit.inference.opening import open_stages
from megabit.inference.session import EngineSession
from megabit.interop.opening import open_source
from megabit.mesh import ParallelMesh

GUARD_WINDOWS = 16
GUARD_TOKENS = 256
"""Of a window, at most."""


@dataclass(frozen=True)
class Started:
    """One rank's part of an engine."""

    core: EngineCore
    source: ModelSource
    layers_per_stage: tuple[int, ...]
    guard: AccuracyGuard | None

    @property
    def description(self) -> str:
        """For people."""
        model, mesh, core = self.source.model, self.core.mesh, self.core
        dtype = str(core.runner.stages.hidden_dtype).removeprefix("torch.")
        return (
            f"{model.num_hidden_layers} layers of {model.hidden_size}, {model.linear}, {dtype}; "
            f"tp={mesh.tp.size} pp={mesh.pp.size}, layers {list(self.layers_per_stage)}; "
            f"{core.num_blocks} blocks of {core.settings.block_size} tokens"
        )

    def session(self) -> EngineSession:
        """For the rank that schedules."""
        return EngineSession(self.core, self.source.model, self.layers_per_stage, self.guard)


def start_core(checkpoint: Path, serving: ServingConfig, mesh: ParallelMesh) -> Started:
    """Load the model at the layout of ``mesh``; collective over it.

    Raises:
        UserError: on all ranks, if the model or the settings are wrong on any.
    """
    source = on_all_ranks(lambda: open_source(checkpoint), mesh)
    stages, plan = open_stages(source, serving, mesh)
    engine = serving.engine
    tokenizer = on_all_ranks(lambda: _tokenizer(source), mesh)
    max_model_len = engine.max_model_len or source.max_length
    guard = on_all_ranks(lambda: _guard(serving, source, tokenizer, max_model_len), mesh)
    settings = CoreSettings(
        max_model_len,
        engine.max_sequences,
        engine.max_batched_tokens,
        engine.block_size,
        kv_cache_mb=engine.kv_cache_mb,
        kv_dtype=None if engine.kv_dtype == "auto" else getattr(torch, engine.kv_dtype),
        prefix_cache=engine.prefix_cache,
        num_ids=None if tokenizer is None else min(num_ids(tokenizer), source.model.vocab_size),
    )
    core = EngineCore(stages, mesh, settings)
    return Started(core, source, tuple(plan.layers_per_stage), guard)


def _tokenizer(source: ModelSource) -> Tokenizer | None:
    path = source.assets.get(TOKENIZER)
    return None if path is None else read_tokenizer(path)


def _guard(
    serving: ServingConfig, source: ModelSource, tokenizer: Tokenizer | None, max_model_len: int
) -> AccuracyGuard | None:
    """What watches rounded sums, if that is wanted."""
    engine = serving.engine
    if engine.accuracy_guard is None:
        return None
    path = Path(engine.accuracy_guard)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"engine.accuracy_guard: cannot read {path} ({error})") from None
    if tokenizer is None:
        raise UserError(f"engine.accuracy_guard: {source.path} has no {TOKENIZER}")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    windows = cut_windows(ids, min(GUARD_TOKENS, max_model_len - 1), GUARD_WINDOWS)
    if not windows:
        raise UserError(f"engine.accuracy_guard: {path} has fewer than two tokens")
    return AccuracyGuard(windows, engine.accuracy_interval_s, engine.accuracy_limit)
