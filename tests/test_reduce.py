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
            record("started", lambda x: reduce.start_all_reduce(x, axis).wait(), x.clone())
            record("started max", lambda x: started_max(x, axis), x.clone())
            record("gather", lambda x: reduce.all_gather(x, axis), x)
            record("gather view", lambda x: reduce.all_gather(x, axis), x.t())
            record("scatter", lambda x: reduce.reduce_scatter(x, axis), x)
            record("scatter view", lambda x: reduce.reduce_scatter(x, axis), x.t().repeat(4, 1))
            record("swap", lambda x: reduce.start_all_to_all(x, axis).wait(), by_rank(x))
            record("swap view", lambda x: reduce.start_all_to_all(x.mT, axis).wait(), by_rank(x))
            record("tree scatter", lambda x: reduce.start_tree_reduce_scatter(x, axis).wait(), x)
            record("tree sum", lambda x: reduce.start_tree_all_reduce(x, axis).wait(), x)
            record("tree sum view", lambda x: reduce.start_tree_all_reduce(x, axis).wait(), x.t())
            record("own rows", lambda x: reduce.own_rows(x, axis), x)
            record("blocks", lambda x: reduce.gather_blocks(x, axis), x)
            record("sum of blocks", lambda x: reduce.sum_blocks(x, axis), x)
            record("broadcast", lambda x: reduce.broadcast(x, degree - 1, axis), x.clone())
            assert torch.equal(x, rank_values(axis.rank, dtype))  # only the clones were written to
        return results

    def started_max(x: Tensor, axis: Axis) -> Tensor:
        pending = reduce.start_all_reduce(x, axis, "control", "max")
        assert (pending.work is None) == (axis.group is None)
        assert pending.wait() is x
        return x

    def by_rank(x: Tensor) -> Tensor:
        return x.view(degree, -1, 3)

    ranks = on_axis(degree, collect)
    for dtype in DTYPES:
        inputs = [rank_values(rank, dtype) for rank in range(degree)]
        total = torch.stack(inputs).sum(0, dtype=dtype)
        total_t = torch.stack([x.t().repeat(4, 1) for x in inputs]).sum(0, dtype=dtype)
        side_by_side = torch.cat(inputs, -1)
        size = inputs[0].nbytes
        swapped = torch.stack([x.view(degree, -1, 3) for x in inputs], 1)  # [to, from, …]
        for rank, results in enumerate(ranks):
            last = rank == degree - 1
            expected = {
                "sum": (total, 2 * others * size),
                "max": (torch.stack(inputs).amax(0), 2 * others * size),
                "started": (total, 2 * others * size),
                "started max": (torch.stack(inputs).amax(0), 2 * others * size),
                "gather": (torch.cat(inputs), others * size * degree),
                "gather view": (torch.cat([x.t() for x in inputs]), others * size * degree),
                "scatter": (total.chunk(degree)[rank], others * size),
                "scatter view": (total_t.chunk(degree)[rank], others * size * 4),
                "swap": (swapped[rank], others * size),
                "swap view": (swapped[rank].mT, others * size),
                "tree scatter": (total.chunk(degree)[rank], others * size),
                "tree sum": (total, 2 * others * size),
                "tree sum view": (total.t(), 2 * others * size),
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


@pytest.mark.parametrize("degree", DEGREES)
def test_what_ranks_say_may_be_of_any_length(degree: int) -> None:
    def of_rank(rank: int) -> list[object]:
        return [rank, "ü" * 1000 * rank, {"nothing": None}] if rank else []

    found = on_axis(degree, lambda axis: reduce.gather_json(of_rank(axis.rank), axis, CPU))
    assert found == [[of_rank(rank) for rank in range(degree)]] * degree


# Trees of floating-point terms


def uneven_terms(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[count, 24]`` of very different sizes, so that any other order gives other bits."""
    generator = torch.Generator().manual_seed(count)
    terms = torch.randn(count, 24, generator=generator, dtype=torch.float64)
    return (terms * torch.logspace(0, 3, count, dtype=torch.float64)[:, None]).to(dtype)


def test_a_tree_sum_is_what_its_picture_says() -> None:
    a, b, c, d, e, f, g = uneven_terms(7)
    assert torch.equal(reduce.tree_sum(torch.stack([a])), a)
    assert torch.equal(reduce.tree_sum(torch.stack([a, b, c, d])), (a + b) + (c + d))
    # An odd one moves up alone.
    assert torch.equal(reduce.tree_sum(torch.stack([a, b, c])), (a + b) + c)
    seven = ((a + b) + (c + d)) + ((e + f) + g)
    assert torch.equal(reduce.tree_sum(torch.stack([a, b, c, d, e, f, g])), seven)


def test_a_tree_sum_keeps_its_terms() -> None:
    terms = uneven_terms(8)
    before = terms.clone()
    reduce.tree_sum(terms)
    assert torch.equal(terms, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_degree_does_not_change_a_bit_of_a_tree_sum(dtype: torch.dtype) -> None:
    """8 terms on 1, 2, 4 or 8 ranks, to every rank or in parts; also of an odd length."""
    terms = uneven_terms(8, dtype)
    expected = reduce.tree_sum(terms)

    def summed(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
        own = reduce.tree_sum(terms.chunk(axis.size)[axis.rank])
        odd = own[:13].clone()
        return (
            reduce.start_tree_all_reduce(own, axis).wait(),
            reduce.start_tree_all_reduce(odd, axis).wait(),
            reduce.start_tree_reduce_scatter(own, axis).wait(),
        )

    for degree in (1, 2, 4, 8):
        ranks = on_axis(degree, summed)
        for whole, odd, _ in ranks:
            assert torch.equal(whole, expected)
            assert torch.equal(odd, expected[:13])
        assert torch.equal(torch.cat([part for *_, part in ranks]), expected)


def test_another_order_of_the_terms_gives_other_bits() -> None:
    """So the comparison above can fail: left to right, and with two neighbours swapped for others,
    most sums differ."""
    terms = uneven_terms(8)
    expected = reduce.tree_sum(terms)
    left_to_right = terms[0].clone()
    for term in terms[1:]:
        left_to_right += term
    shuffled = reduce.tree_sum(terms[[0, 2, 1, 3, 4, 6, 5, 7]])
    for other in (left_to_right, shuffled):
        assert (other != expected).float().mean() > 0.3
        # Of the same sum: a few roundings of the largest term.
        torch.testing.assert_close(other, expected, rtol=0, atol=1e-6 * terms.abs().max().item())


def test_ranks_in_another_order_give_other_bits() -> None:
    """The collective adds by rank: the terms of ranks 1 and 2 swapped are another tree."""
    terms = uneven_terms(4)

    def summed(axis: Axis, order: list[int]) -> Tensor:
        return reduce.start_tree_all_reduce(terms[order[axis.rank]].clone(), axis).wait()

    (in_order, *_) = on_axis(4, lambda axis: summed(axis, [0, 1, 2, 3]))
    (swapped, *_) = on_axis(4, lambda axis: summed(axis, [0, 2, 1, 3]))
    assert torch.equal(in_order, reduce.tree_sum(terms))
    assert not torch.equal(swapped, in_order)


# Accounting


def test_bytes_are_counted_under_their_purpose() -> None:
    def sent(axis: Axis) -> dict[str, float]:
        x = torch.zeros(4, 2)
        reduce.all_reduce(x, axis, purpose="activations")
        reduce.all_gather(x, axis, "weights")
        reduce.reduce_scatter(x, axis, "weight gradients")
        reduce.start_all_to_all(x.view(axis.size, -1), axis, "scales").wait()
        reduce.start_tree_all_reduce(x, axis, "activation gradients").wait()
        reduce.sum_blocks(x, axis)
        reduce.any_rank(True, axis, CPU)
        return dict(axis.sent)

    # x has 32 bytes and half of everything is the other rank's.
    expected = {
        "activations": 2 * 16,
        "weights": 32,
        "weight gradients": 16,
        "scales": 16,
        "activation gradients": 2 * 16,
        "statistics": 32,
        "control": 2 * 4,  # an int64
    }
    assert on_axis(2, sent) == [expected] * 2
    assert on_axis(1, sent) == [{}]


def test_other_work_is_done_before_a_result_is_waited_for() -> None:
    """All of them are under way at once and may be waited for in another order."""

    def run(axis: Axis) -> list[Tensor]:
        started = [
            reduce.start_all_reduce(torch.full((2,), 1.0), axis),
            reduce.start_all_gather(torch.full((1,), 2.0), axis),
            reduce.start_reduce_scatter(torch.full((2,), 3.0), axis),
            reduce.start_tree_reduce_scatter(torch.full((2,), 4.0), axis),
            reduce.start_all_to_all(torch.full((2, 1), 5.0 + axis.rank), axis),
        ]
        assert axis.waited_s == 0
        return [pending.wait() for pending in reversed(started)]

    for results in on_axis(2, run):
        swapped, tree, scattered, gathered, summed = (x.tolist() for x in results)
        assert swapped == [[5.0], [6.0]]
        assert (tree, scattered, gathered, summed) == ([8.0], [6.0], [2.0, 2.0], [2.0, 2.0])
