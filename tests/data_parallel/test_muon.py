"""Muon on masters in parts: against the singular values themselves, against torch's, and at every
layout against one process.

Matrices are cut as a model's are: by rows in blocks of unequal width, by columns, with KV heads
that several ranks hold, whole on every rank, and with fewer rows than there are DP ranks.
"""

import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabit.config import Config, load_config
from megabit.data_parallel import ZeroOptimizer
from megabit.data_parallel.muon import COEFFICIENTS, orthogonalized
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model.kv_heads import HeadSplit, kv_rows
from megabit.tensor_parallel import BlockPartition, Shard, ShardedParameter, Span, whole
from tests.training.tiny import Owned, logical

HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, STEPS = 4, 2, 4, 52, 30, 3
HIDDEN = HEADS * HEAD_DIM
LAYER = {
    "q": (HIDDEN, HIDDEN),
    "k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "up": (FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "few": (3, HIDDEN),
    "gain": (HIDDEN,),
}
SHAPES = {
    "model.embedding": (VOCAB, HIDDEN),
    **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
    "head": (VOCAB, HIDDEN),
}
MATRICES = [name for name, shape in SHAPES.items() if ".layers." in name and len(shape) == 2]
SHARES = {1: (1.0,), 2: (0.5, 0.5), 4: (0.5, 0.25, 0.125, 0.125)}
"""What a DP rank has of a gradient: powers of two, so that the sum has the bits of the whole."""
SCALE = 0.75


def span_of(name: str, tp_rank: int, tp: int) -> tuple[int, Span]:
    """The dimension that is cut, and the part of a rank."""
    heads, ffn = BlockPartition(HIDDEN, HEADS), BlockPartition(FFN, HEADS)
    match name.split(".")[-1]:
        case "q":
            return 0, heads.span(tp_rank, tp)
        case "k":
            return 0, kv_rows(HeadSplit(HEADS, KV_HEADS, tp_rank, tp), HEAD_DIM)
        case "o":
            return 1, heads.span(tp_rank, tp)
        case "up":
            return 0, ffn.span(tp_rank, tp)
        case "down":
            return 1, ffn.span(tp_rank, tp)
        case _:
            return 0, whole(SHAPES[name][0], owned=tp_rank == 0)


def drawn(name: str, seed: int, dtype: torch.dtype) -> Tensor:
    """A logical tensor; matrices have singular values of very different size."""
    generator = torch.Generator().manual_seed(1000 * seed + [*SHAPES].index(name))
    x = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
    if x.dim() == 2:
        x *= torch.logspace(0, -2, x.shape[1], dtype=torch.float64)
    return x.to(dtype)


def hyperparameters(step: int) -> tuple[float, float]:
    return 0.02 / (step + 1), 0.1 if step < 2 else 0.0


class Model(nn.Module):
    """Parameters without layers around them."""

    def __init__(self, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        super().__init__()
        for name in SHAPES:
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            dim, span = span_of(name, mesh.tp.rank, mesh.tp.size)
            own = local(drawn(name, 0, dtype), dim, span)
            shard = Shard(SHAPES[name], dim, span)
            module.register_parameter(leaf, ShardedParameter(shard, dtype, "cpu", own))


def local(x: Tensor, dim: int, span: Span) -> Tensor:
    return x.narrow(dim, span.start, span.width).clone()


class Trained(NamedTuple):
    """What a rank has after all steps."""

    kinds: dict[str, Owned]
    replicas: dict[str, Tensor]
    sent: float


def config_of(*settings: str) -> Config:
    return load_config(["optim.name=muon", "parallel.bucket_mb=0.003", *settings])


def train(config: Config, tp: int, steps: int = STEPS) -> Trained:
    mesh = ParallelMesh()
    if dist.is_initialized():
        mesh = ParallelMesh.create(tp, 1, torch.device("cpu"))
    dtype = getattr(torch, config.precision.compute)
    model = Model(mesh, dtype)
    optimizer = ZeroOptimizer.create(model, mesh, config)
    before = mesh.stage.sent["updates"] + mesh.tp.sent["updates"]
    for step in range(steps):
        optimizer.gradients.begin_step(1)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, ShardedParameter)
            gradient = local(drawn(name, step + 1, dtype), *span_of(name, mesh.tp.rank, tp))
            parameter.add_gradient(gradient * SHARES[mesh.dp.size][mesh.dp.rank])
        optimizer.finish_gradients()
        optimizer.step(SCALE, *hyperparameters(step))
    optimizer.publisher.settle()
    kinds: dict[str, Owned] = {}
    for piece in optimizer.pieces(owned=True):
        for kind, tensor in piece.tensors.items():
            kinds.setdefault(kind, []).append((piece.name, piece, tensor.clone()))
    sent = mesh.stage.sent["updates"] + mesh.tp.sent["updates"] - before
    return Trained(kinds, {n: p.detach().clone() for n, p in model.named_parameters()}, sent)


@functools.cache
def one_process(*settings: str) -> dict[str, dict[str, Tensor]]:
    """Logical tensors by kind."""
    return {k: logical([parts]) for k, parts in train(config_of(*settings), 1).kinds.items()}


# One process


def by_singular_values(matrix: Tensor, iterations: int) -> Tensor:
    """The same iterations on the singular values alone."""
    a, b, c = COEFFICIENTS
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / matrix.double().norm()
    for _ in range(iterations):
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (33, 33), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("iterations", [1, 5])
def test_singular_values_move_towards_one(shape: tuple[int, int], iterations: int) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = orthogonalized(matrix, iterations)
    # fp64; slopes up to 3.4 an iteration enlarge what was rounded.
    torch.testing.assert_close(ours, by_singular_values(matrix, iterations), rtol=0, atol=1e-12)
    if iterations == 5 and shape != (33, 33):  # that one has a singular value near 0
        values = torch.linalg.svdvals(ours)
        assert values.min() > 0.65
        assert values.max() < 1.25
    # fp32: as much more as its rounding is coarser.
    in_fp32 = orthogonalized(matrix.float(), iterations)
    torch.testing.assert_close(in_fp32, ours.float(), rtol=0, atol=2e-4)


def test_no_momentum_is_no_update() -> None:
    assert torch.equal(orthogonalized(torch.zeros(4, 6), 5), torch.zeros(4, 6))


def expected_by_hand(iterations: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and momentum of the layers' matrices, in fp64 by the singular values."""
    weights = {name: drawn(name, 0, torch.float64) for name in MATRICES}
    momentum = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(STEPS):
        lr, weight_decay = hyperparameters(step)
        for name, w in weights.items():
            gradient = SCALE * drawn(name, step + 1, torch.float64)
            m = momentum[name] = 0.95 * momentum[name] + 0.05 * gradient
            update = by_singular_values(0.05 * gradient + 0.95 * m, iterations)
            w -= lr * weight_decay * w + lr * 0.2 * math.sqrt(max(w.shape)) * update
    return weights, momentum


@pytest.mark.parametrize("iterations", [3, 5])
def test_three_steps_by_hand(iterations: int) -> None:
    own = one_process("precision.compute=float64", f"optim.muon_iterations={iterations}")
    weights, momentum = expected_by_hand(iterations)
    assert own["momentum"].keys() == momentum.keys()
    for name in MATRICES:
        # fp64: 2^-53, enlarged by up to 3.4 in each iteration and by small singular values.
        torch.testing.assert_close(own["master"][name], weights[name], rtol=0, atol=1e-10)
        torch.testing.assert_close(own["momentum"][name], momentum[name], rtol=0, atol=1e-14)


def test_torchs_muon() -> None:
    own = one_process()
    weights = {name: nn.Parameter(drawn(name, 0, torch.float32)) for name in MATRICES}
    theirs = torch.optim.Muon(weights.values(), momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        for name, w in weights.items():
            w.grad = SCALE * drawn(name, step + 1, torch.float32)
        lr, weight_decay = hyperparameters(step)
        theirs.param_groups[0].update(lr=lr, weight_decay=weight_decay)
        theirs.step()
    for name, w in weights.items():
        moved, change = (
            x - drawn(name, 0, torch.float32) for x in (own["master"][name], w.detach())
        )
        # Torch iterates in bf16: products of numbers with 8 bits, five times over.
        assert (moved - change).norm() < 0.05 * change.norm(), name
        state = theirs.state[w]["momentum_buffer"]
        torch.testing.assert_close(own["momentum"][name], state, rtol=1e-5, atol=1e-7)


def test_an_update_is_as_large_as_one_of_adamw() -> None:
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    update = 0.2 * math.sqrt(256) * orthogonalized(matrix, 5)
    assert 0.15 < update.square().mean().sqrt() < 0.25


def test_everything_else_is_adamws() -> None:
    own, adamw = one_process(), one_process("optim.name=adamw")
    others = [name for name in SHAPES if name not in MATRICES]
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert all(torch.equal(own[kind][name], adamw[kind][name]) for name in others)
    assert [*own["exp_avg"]] == [name for name in adamw["exp_avg"] if name in others]
    assert sorted(own["momentum"]) == sorted(MATRICES)
    assert not any(torch.equal(own["master"][n], adamw["master"][n]) for n in MATRICES)


# Many


LAYOUTS = [(1, 2), (2, 1), (4, 1), (1, 4), (2, 2), (4, 2)]


@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
def test_the_layout_does_not_change_a_bit(tp: int, dp: int) -> None:
    stages = (0, 1, 2) if dp > 1 else (1,)
    configs = [config_of(f"optim.zero_stage={stage}") for stage in stages]
    ranks = run_ranks(lambda: [train(config, tp) for config in configs], tp * dp)
    reference = one_process()
    for number, stage in enumerate(stages):
        results = [rank[number] for rank in ranks]
        for kind, tensors in reference.items():
            whole = logical(result.kinds.get(kind, []) for result in results)
            assert whole.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(whole[name], tensor), (stage, kind, name)
        for rank, result in enumerate(results):  # replicas over DP and TP, too
            for name, replica in result.replicas.items():
                dim, span = span_of(name, rank % tp, tp)
                assert torch.equal(replica, local(reference["master"][name], dim, span)), name


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_each_element_goes_to_one_rank_and_comes_back(zero_stage: int) -> None:
    """Over all ranks: a matrix' rank has its own rows already; what several ranks hold comes back
    to each of them. With ``zero_stage`` 0 nothing crosses DP."""
    config, tp, dp = config_of(f"optim.zero_stage={zero_stage}"), 2, 2
    results = run_ranks(lambda: train(config, tp, steps=1), tp * dp)
    elements = {name: math.prod(SHAPES[name]) for name in MATRICES}
    once, held = 0.0, 0.0
    ranks = tp if zero_stage == 0 else tp * dp
    ordered = sorted(MATRICES, key=lambda name: -elements[name])
    for number, name in enumerate(ordered):
        owner = number % ranks
        for rank in range(ranks):
            if rank == owner:
                continue
            dim, span = span_of(name, rank % tp, tp)
            rows = span.width if dim == 0 else SHAPES[name][0]
            columns = span.width if dim == 1 else SHAPES[name][1]
            parts = 1 if zero_stage == 0 else dp
            start = min(-(-rows // parts) * (rank // tp), rows)
            stop = min(start + -(-rows // parts), rows)
            is_counted = dim == 1 or span.owned_stop > span.owned_start
            held += (stop - start) * columns
            once += (stop - start) * columns * is_counted
    copies = dp if zero_stage == 0 else 1
    assert sum(result.sent for result in results) == 4 * copies * (once + held)


def test_a_rank_of_which_all_is_muons() -> None:
    """Norms without gains leave nothing for AdamW on a stage in the middle."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shard = Shard((8, 4), 0, whole(8, owned=True))
            self.model = nn.Module()
            self.model.layers = nn.Module()
            self.model.layers.q = ShardedParameter(shard, torch.float32, "cpu", torch.ones(8, 4))

    stage = Stage()
    optimizer = ZeroOptimizer.create(stage, ParallelMesh(), config_of())
    optimizer.gradients.begin_step(1)
    q: Any = stage.get_parameter("model.layers.q")
    q.add_gradient(torch.ones(8, 4))
    optimizer.finish_gradients()
    optimizer.step(1.0, 0.1, 0.0)
    assert (q < 1).all()
