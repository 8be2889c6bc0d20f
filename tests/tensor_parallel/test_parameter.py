"""Shards of logical tensors, and gradients of which each rank has one term."""

import pytest
import torch
from torch import Tensor, nn

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.tensor_parallel.parameter import (
    Shard,
    ShardedParameter,
    sharded_parameters,
    sum_partial_gradients,
)
from megabit.tensor_parallel.partition import BlockPartition, whole

CPU = torch.device("cpu")
ROWS = BlockPartition(16, 4)
# Which blocks of 4 rows each of four ranks holds: some on one rank, on two, on three.
HELD = [(0, 1), (0, 2), (1, 3), (1, 4)]


def parameter_of(shard: Shard, grad: Tensor | None) -> ShardedParameter:
    parameter = ShardedParameter(shard, torch.float32, CPU)
    parameter.grad = grad
    return parameter


def term(rank: int, *shape: int) -> Tensor:
    """A rank's gradient: integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 50, shape, generator=generator).float()


def test_a_shard_and_the_part_it_owns() -> None:
    span = ROWS.blocks(1, 3).owning(8, 12)
    by_rows = Shard((16, 5), 0, span)
    assert (by_rows.local_shape, by_rows.numel) == ((8, 5), 80)
    x = torch.arange(80.0).view(16, 5)
    assert torch.equal(by_rows.owned(x[4:12]), x[8:12])
    by_columns = Shard((5, 16), 1, span)
    assert by_columns.local_shape == (5, 8)
    assert torch.equal(by_columns.owned(x.t()[:, 4:12]), x.t()[:, 8:12])


def test_what_is_owned_over_all_ranks_is_the_logical_tensor() -> None:
    x = torch.arange(48.0).view(16, 3)
    owned = []
    for rank, (first, last) in enumerate(HELD):
        taken = max((stop for _, stop in HELD[:rank]), default=0)
        span = ROWS.blocks(first, last).owning(4 * max(first, taken), 4 * last)
        owned.append(Shard((16, 3), 0, span).owned(x[span.start : span.stop]))
    assert torch.equal(torch.cat(owned), x)


def test_overlapping_replicas_meet_in_the_right_rows() -> None:
    def summed() -> tuple[Tensor | None, ...]:
        tp = ParallelMesh.create(4, 1, CPU).tp
        span = ROWS.blocks(*HELD[tp.rank])
        rows = Shard((16, 3), 0, span, grad_is_partial=True)
        columns = Shard((3, 16), 1, span, grad_is_partial=True)
        gain = Shard((7,), 0, whole(7, tp.rank == 0), grad_is_partial=True)
        complete = Shard((7,), 0, whole(7, tp.rank == 0))
        parameters = [
            parameter_of(rows, term(tp.rank, span.width, 3)),
            parameter_of(columns, term(tp.rank, 3, span.width)),
            parameter_of(gain, term(tp.rank, 7)),
            parameter_of(complete, term(tp.rank, 7)),
            parameter_of(gain, None),
        ]
        sum_partial_gradients(parameters, tp)
        # One all-reduce of 2 · (4 − 1)/4 times the logical tensors that are partial.
        assert tp.sent_bytes == 1.5 * 4 * (16 * 3 + 3 * 16 + 7)
        return tuple(parameter.grad for parameter in parameters)

    rows, columns = torch.zeros(16, 3), torch.zeros(3, 16)
    for rank, (first, last) in enumerate(HELD):
        rows[4 * first : 4 * last] += term(rank, 4 * (last - first), 3)
        columns[:, 4 * first : 4 * last] += term(rank, 3, 4 * (last - first))
    gain = sum(term(rank, 7) for rank in range(4))
    for (rank, (first, last)), found in zip(enumerate(HELD), run_ranks(summed, 4), strict=True):
        held = slice(4 * first, 4 * last)
        expected = (rows[held], columns[:, held], gain, term(rank, 7))
        for grad, wanted in zip(found, expected, strict=False):
            assert torch.equal(grad, wanted)
        assert found[-1] is None


def test_one_rank_has_all_terms() -> None:
    grad = term(0, 4, 3)
    parameter = parameter_of(Shard((4, 3), 0, whole(4, True), grad_is_partial=True), grad.clone())
    sum_partial_gradients([parameter], Axis.single("tp"))
    assert torch.equal(parameter.grad, grad)


def test_parameters_by_logical_name() -> None:
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.weight = parameter_of(Shard((4, 3), 0, whole(4, True)), None)
    assert sharded_parameters(module) == {"inner.weight": module.inner.weight}
    module.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match="bias is a Parameter, not a ShardedParameter"):
        sharded_parameters(module)
