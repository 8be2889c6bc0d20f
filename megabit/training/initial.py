"""Begin a run with the weights of another model (``run.init_from``), at any layout.

Each rank reads its own slices only, from a checkpoint of megabit's or from files of Hugging Face's.
Moments begin at zero and steps at the first: only the weights are taken over.

A model without norms before o_proj and down_proj (``prenorm``: LLaMA's architecture) may become one
that has them, as conversion to ternary wants it (BitDistill, arXiv 2510.13998): inserted norms
begin with gains of 1. ``in_linear`` has no gains; there those of the norms between layers go into
the columns of the matrices behind them, which is the same function. An inserted norm is not: train
the model before use.
"""

from pathlib import Path

import torch
from torch import Tensor

from megabit.checkpoint import on_all_ranks, verified
from megabit.checkpoint.model_source import CheckpointSource
from megabit.checkpoint.source import Index, ModelSource, logical_tensors
from megabit.config import Config, ModelConfig
from megabit.errors import UserError
from megabit.interop.opening import open_source
from megabit.mesh import ParallelMesh
from megabit.training.step import TrainingState
from megabit_kernels import numerics

FREE = ("initializer_range", "linear", "weight_scale", "scale_mult", "activations", "hadamard")
"""What may differ: dense weights may become ternary ones, that is how a model is converted, and how
weights and activations are quantized is not in the weights."""

FOLDED = {
    **{f"self_attn.{part}_proj.weight": "input_layernorm.weight" for part in "qkv"},
    **{f"mlp.{part}_proj.weight": "post_attention_layernorm.weight" for part in ("gate", "up")},
}
"""The matrices behind the norms between layers."""


def open_initial(config: Config, mesh: ParallelMesh) -> ModelSource | None:
    """The model that ``run.init_from`` names, if it can be trained on; collective.

    Raises:
        UserError: it cannot be read, has no master weights, or is another model than configured.
    """
    if config.run.init_from is None:
        return None
    path = Path(config.run.init_from)

    def open_and_check() -> ModelSource:
        source = open_source(path, to_train=True)
        check_initial(source, config.model)
        return source

    source = on_all_ranks(open_and_check, mesh)
    if isinstance(source, CheckpointSource):
        verified(source.path, mesh)
    return source


def check_initial(source: ModelSource, model: ModelConfig) -> None:
    """Refuse a model that a run of ``model`` cannot begin with."""
    if not source.has_masters:
        raise UserError(
            f"run.init_from: {source.path} holds codes and scales only, and no optimizer can go on "
            "from these; use a training checkpoint, or a Hugging Face model with bf16 weights"
        )
    problems = [
        f"model.{key}: the model in {source.path} has {theirs!r}, not {own!r}; use the same, "
        "or another run.init_from"
        for key, own in vars(model).items()
        if key not in FREE
        and (theirs := getattr(source.model, key)) != own
        and not (key == "norm_placement" and theirs == "prenorm")
    ]
    if problems:
        raise UserError(*problems)


@torch.no_grad()
def begin_with(state: TrainingState, source: ModelSource) -> None:
    """Give the masters the values of ``source``; collective over the mesh.

    Raises:
        UserError: a value is not finite, or a ternary weight is all zeros.
    """

    def read() -> None:
        for piece in state.optimizer.pieces():
            values = initial_values(source, state.config.model, piece.name, piece.index)
            if not values.isfinite().all():
                raise UserError(f"{source.path}: {piece.name} holds a value that is not finite")
            piece.tensors["master"].copy_(values)

    smallest = numerics.MIN_SCALE * state.config.model.scale_mult

    def check_scales() -> None:
        for name, scale in state.optimizer.publisher.scales.items():
            if scale <= smallest:  # as uploads have had (BitNet #608)
                raise UserError(
                    f"{source.path}: {name} is zero, or next to it, all of it "
                    f"(mean magnitude {numerics.MIN_SCALE:g} at most)"
                )

    on_all_ranks(read, state.mesh)
    state.optimizer.publish(state.quantization_of(0).share)
    on_all_ranks(check_scales, state.mesh)


def initial_values(source: ModelSource, model: ModelConfig, name: str, index: Index) -> Tensor:
    """Part of a tensor of ``model``, of which ``source`` may have no such norm."""
    if name not in logical_tensors(source.model):
        return torch.ones([part.stop - part.start for part in index])
    values = source.values(name, index)
    is_folded = model.norm_placement == "in_linear" != source.model.norm_placement
    *layer, part = name.split(".", 3)
    if not is_folded or part not in FOLDED:
        return values
    gain = source.values(".".join([*layer, FOLDED[part]]), index[1:])
    wide = numerics.stats_dtype(values.dtype)
    return values.to(wide) * gain.to(wide)
