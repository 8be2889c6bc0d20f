"""What a checkpoint of a training run holds, and how a run goes on from one."""

from typing import Any

import torch
from torch import Tensor

from megabit.checkpoint import Checkpoint, CheckpointStore
from megabit.errors import UserError
from megabit.pipeline.layout import stage_layouts
from megabit.training.step import TrainingState


def save(state: TrainingState, store: CheckpointStore, step: int, corpus_fingerprint: str) -> None:
    """Write weights, moments and position after ``step`` steps; collective over the mesh.

    Codes and scales are derived from the weights, and the data order from the step: neither is
    saved.
    """
    about = {"config": config_identity(state), "corpus": corpus_fingerprint}
    group_steps = [group["step"] for group in state.optimizer.param_groups if "step" in group]
    store.save(step, dict(_tensors(state)), {**about, "optimizer_group_steps": group_steps})


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
    _fill(state, store.load(checkpoint), checkpoint)
    groups = [group for group in state.optimizer.param_groups if "step" in group]
    for group, step in zip(groups, about.get("optimizer_group_steps", []), strict=False):
        group["step"] = step
    state.stage.ternarize()
    return checkpoint.step


def config_identity(state: TrainingState) -> dict[str, Any]:
    """The settings that may not change within a run: what the weights and the data order mean.

    Others may: a run goes on with another learning rate or number of steps if told so.
    """
    config = state.config
    stages = stage_layouts(
        config.model.num_hidden_layers, config.parallel.pp, config.parallel.layers_per_stage
    )
    model = {f"model.{key}": value for key, value in vars(config.model).items()}
    return {
        **model,
        "parallel.layers_per_stage": [len(stage.layers) for stage in stages],
        "precision.compute": config.precision.compute,
        "data.seq_length": config.data.seq_length,
        "train.global_batch_size": config.train.global_batch_size,
        "train.seed": config.train.seed,
    }


def _fill(state: TrainingState, tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    for name, parameter in state.parameters.items():
        _copy(parameter, tensors.pop(f"weight/{name}", None), f"weight/{name}", checkpoint)
        prefix, suffix = "optimizer/", f"/{name}"
        keys = [key for key in tensors if key.startswith(prefix) and key.endswith(suffix)]
        state.optimizer.state[parameter] = {
            key[len(prefix) : -len(suffix)]: tensors.pop(key) for key in keys
        }
    if tensors:
        raise UserError(f"{checkpoint.path}: holds unknown tensors: {', '.join(sorted(tensors))}")


def _copy(target: Tensor, source: Tensor | None, name: str, checkpoint: Checkpoint) -> None:
    if source is None or source.shape != target.shape or source.dtype != target.dtype:
        found = "missing" if source is None else f"{source.dtype} {tuple(source.shape)}"
        raise UserError(
            f"{checkpoint.path}: {name} is {found}, "
            f"this run needs {target.dtype} {tuple(target.shape)}"
        )
    target.copy_(source)


def _tensors(state: TrainingState) -> list[tuple[str, Tensor]]:
    tensors: list[tuple[str, Tensor]] = []
    for name, parameter in state.parameters.items():
        tensors.append((f"weight/{name}", parameter))
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors.append((f"optimizer/{key}/{name}", value))
    return tensors
