"""What a checkpoint of a training run holds, and how a run goes on from one."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megabit.checkpoint import Checkpoint, CheckpointStore
from megabit.errors import UserError
from megabit.training.step import TrainingState


def save(state: TrainingState, store: CheckpointStore, step: int, corpus_fingerprint: str) -> None:
    """Write this rank's master weights and moments after ``step`` steps; collective over the mesh.

    Codes and scales are derived from the weights, and the data order from the step: neither is
    saved.
    """
    about = {
        "config": config_identity(state),
        "corpus": corpus_fingerprint,
        "updates": state.optimizer.updates,
    }
    store.save(step, dict(_tensors(state)), about)


@torch.no_grad()
def restore(
    state: TrainingState, store: CheckpointStore, checkpoint: Checkpoint, corpus_fingerprint: str
) -> int:
    """Load ``checkpoint`` into ``state``; returns the number of steps done.

    Raises:
        UserError: it belongs to another model, batch size, corpus or layout.
    """
    store.check_layout(checkpoint)
    about = checkpoint.about
    saved, own = about.get("config"), config_identity(state)
    if not isinstance(saved, dict):
        raise UserError(f"{checkpoint.path}: is damaged (no config)")
    problems = [
        f"{key}: the run in {checkpoint.path} has {saved.get(key)!r}, not {value!r}; "
        "resume with the same, or use another run.dir"
        for key, value in own.items()
        if saved.get(key) != value
    ]
    if about.get("corpus") != corpus_fingerprint:
        problems.append(
            f"data.dir: {state.config.data.dir} is not the corpus that {checkpoint.path} was "
            "trained on; prepare that one again, or use another run.dir"
        )
    if problems:
        raise UserError(*problems)
    updates = about.get("updates")
    if not isinstance(updates, int) or not 0 <= updates <= checkpoint.step:
        raise UserError(f"{checkpoint.path}: is damaged (it says {updates!r} updates)")
    tensors = store.load(checkpoint)
    state.optimizer.begin_restore(updates)
    _fill(state, tensors, checkpoint)
    state.optimizer.publish()
    return checkpoint.step


def layers_per_stage(checkpoint: Checkpoint) -> list[int]:
    """Of the run that wrote ``checkpoint``; ``restore`` finds out whether they can be right."""
    config = checkpoint.about.get("config")
    counts = config.get("parallel.layers_per_stage") if isinstance(config, dict) else None
    if not isinstance(counts, list) or not all(isinstance(count, int) for count in counts):
        raise UserError(f"{checkpoint.path}: is damaged (no layers_per_stage)")
    return counts


def config_identity(state: TrainingState) -> dict[str, Any]:
    """The settings that may not change within a run: what the weights and the data order mean.

    Others may: a run goes on with another learning rate or number of steps if told so.
    """
    config = state.config
    model = {f"model.{key}": value for key, value in vars(config.model).items()}
    return {
        **model,
        "parallel.layers_per_stage": state.plan.layers_per_stage,
        "parallel.schedule, stages of each rank": [
            list(stages) for stages in state.plan.schedule.placement.stages
        ],
        "precision.compute": config.precision.compute,
        "optim.zero_stage": "1 or 2" if state.optimizer.is_sharded else "0, or DP 1",
        "data.seq_length": config.data.seq_length,
        "parallel.exact": config.parallel.exact,
        "train.global_batch_size": config.train.global_batch_size,
        "train.seed": config.train.seed,
    }


def _fill(state: TrainingState, tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    for name, target in _tensors(state):
        source = tensors.pop(name, None)
        if source is None or source.shape != target.shape or source.dtype != target.dtype:
            found = "missing" if source is None else f"{source.dtype} {tuple(source.shape)}"
            raise UserError(
                f"{checkpoint.path}: {name} is {found}, "
                f"this run needs {target.dtype} {tuple(target.shape)}"
            )
        target.copy_(source)
    if tensors:
        raise UserError(f"{checkpoint.path}: holds unknown tensors: {', '.join(sorted(tensors))}")


def _tensors(state: TrainingState) -> Iterator[tuple[str, Tensor]]:
    """By ``kind/logical name/first local row``."""
    for piece in state.optimizer.pieces():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            if kind in piece.tensors:
                yield f"{kind}/{piece.name}/{piece.rows.start}", piece.tensors[kind]
