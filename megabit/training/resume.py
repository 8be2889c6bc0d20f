"""What a checkpoint of a training run holds, and how a run goes on from one, at any layout.

Saved are master weights and moments, as parts of logical tensors, the step, and the settings. Codes
and scales are derived from the masters when a run goes on; the learning rate follows from the step,
the data's order from the seed and the samples consumed, and dropout and stochastic rounding from
the seed and the step: there is no generator whose state would have to be kept. The few numbers that
are kept beside the weights are in ``progress``.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch

from megabit.checkpoint import Checkpoint, Manifest, on_all_ranks
from megabit.checkpoint.manifest import QUANTIZATION_SHARE
from megabit.config import Config, leaves
from megabit.data.step_plan import SampleWindows, StepPlan
from megabit.errors import UserError
from megabit.retry import Retry
from megabit.training.more_state import (
    more_of_manifest,
    restore_tensors,
    saved_island,
)
from megabit.training.schedule import quantization_share
from megabit.training.step import TrainingState


def manifest_of(state: TrainingState, step: int, corpus_fingerprint: str) -> Manifest:
    """Of a training checkpoint after ``step`` steps; collective."""
    config, mesh, model = state.config, state.mesh, state.config.model
    if state.progress.full_precision_activations:  # what the model is from now on
        model = dataclasses.replace(model, activations="full")
    return Manifest(
        kind="training",
        step=step,
        updates=state.optimizer.updates,
        model=model,
        max_length=config.data.seq_length,
        run={
            "config": dataclasses.asdict(config),
            "corpus": corpus_fingerprint,
            "consumed_samples": state.steps.samples_before(step),
            QUANTIZATION_SHARE: state.quantization_of(step).share,
            "state": state.progress.state(),
            "measures": state.progress.measures(),
            "layout": {"tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size},
            **more_of_manifest(state),
        },
    )


def check_resumable(config: Config, checkpoint: Checkpoint, corpus_fingerprint: str) -> None:
    """Refuse a checkpoint that belongs to another run.

    Raises:
        UserError: it has another model, batch size, corpus or seed, or is further than this run
            is to go, each on a line of its own.
    """
    path, manifest = checkpoint.path, checkpoint.manifest
    if manifest.kind != "training":
        raise UserError(
            f"{path}: holds codes and scales only, which cannot resume a run; "
            "use a training checkpoint"
        )
    # What an older release did not know of was as it is by default.
    saved = dict(leaves(dataclasses.asdict(Config()))) | dict(leaves(manifest.run.get("config")))
    own = dict(leaves(dataclasses.asdict(config)))
    problems = [
        f"{key}: the run in {path} has {saved.get(key)!r}, not {own[key]!r}; "
        "resume with the same, or use another run.dir"
        for key in own
        if _is_identity(key) and saved.get(key) != own[key]
    ]
    if manifest.run.get("corpus") != corpus_fingerprint:
        problems.append(
            f"data.dir: {config.data.dir} is not the corpus that {path} was trained on; "
            "prepare that one again, or use another run.dir"
        )
    problems += _skips(config, checkpoint)
    consumed, steps = manifest.run.get("consumed_samples"), StepPlan.of(config)
    saved_share = manifest.run.get(QUANTIZATION_SHARE, 1.0)
    share = quantization_share(
        config.train.quantization_ramp, steps.tokens_before(manifest.step), steps.total_tokens
    )
    if share < saved_share:
        problems.append(
            f"train.quantization_ramp: λ was {saved_share:.2f} after step {manifest.step} in "
            f"{path} and would be {share:.2f}: a model does not become less ternary. In a longer "
            "run, a smaller share is the same ramp"
        )
    if not problems and consumed != steps.samples_before(manifest.step):
        problems.append(
            f"{path}: has consumed {consumed} samples, which is not step {manifest.step} of a run"
        )
    if manifest.step > steps.steps:
        key = "train.steps" if config.train.tokens is None else "train.tokens"
        problems.append(
            f"{key}: {steps.steps} steps are fewer than the {manifest.step} that the "
            f"run in {path} has done; use at least as many, or another run.dir"
        )
    if problems:
        raise UserError(*problems)


def _skips(config: Config, checkpoint: Checkpoint) -> Iterator[str]:
    """What is wrong with ``data.skip_samples``: the past cannot change, but more may be left out of
    what is still to come."""
    run = checkpoint.manifest.run
    own = SampleWindows.of(config.data.skip_samples)
    configured = SampleWindows.of(dict(leaves(run.get("config"))).get("data.skip_samples", []))
    saved = SampleWindows.of(run.get("measures", {}).get("left_out", []))
    cursor = saved.sample(int(run.get("consumed_samples", 0)))
    past = [window.before(cursor) for window in (saved, saved.adding(own.windows))]
    if past[0] != past[1] or own.adding(configured.windows) != own:
        yield (
            f"data.skip_samples: {config.data.skip_samples} would change what the run in "
            f"{checkpoint.path} has seen; keep what it had, and add samples from {cursor} on"
        )


@torch.no_grad()
def restore(state: TrainingState, checkpoint: Checkpoint, retry: Retry | None = None) -> int:
    """Load a checkpoint that was verified; returns the number of steps done. Collective.

    Each rank reads its own slices, whatever the layout that wrote them. What belongs to the weights
    in ``state.progress`` goes with them; the measures of the guard do not.

    Args:
        retry: how reads are tried again.
    """
    optimizer, retry = state.optimizer, retry or Retry()
    island, own = saved_island(state, checkpoint)
    optimizer.begin_restore(own["updates"])
    read = partial(restore_tensors, state, checkpoint, island)
    on_all_ranks(lambda: retry(read, f"reading {checkpoint.path}"), state.mesh)
    step = checkpoint.manifest.step
    state.progress.restore_state(own["state"])
    optimizer.publish(state.quantization_of(step).share)
    if state.outer is not None:
        state.outer.resume(own.get("outer", {}))
    return step


def _is_identity(key: str) -> bool:
    """Whether a setting may not change within a run: what the weights and the data order mean.

    Others may: a run goes on at another layout, or with another learning rate if told so.
    """
    return key.startswith("model.") or key in (
        "precision.compute",
        "data.seq_length",
        "parallel.exact",
        "train.global_batch_size",
        "train.batch_ramp_start",
        "train.batch_ramp_increment",
        "train.batch_ramp_tokens",
        "train.seed",
        "optim.name",
        "loss.objective",
    )
