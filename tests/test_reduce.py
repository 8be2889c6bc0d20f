"""Every collective on real ranks: values, order, bytes, and bits that no degree changes."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from megabit import reduce
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh

T = TypeVar("T")
CPU = torch.device("cpu")
DTYPES = (torch.int8, torch.int32, torch.float32, torch.float64)
DEGREES = (1, 2, 4)


def on_axis(degree: int, function: Callable[[Axis], T]) -> list[T]:
    """``function(axis)`` on each of ``degree`` ranks of one tensor-parallel axis."""

    def rank_main() -> T:
        return function(ParallelMesh.create(degree, 1, CPU).tp if degree > 1 else Axis.single("tp"))

    return run_ranks(rank_main, degree)


def rank_values(rank: int, dtype: torch.dtype, rows: int = 8) -> Tensor:
    """``[rows, 3]``, different on each rank; small integers, whose sums are exact in any dtype."""
    return (torch.arange(rows * 3).view(rows, 3) % 7 + 5 * rank - 6).to(dtype)


@pytest.mark.parametrize("degree", DEGREES)
def test_values_and_bytes(degree: int) -> None:
    """All functions on all dtypes in one go: ranks cost more than collectives."""
    others = (degree - 1) / degree  # what a ring sends of the whole, in one of its two rounds

    def collect(axis: Axis) -> dict[tuple[str, torch.dtype], tuple[Tensor, float]]:
        results = {}

        def record(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
            before = axis.sent_bytes
            results[name, x.dtype] = function(x), axis.sent_bytes - before

        for dtype in DTYPES:
            x = rank_values(axis.rank, dtype)
            record("sum", lambda x: reduce.all_reduce(x, axis), x.clone())
            record("max", lambda x: reduce.all_reduce(x, axis, "max"), x.clone())
            record("started", lambda x: started(x, axis), x.clone())
            record("gather", lambda x: reduce.all_gather(x, axis), x)
            record("gather view", lambda x: reduce.all_gather(x, axis), x.t())
            record("scatter", lambda x: reduce.reduce_scatter(x, axis), x)
            record("scatter view", lambda x: reduce.reduce_scatter(x, axis), x.t().repeat(4, 1))
            record("own rows", lambda x: reduce.own_rows(x, axis), x)
            record("blocks", lambda x: reduce.gather_blocks(x, axis), x)
            record("sum of blocks", lambda x: reduce.sum_blocks(x, axis), x)
            record("broadcast", lambda x: reduce.broadcast(x, degree - 1, axis), x.clone())
            assert torch.equal(x, rank_values(axis.rank, dtype))  # only the clones were written to
        return results

    def started(x: Tensor, axis: Axis) -> Tensor:
        work = reduce.start_all_reduce(x, axis)
        assert (work is None) == (axis.group is None)
        if work is not None:
            work.wait()
        return x

    ranks = on_axis(degree, collect)
    for dtype in DTYPES:
        inputs = [rank_values(rank, dtype) for rank in range(degree)]
        total = torch.stack(inputs).sum(0, dtype=dtype)
        total_t = torch.stack([x.t().repeat(4, 1) for x in inputs]).sum(0, dtype=dtype)
        side_by_side = torch.cat(inputs, -1)
        size = inputs[0].numel() * inputs[0].element_size()
        for rank, results in enumerate(ranks):
            last = rank == degree - 1
            expected = {
                "sum": (total, 2 * others * size),
                "max": (torch.stack(inputs).amax(0), 2 * others * size),
                "started": (total, 2 * others * size),
                "gather": (torch.cat(inputs), others * size * degree),
                "gather view": (torch.cat([x.t() for x in inputs]), others * size * degree),
                "scatter": (total.chunk(degree)[rank], others * size),
                "scatter view": (total_t.chunk(degree)[rank], others * size * 4),
                "own rows": (inputs[rank].chunk(degree)[rank], 0),
                "blocks": (side_by_side, others * size * degree),
                "sum of blocks": (side_by_side.sum(-1), others * size * degree),
                "broadcast": (inputs[-1], (degree - 1) * size * last),
            }
            for name, (value, sent_bytes) in expected.items():
                found, found_bytes = results[name, dtype]
                assert torch.equal(found, value), (name, dtype, rank)
                assert found_bytes == sent_bytes, (name, dtype, rank)
        # What is gathered comes in the dtype that went in.
        assert {results["gather", dtype][0].dtype for results in ranks} == {dtype}


def test_reductions_write_to_their_argument() -> None:
    def in_place(axis: Axis) -> bool:
        x = torch.ones(2)
        return reduce.all_reduce(x, axis) is x and x.tolist() == [2, 2]

    assert on_axis(2, in_place) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_degree_does_not_change_a_bit_of_a_block_sum(dtype: torch.dtype) -> None:
    """Also where each rank has one block (degree 8), which gives a tensor of other strides."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 33, 8, dtype=dtype, generator=generator) * 10  # 2 × 33 sums, 8 blocks

    def summed(axis: Axis) -> Tensor:
        own = values.chunk(axis.size, -1)[axis.rank].contiguous()
        return reduce.sum_blocks(own, axis)

    for degree in (1, 2, 4, 8):
        for total in on_axis(degree, summed):
            assert torch.equal(total, values.sum(-1))


def test_blocks_are_gathered_in_their_order() -> None:
    def gathered(axis: Axis) -> Tensor:
        own = torch.arange(8).chunk(axis.size)[axis.rank]
        return reduce.gather_blocks(torch.stack([own, 10 * own]), axis)

    expected = torch.stack([torch.arange(8), 10 * torch.arange(8)])
    for degree in DEGREES:
        for blocks in on_axis(degree, gathered):
            assert torch.equal(blocks, expected)
            assert blocks.is_contiguous()


def test_whether_any_rank_says_so() -> None:
    def answers(axis: Axis) -> list[bool]:
        flags = [False, True, axis.rank == axis.size - 1, axis.rank == 0]
        return [reduce.any_rank(flag, axis, CPU) for flag in flags]

    for degree in DEGREES:
        for answer in on_axis(degree, answers):
            assert answer == [False, True, True, True]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_is_same_on_every_rank(world_size: int) -> None:
    def run() -> tuple[bool, bool]:
        world = ParallelMesh.create(tp=1, pp=1, device=CPU).world
        own = bytes([7, world.rank])
        return reduce.is_same(b"alike", world, CPU), reduce.is_same(own, world, CPU)

    assert run_ranks(run, world_size) == [(True, world_size == 1)] * world_size
