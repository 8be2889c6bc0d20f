"""Sums of row-parallel products: exact in both modes, at the bytes that each promises."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.reduce import own_rows
from megabit.tensor_parallel import BlockPartition, LayerContext, RowParallelBitLinear
from megabit.tensor_parallel.row_sums import sum_products
from megabit_kernels import numerics

T = TypeVar("T")
Mode: TypeAlias = Literal["int32", "exact16"]
MODES: tuple[Mode, ...] = ("int32", "exact16")
CPU = torch.device("cpu")
N = 12
INT16 = torch.iinfo(torch.int16)


def on_axis(degree: int, function: Callable[[Axis], T]) -> list[T]:
    def rank_main() -> T:
        return function(ParallelMesh.create(degree, 1, CPU).tp if degree > 1 else Axis.single("tp"))

    return run_ranks(rank_main, degree)


def context_of(axis: Axis, mode: Mode, sequence_parallel: bool = False) -> LayerContext:
    return replace(
        LayerContext.single(), tp=axis, row_reduce=mode, sequence_parallel=sequence_parallel
    )


def products(blocks: int, tokens: int, largest: int = INT16.max // 8) -> Tensor:
    """int32 ``[blocks, tokens, N]``: the terms of four blocks of columns."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (blocks, tokens, N)
    return torch.randint(-largest, largest + 1, shape, generator=generator, dtype=torch.int32)


def scales(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, 1, generator=generator) + 0.01, torch.tensor(0.37)


def own_terms(terms: Tensor, axis: Axis) -> Tensor:
    """What a rank has of the blocks' ``terms``; their sum in int32."""
    return own_rows(terms, axis).sum(0, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_the_degree_does_not_change_a_bit(mode: Mode, dtype: torch.dtype) -> None:
    """Also of token counts that no degree divides, of fewer tokens than ranks, and of none."""
    counts = (16, 13, 3, 1, 0)

    def run(axis: Axis) -> list[Tensor]:
        context = context_of(axis, mode)
        return [
            sum_products(own_terms(products(4, tokens), axis), *scales(tokens), dtype, context)
            for tokens in counts
        ]

    for degree in (1, 2, 4):
        for results in on_axis(degree, run):
            for tokens, y in zip(counts, results, strict=True):
                total = products(4, tokens).sum(0, dtype=torch.int32)
                expected = numerics.dequantize_product(total, *scales(tokens), dtype)
                assert expected.shape == (tokens, N)
                assert y.dtype == dtype
                assert torch.equal(y, expected)


@pytest.mark.parametrize("mode", MODES)
def test_sequence_parallel_ranks_get_their_own_tokens(mode: Mode) -> None:
    counts = (16, 4, 0)

    def run(axis: Axis) -> list[Tensor]:
        context = context_of(axis, mode, axis.size > 1)
        return [
            sum_products(own_terms(products(4, t), axis), *scales(t), torch.float32, context)
            for t in counts
        ]

    unsplit = run(Axis.single("tp"))
    for degree in (2, 4):
        for expected, own in zip(unsplit, zip(*on_axis(degree, run), strict=True), strict=True):
            assert {len(y) for y in own} == {len(expected) // degree}
            assert torch.equal(torch.cat(own), expected)


def test_the_modes_agree_in_a_real_layer() -> None:
    """Codes and activations as they come, on 1, 2 and 4 ranks."""
    partition = BlockPartition(52, 4)  # 12, 12, 12 and 16 columns
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 52, generator=generator) for n in (N, 9))

    def run(axis: Axis) -> list[Tensor]:
        columns = partition.span(axis.rank, axis.size)
        results = []
        for mode in MODES:
            layer = RowParallelBitLinear(columns, N, context_of(axis, mode))
            with torch.no_grad():
                layer.weight.copy_(weight[:, columns.start : columns.stop])
                results.append(layer(x[:, columns.start : columns.stop]))
        return results

    expected, _ = run(Axis.single("tp"))
    for degree in (1, 2, 4):
        for results in on_axis(degree, run):
            assert all(torch.equal(y, expected) for y in results)


# Overflow of int16


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("value", [INT16.max + 1, INT16.min - 1, 128 * 131_072])
def test_an_overflow_on_one_rank_makes_all_fall_back(value: int, sequence_parallel: bool) -> None:
    """One product of rank 2 that int16 cannot hold, among tokens that another rank adds up."""
    degree, tokens = 4, 8
    terms = products(degree, tokens)
    terms[2, 1, 3] = value

    def run(axis: Axis) -> tuple[Tensor, float]:
        context = context_of(axis, "exact16", sequence_parallel)
        y = sum_products(own_terms(terms, axis), *scales(tokens), torch.float32, context)
        return y, axis.sent["activations"]

    total = terms.sum(0, dtype=torch.int32)
    expected = numerics.dequantize_product(total, *scales(tokens), torch.float32)
    ranks = on_axis(degree, run)
    if sequence_parallel:
        assert torch.equal(torch.cat([y for y, _ in ranks]), expected)
    else:
        assert all(torch.equal(y, expected) for y, _ in ranks)
    # All of them sent both: int16 in vain, with a flag to each peer, and then int32.
    others = (degree - 1) / degree * tokens * N
    result = 0 if sequence_parallel else 4
    assert {sent for _, sent in ranks} == {others * (2 + 4 + result) + (degree - 1) * 2}


def test_the_ends_of_int16_and_sums_beyond_it_need_no_fallback() -> None:
    """What must fit is what travels; the sum of it is int32."""
    terms = products(4, 4)
    terms[:, 0, 0], terms[:, 0, 1] = INT16.max, INT16.min

    def run(axis: Axis) -> tuple[Tensor, float]:
        y = sum_products(
            own_terms(terms, axis), *scales(4), torch.float32, context_of(axis, "exact16", True)
        )
        return y, axis.sent["activations"]

    total = terms.sum(0, dtype=torch.int32)
    assert total.max() > INT16.max
    ranks = on_axis(4, run)
    expected = numerics.dequantize_product(total, *scales(4), torch.float32)
    assert torch.equal(torch.cat([y for y, _ in ranks]), expected)
    assert {sent for _, sent in ranks} == {3 / 4 * 4 * N * 2 + 3 * 2}


# Bytes


@pytest.mark.parametrize("degree", [2, 4])
def test_bytes_of_each_mode(degree: int) -> None:
    """exact16 with a bf16 output sends what a bf16 all-reduce does, and one flag to each peer."""
    tokens = 8
    others = (degree - 1) / degree

    def run(axis: Axis) -> dict[tuple[Mode, bool, torch.dtype], dict[str, float]]:
        sent = {}
        for mode in MODES:
            for sequence_parallel in (False, True):
                for dtype in (torch.bfloat16, torch.float32):
                    axis.sent.clear()
                    context = context_of(axis, mode, sequence_parallel)
                    acc = own_terms(products(4, tokens), axis)  # summed in place
                    sum_products(acc, *scales(tokens), dtype, context)
                    sent[mode, sequence_parallel, dtype] = dict(axis.sent)
        return sent

    flags = (degree - 1) * 2
    values = tokens * N
    bf16_all_reduce = 2 * others * values * 2
    expected = {
        ("int32", False, torch.bfloat16): 2 * bf16_all_reduce,
        ("int32", False, torch.float32): 2 * bf16_all_reduce,
        ("int32", True, torch.bfloat16): bf16_all_reduce,
        ("int32", True, torch.float32): bf16_all_reduce,
        ("exact16", False, torch.bfloat16): bf16_all_reduce + flags,
        ("exact16", False, torch.float32): others * values * (2 + 4) + flags,
        ("exact16", True, torch.bfloat16): bf16_all_reduce / 2 + flags,
        ("exact16", True, torch.float32): bf16_all_reduce / 2 + flags,
    }
    for sent in on_axis(degree, run):
        assert sent == {key: {"activations": count} for key, count in expected.items()}
