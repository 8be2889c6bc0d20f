"""What a ternary parameter costs: bytes on the wire for each step, and bytes that stay on a rank.

d is the number of DP ranks and a parameter's step costs (d − 1)/d times

    2.25   gradients in bf16, codes at 2 bits                 zero_stage 1
    4.25   gradients in fp32                                  zero_stage 1
    2M + 0.25   bf16 gradients of M microbatches              zero_stage 2
    2 + 2  Megatron's distributed optimizer: gradients in bf16 one way, weights in bf16 back

and on the rank stay 0.25 bytes of codes and 12/d of masters and moments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megabit.data_parallel import ZeroOptimizer
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.reduce import all_gather, start_all_to_all
from megabit.tensor_parallel import BitLinear, ShardedParameter
from megabit.training.step import TrainingState, train_step
from tests.data_parallel.small import config_of, make_mesh
from tests.training.tiny import own_batch, tiny

BF16, FP32 = "precision.gradients=bfloat16", "precision.gradients=float32"
MICROBATCHES = 3
EVEN = ((64, 128), (256, 64), (128, 256), (64, 128))
"""Rows and columns that four ranks share without padding."""
UNEVEN = ((37, 16), (3, 37), (64, 3), (16, 64))
"""Rows that two ranks do not share evenly, or fewer of them than ranks."""
NUM_EVEN, NUM_UNEVEN = (sum(n * k for n, k in shapes) for shapes in (EVEN, UNEVEN))


class Stack(nn.Module):
    """Ternary layers and nothing else."""

    def __init__(self, shapes: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BitLinear(k, n) for n, k in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Cost(NamedTuple):
    """Of one step on one rank."""

    gradients: float
    weights: float
    others: dict[tuple[str, str], float]
    """Bytes by axis and purpose of all that is sent besides."""
    parts: float
    """Elements of all parts of all buckets, padding included."""
    nbytes: dict[str, int]


def measure(
    shapes: tuple[tuple[int, int], ...], zero_stage: int, setting: str, mesh: ParallelMesh
) -> Cost:
    model = Stack(shapes)
    optimizer = ZeroOptimizer.create(model, mesh, config_of(zero_stage, setting))
    for _ in range(2):
        before = mesh.sent()
        optimizer.gradients.begin_step(MICROBATCHES)
        for microbatch in range(MICROBATCHES):
            x = torch.randn(8, shapes[0][1], generator=torch.Generator().manual_seed(microbatch))
            model(x).square().sum().backward()
        optimizer.finish_gradients()
        optimizer.gradient_norm(sum(n * k for n, k in shapes))
        optimizer.step(1.0, 1e-3, 0.1)
    sent = {key: count - before.get(key, 0) for key, count in mesh.sent().items()}
    layouts = [bucket.layout for bucket in optimizer.gradients.buckets]
    return Cost(
        sent.pop(("dp", "weight gradients"), 0),
        sent.pop(("dp", "weights"), 0),
        {key: count for key, count in sent.items() if count},
        sum(layout.part * layout.ranks for layout in layouts),
        optimizer.nbytes(),
    )


@pytest.mark.parametrize("d", [2, 4])
def test_bytes_on_the_wire(d: int) -> None:
    cases = [(stage, setting) for stage in (0, 1, 2) for setting in (BF16, FP32)]

    def run() -> tuple[list[Cost], float]:
        mesh = make_mesh()
        return [measure(EVEN, *case, mesh) for case in cases], megatron(mesh.dp)

    share = (d - 1) / d
    for costs, rival in run_ranks(run, d):
        found = dict(zip(cases, costs, strict=True))
        for (stage, setting), cost in found.items():
            assert cost.parts == NUM_EVEN  # no padding
            per_gradient = 2 if setting == BF16 else 4
            # Stage 0 gathers the sums, in fp32, and all ranks make the codes of them.
            times = MICROBATCHES if stage == 2 else 1
            gradient = per_gradient * times + (4 if stage == 0 else 0)
            assert cost.gradients / NUM_EVEN == gradient * share
            assert cost.weights / NUM_EVEN == (0 if stage == 0 else 0.25) * share
            # Besides, a few numbers that do not grow with the model: an all-reduce of two int64
            # for each tensor, of which γ is made, and of max|g| and Σg².
            scales = 0 if stage == 0 else 2 * share * len(EVEN) * 16
            assert cost.others.pop(("world", "scales"), 0) == scales
            assert cost.others == {("world", "control"): 2 * share * 16}
        ours = found[1, BF16].gradients + found[1, BF16].weights
        assert ours / NUM_EVEN == 2.25 * share
        assert rival / NUM_EVEN == 4 * share
        assert ours / rival == 0.5625
        assert (found[1, FP32].gradients + found[1, FP32].weights) / NUM_EVEN == 4.25 * share
        stage_2 = found[2, BF16].gradients + found[2, BF16].weights
        assert stage_2 / NUM_EVEN == (2 * MICROBATCHES + 0.25) * share


def megatron(dp: Axis) -> float:
    """The bytes of Megatron's distributed optimizer for the even shapes, by the same counter: a
    reduce-scatter of bf16 gradients, which is each part to the rank that adds it, and an all-gather
    of bf16 weights."""
    counted = Axis(dp.name, dp.size, dp.rank, dp.group)
    gradients = torch.zeros(dp.size, NUM_EVEN // dp.size, dtype=torch.bfloat16)
    own = start_all_to_all(gradients, counted, "weight gradients").wait().sum(0)
    all_gather(own, counted, "weights")
    return counted.sent_bytes


@pytest.mark.parametrize("d", [2, 4])
def test_padding_is_bounded(d: int) -> None:
    """A row for each rank and tensor, and the alignment of parts."""

    def run() -> list[Cost]:
        mesh = make_mesh()
        return [measure(UNEVEN, stage, BF16, mesh) for stage in (1, 2)]

    share = (d - 1) / d
    rows = [(-(-n // d), k) for n, k in UNEVEN]
    for costs in run_ranks(run, d):
        for cost, times in zip(costs, (1, MICROBATCHES), strict=True):
            padded = d * sum(-(-n * k // 64) * 64 for n, k in rows)
            assert cost.parts == padded
            assert padded - NUM_UNEVEN < d * sum(k + 64 for _, k in UNEVEN)
            assert cost.gradients == 2 * times * padded * share
            packed = d * sum(-(-n * -(-k // 4) // 16) * 16 for n, k in rows)
            assert cost.weights == packed * share


@pytest.mark.parametrize("d", [1, 2, 4])
def test_bytes_that_stay(d: int) -> None:
    def run() -> list[Cost]:
        mesh = make_mesh()
        return [measure(EVEN, stage, FP32, mesh) for stage in (0, 1, 2)]

    for costs in run_ranks(run, d):
        for stage, cost in enumerate(costs):
            parts = d if stage else 1
            assert cost.nbytes["codes"] == NUM_EVEN / 4
            assert cost.nbytes["dense weights"] == 0
            assert cost.nbytes["masters"] == 4 * NUM_EVEN / parts
            assert cost.nbytes["moments"] == 8 * NUM_EVEN / parts
            # At the end of backward. Stage 2 has no sums but those over ranks, of its part; the
            # others have their own as well, and stage 0 those over ranks whole.
            own = 0 if stage == 2 and d > 1 else 4 * NUM_EVEN
            over_ranks = 4 * NUM_EVEN / parts if d > 1 else 0
            assert cost.nbytes["gradients"] == own + over_ranks


def reachable(root: object) -> Iterator[Tensor]:
    """All tensors with storage that attributes, items and closed-over variables lead to, but the
    optimizer's, whose gradient buckets parameters hand their gradients to."""
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, str | int | float | type | torch.dtype):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.device.type != "meta":
                yield item
            if item.grad is not None:
                waiting.append(item.grad)
        if isinstance(item, dict):
            waiting += [*item.values()]
        elif isinstance(item, list | tuple | set):
            waiting += [*item]
        elif hasattr(item, "__dict__"):
            leads = {k: v for k, v in vars(item).items() if k not in ("_collector", "_arriving")}
            waiting += [*leads.values()]
        slots = getattr(type(item), "__slots__", ())
        waiting += [getattr(item, name) for name in slots if hasattr(item, name)]


@dataclass(frozen=True)
class Resident:
    """Bytes of all storages that the stage of one rank leads to."""

    small: int
    """Of tensors that are smaller than any weight: scales, gains, rotary tables."""
    packed: int
    dense: int
    """Of embedding and head."""
    num_codes: int


def measure_resident(*settings: str) -> Resident:
    config = tiny(*settings)
    state = TrainingState.create(config, make_mesh())
    for step in range(2):
        train_step(state, own_batch(config, state.mesh, step), step)
    state.optimizer.publisher.settle()
    named = dict(state.stages.named_parameters())
    codes = [p.numel() for p in named.values() if p.is_meta]
    vocab = config.model.vocab_size
    storages = {}
    for tensor in reachable(state.stages):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor.dtype, vocab in tensor.shape)
    small = packed = dense = 0
    for nbytes, dtype, is_dense in storages.values():
        if dtype == torch.uint8:
            packed += nbytes
        elif is_dense:
            dense += nbytes
        else:
            small += nbytes
            # Not even the smallest ternary weight, at a byte an element.
            assert nbytes < min(codes), (nbytes, dtype)
    return Resident(small, packed, dense, sum(codes))


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_stage_holds_two_bits_for_each_ternary_weight(zero_stage: int) -> None:
    """Walks all that a decoder leads to after two steps: no latent weight hides anywhere."""
    # Multiples of 64 rows: the layout of a kernel may pad rows to that.
    sizes = ("hidden_size=64", "intermediate_size=128", "num_key_value_heads=4")
    model = (*(f"model.{size}" for size in sizes), f"optim.zero_stage={zero_stage}")
    for resident in run_ranks(lambda: measure_resident(*model), 2):
        assert resident.num_codes == 2 * (4 * 64 * 64 + 3 * 64 * 128)
        assert resident.packed == resident.num_codes / 4
        assert resident.dense == 300 * 64 * 4  # the tied embedding, in the dtype of compute
        assert resident.small < 8192


def test_the_walk_finds_a_latent_weight() -> None:
    layer = BitLinear(64, 32)
    layer(torch.randn(2, 64))
    sizes = {(tensor.numel(), tensor.dtype) for tensor in reachable(layer)}
    assert (64 * 32, torch.float32) in sizes
    assert isinstance(layer.weight, ShardedParameter)
