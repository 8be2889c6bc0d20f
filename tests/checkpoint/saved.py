"""Checkpoints that training wrote, at any layout, for what reads them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megabit.checkpoint import CheckpointStore
from megabit.config import Config
from megabit.launch import run_ranks
from megabit.training.more_state import training_parts
from megabit.training.resume import manifest_of
from megabit.training.snapshot import ternary_parts
from megabit.training.step import TrainingState, train_step
from tests.training.tiny import make_mesh, own_batch, tiny, tiny_corpus


def trained(config: Config, steps: int) -> TrainingState:
    """On the calling rank, after so many steps."""
    state = TrainingState.create(config, make_mesh(config))
    for step in range(steps):
        train_step(state, own_batch(config, state.mesh, step), step)
    return state


def save(
    state: TrainingState, run: Path, step: int, assets: Mapping[str, Path] | None = None
) -> None:
    """Both kinds of checkpoint, where a run has them; collective."""
    manifest = manifest_of(state, step, "no corpus")
    for folder, kind, parts in (
        ("checkpoints", manifest, training_parts(state)),
        ("snapshots", replace(manifest, kind="ternary"), ternary_parts(state)),
    ):
        store = CheckpointStore(run / folder, state.mesh)
        store.save(kind, parts, assets or {})
        saved = store.finish()
        store.close()
        assert saved is not None
        assert saved.problem is None, saved.problem


def save_run(folder: Path) -> Path:
    """Steps 1 and 2 of a run at TP 2 with both kinds of checkpoint, and a tokenizer in them."""
    run = folder / "run"
    assets = {"tokenizer.json": tiny_corpus(folder).tokenizer_path}

    def write() -> None:
        for step in (1, 2):
            save(trained(tiny("parallel.tp=2"), step), run, step, assets)

    run_ranks(write, 2)
    return run
