"""What the formulas say that autograd keeps, against the storages that it has: to the byte."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megabit.config import Config
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.plan.activations import (
    embedding_activations,
    head_activations,
    layer_activations,
)
from megabit.plan.sizes import Sizes
from megabit.tensor_parallel import (
    ForwardPass,
    Noise,
    Quantization,
    TernaryLayer,
    WeightGradientQueue,
)
from tests.training.tiny import shape_of, tiny

CPU = torch.device("cpu")
SIZES = (
    *("model.hidden_size=32", "model.intermediate_size=52", "model.vocab_size=301"),
    *("data.seq_length=8", "train.micro_batch_size=2", "train.global_batch_size=8"),
)
OPTIONS = (
    (),
    ("precision.compute=bfloat16",),
    ("precision.compute=float64",),
    ("precision.compute=bfloat16", "precision.ternary_backward=int8"),
    ("model.norm_placement=prenorm",),
    ("model.norm_placement=in_linear", "model.hadamard=true"),
    ("model.norm_placement=per_proj", "precision.compute=bfloat16"),
    ("model.norm_placement=prenorm", "model.hadamard=true"),
    ("model.activations=full",),
    ("model.activations=full", "model.norm_placement=prenorm"),
    ("model.activations=a4.8",),
    ("model.activations=a4.8", "model.norm_placement=prenorm"),
    ("model.linear=dense", "precision.compute=bfloat16"),
    ("model.linear=dense", "model.norm_placement=prenorm"),
    ("model.hidden_act=silu",),
    ("model.num_key_value_heads=4",),
    ("train.hidden_dropout=0.1",),
    ("train.quantization_ramp=0.5",),
    ("train.quantization_ramp=0.5", "model.norm_placement=prenorm"),
    ("parallel.exact=full", "model.tie_word_embeddings=false"),
)
RECOMPUTED = ("none", "selective", "full")


def kept_by(
    compute: Callable[[], Tensor], parameters: list[Tensor], known: list[Tensor]
) -> tuple[int, Tensor]:
    """Bytes of the storages that autograd keeps for ``compute``, without weights and what is
    known, and its result."""
    skipped = {x.untyped_storage().data_ptr() for x in (*parameters, *known) if not x.is_meta}
    found: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if not x.is_meta and x.untyped_storage().data_ptr() not in skipped:
            found[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        y = compute()
    return sum(x.untyped_storage().nbytes() for x in found.values()), y


def measure(config: Config, mesh: ParallelMesh) -> list[tuple[int, int]]:
    """(measured, predicted) of the embedding, a layer and the head."""
    is_ramp = config.train.quantization_ramp > 0
    sizes = Sizes(shape_of(config, mesh.world.size, mesh.world.rank), is_ramp)
    stages = build_stages(config, mesh)
    stages.ternarize()
    for name, parameter in stages.named_parameters():
        if parameter.dim() > 1 and not isinstance(
            stages.get_submodule(name.rpartition(".")[0]), TernaryLayer
        ):
            parameter.data = parameter.data.to(stages.context.compute_dtype)
    parameters: list[Tensor] = [*stages.parameters()]
    forward_pass = ForwardPass(
        Noise(1, 0, 0),
        weight_gradients=WeightGradientQueue(),
        quantization=Quantization(0.5 if is_ramp else 1.0),
    )
    batch, length = config.train.micro_batch_size, config.data.seq_length
    tokens = torch.randint(config.model.vocab_size, (batch, length))
    rope = stages.model.rope.tables(length, stages.context.compute_dtype)
    embed = stages.model.embed_tokens
    embedded, x = kept_by(lambda: embed(tokens.flatten(), forward_pass), parameters, [])
    x = x.detach().requires_grad_()
    layer = stages.model.layers["0"]
    held, y = kept_by(lambda: layer(x, rope, batch, forward_pass), parameters, [*rope])
    y = y.detach().requires_grad_()
    mask = torch.ones_like(tokens, dtype=torch.bool)
    headed, _ = kept_by(lambda: stages.loss(y, tokens, mask, forward_pass), parameters, [mask])
    predicted = embedding_activations(sizes), layer_activations(sizes, 0), head_activations(sizes)
    return [*zip((embedded, held, headed), (p.kept for p in predicted), strict=True)]


def settings_of(tp: int) -> list[tuple[str, ...]]:
    """Every option with every kind of recomputation; at TP 2 under sequence parallelism."""
    is_split = "true" if tp == 2 else "false"
    return [
        (*chosen, f"train.recompute={again}", f"parallel.sequence_parallel={is_split}")
        for chosen in OPTIONS
        for again in RECOMPUTED
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_autograd_keeps_is_what_the_formulas_say(tp: int) -> None:
    settings = settings_of(tp)
    configs = [tiny(*SIZES, f"parallel.tp={tp}", *chosen) for chosen in settings]

    def run() -> list[list[tuple[int, int]]]:
        mesh = ParallelMesh.create(tp, 1, CPU)
        return [measure(config, mesh) for config in configs]

    for rank, found in enumerate(run_ranks(run, tp)):
        for chosen, pairs in zip(settings, found, strict=True):
            for part, (measured, predicted) in zip(
                ("embedding", "layer", "head"), pairs, strict=True
            ):
                assert predicted == measured, (part, chosen, rank)
