"""What the embedding, a layer and the head take on this machine, to balance stages by.

The parts are made three stages of one rank, and a few microbatches of random tokens run through
them by the executor itself, each with its F, B and W apart. All ranks measure at once, as they will
compute; tensor-parallel groups communicate as in training.
"""

import dataclasses
from collections import defaultdict
from statistics import median, mode

import torch

from megabit.config import Config
from megabit.mesh import Axis, ParallelMesh
from megabit.model.decoder import CausalLMStages, LayerTraining, layer_context
from megabit.model.initialize import initialize
from megabit.pipeline.actions import (
    Compute,
    Forward,
    InputGradient,
    Schedule,
    WeightGradient,
)
from megabit.pipeline.balance import PartCost, PartCosts
from megabit.pipeline.execute import run_schedule
from megabit.pipeline.layout import StageLayout
from megabit.pipeline.placement import Placement
from megabit.reduce import all_reduce
from megabit.tensor_parallel import ForwardPass, Noise, TernaryLayer

PARTS = (
    StageLayout(range(0), embedding=True, head=False),
    StageLayout(range(1), embedding=False, head=False),
    StageLayout(range(1, 1), embedding=False, head=True),
)
WARMUP, MICROBATCHES = 2, 7


def with_layers(config: Config, layers_per_stage: list[int]) -> Config:
    """``config`` with the layout that was measured, or that a run had which goes on."""
    parallel = dataclasses.replace(
        config.parallel, layers_per_stage=layers_per_stage, balance="estimated"
    )
    return dataclasses.replace(config, parallel=parallel)


def measure_part_costs(config: Config, mesh: ParallelMesh) -> PartCosts:
    """Seconds for a microbatch, means over all ranks of each one's medians; collective over the
    world."""
    stages = _build_parts(config, mesh)
    shape = (config.train.micro_batch_size, config.data.seq_length)
    generator = torch.Generator().manual_seed(config.train.seed)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator).to(mesh.device)
    count = WARMUP + MICROBATCHES

    def loss(hidden: torch.Tensor, microbatch: int, forward_pass: ForwardPass) -> torch.Tensor:
        return stages.loss(hidden, tokens, torch.ones_like(tokens, dtype=torch.bool), forward_pass)

    result = run_schedule(
        _one_by_one(count),
        stages,
        [tokens] * count,
        loss,
        Axis.single("pp"),
        noises=[Noise(config.train.seed, 0, i) for i in range(count)],
        output_gradient=torch.tensor(
            1 / tokens.numel(), dtype=stages.context.master_dtype, device=mesh.device
        ),
    )
    seconds: defaultdict[tuple[int, type[Compute]], list[float]] = defaultdict(list)
    for span in result.spans:
        if span.compute.microbatch >= WARMUP:
            seconds[span.compute.chunk, type(span.compute)].append(span.duration)
    own = [
        [median(seconds[chunk, kind]) for kind in (Forward, InputGradient, WeightGradient)]
        for chunk in range(len(PARTS))
    ]
    total = all_reduce(torch.tensor(own, dtype=torch.float64, device=mesh.device), mesh.world)
    embedding, layer, head = (PartCost(*row) for row in (total / mesh.world.size).tolist())
    return PartCosts(layer, embedding, head, "measurement")


def _build_parts(config: Config, mesh: ParallelMesh) -> CausalLMStages:
    """The parts as they are in training."""
    training = LayerTraining.of(config)
    # Layers are taken to be alike: what most of them recompute.
    recompute = mode(map(training.recompute_of, range(config.model.num_hidden_layers)))
    stages = CausalLMStages(
        config.model,
        PARTS,
        config.data.seq_length,
        layer_context(config, mesh),
        dataclasses.replace(training, recompute=recompute, recompute_layers=None),
    )
    initialize(stages, config.train.seed, config.model.initializer_range)
    ternary = {
        f"{name}.weight"
        for name, module in stages.named_modules()
        if isinstance(module, TernaryLayer)
    }
    for name, parameter in stages.named_parameters():
        if parameter.dim() > 1 and name not in ternary:  # as ``ZeroOptimizer`` leaves them
            parameter.data = parameter.data.to(stages.context.compute_dtype)
    if stages.head_use is not None and stages.embedding_weight is not None:
        stages.head_use.data = stages.embedding_weight.data
    return stages


def _one_by_one(microbatches: int) -> Schedule:
    """One rank, three stages, nothing at a time but one part of one microbatch."""
    computes: list[Compute] = []
    for i in range(microbatches):
        chunks = range(len(PARTS))
        computes += [Forward(i, chunk) for chunk in chunks]
        for chunk in reversed(chunks):
            computes += [InputGradient(i, chunk), WeightGradient(i, chunk)]
    return Schedule(Placement.loop(1, len(PARTS)), microbatches, [computes])
