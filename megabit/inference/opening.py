"""A model on disk, opened at the layout that it is served at."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megabit.checkpoint import on_all_ranks, verified
from megabit.checkpoint.model_source import CheckpointSource
from megabit.checkpoint.source import ModelSource
from megabit.config import Config, ServingConfig
from megabit.inference.fit import fitting_config
from megabit.inference.rebalance import estimate_step_costs
from megabit.interop.huggingface import HuggingFaceSource
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages
from megabit.model.decoder import layer_context
from megabit.model.huggingface_linear import form_of
from megabit.model.load import load_stages
from megabit.pipeline.balance import PartCost, PartCosts
from megabit.pipeline.plan import StagePlan, plan_stages
from megabit.tensor_parallel.lossy_sums import LossySums

USUAL_ROWS = 16
"""Tokens of a forward pass that layers are laid out for, each of which is answered."""


def open_stages(
    source: ModelSource, serving: ServingConfig, mesh: ParallelMesh
) -> tuple[CausalLMStages, StagePlan]:
    """This rank's stages, filled, after a look at all of the model's bytes; collective over the
    mesh. Each rank keeps its own part only.

    Raises:
        UserError: it is not what was saved, or does not fit the settings.
    """
    config = on_all_ranks(
        lambda: fitting_config(
            source.path, source.model, source.max_length, serving, _compute(source, serving)
        ),
        mesh,
    )
    plan = plan_stages(config, mesh.dp.size)
    if serving.parallel.layers_per_stage is None:
        plan = plan.balanced_by(serving_costs(config))
    check_bytes(source, mesh)
    context = layer_context(config, mesh)
    engine = serving.engine
    if engine.arithmetic == "hf":
        form = on_all_ranks(lambda: form_of(source), mesh)
        context = dataclasses.replace(context, huggingface=form)
    if serving.parallel.row_reduce == "int8":
        lossy = LossySums(engine.int8_min_kib * 1024, engine.int8_max_crest)
        context = dataclasses.replace(context, row_reduce="int8", lossy_sums=lossy)
    stages = CausalLMStages(
        source.model, plan.of_rank(mesh.pp.rank), config.data.seq_length, context
    ).eval()
    on_all_ranks(lambda: load_stages(stages, source), mesh)
    return stages, plan


def serving_costs(config: Config) -> PartCosts:
    """What layers are laid on stages by: not what a step of training costs, where the head counts
    for more."""
    size = getattr(torch, config.precision.compute).itemsize
    costs = estimate_step_costs(config.model, USUAL_ROWS, USUAL_ROWS, size)
    return PartCosts(PartCost(forward=costs.layer), PartCost(), PartCost(forward=costs.head))


def check_bytes(source: ModelSource, mesh: ParallelMesh) -> None:
    """Look at all bytes of a model, each file once; collective over the mesh.

    Raises:
        UserError: they are not what was saved.
    """
    if isinstance(source, CheckpointSource):
        verified(source.path, mesh)
    elif isinstance(source, HuggingFaceSource):
        on_all_ranks(lambda: source.verify() if mesh.is_main else None, mesh)


def _compute(source: ModelSource, serving: ServingConfig) -> Any:
    """Name of the dtype of activations."""
    if serving.engine.compute != "auto":
        return serving.engine.compute
    if isinstance(source, HuggingFaceSource):
        return "bfloat16" if source.dtype == torch.bfloat16 else "float32"
    if isinstance(source, CheckpointSource):
        config = source.manifest.run.get("config")
        if isinstance(config, Mapping):
            return config["precision"]["compute"]
    return "float32"
