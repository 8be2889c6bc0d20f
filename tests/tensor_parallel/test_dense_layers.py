"""Dense column- and row-parallel layers against ``F.linear``."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.tensor_parallel import (
    BlockPartition,
    ColumnParallelLinear,
    LayerContext,
    RowParallelLinear,
)

T = TypeVar("T")
TOKENS, WIDE, NARROW = 12, 52, 20  # 52 in 4 blocks: 12, 12, 12, 16
DTYPE = torch.float64
# Ranks add terms of size 1 in another order than one product does: a few roundings of 1e-16.
CLOSE = {"rtol": 1e-13, "atol": 1e-13}
LAYOUTS = pytest.mark.parametrize(
    ("degree", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)]
)


def on_axis(degree: int, function: Callable[[Axis], T]) -> list[T]:
    def rank_main() -> T:
        mesh = ParallelMesh.create(degree, 1, torch.device("cpu")) if degree > 1 else ParallelMesh()
        return function(mesh.tp)

    return run_ranks(rank_main, degree)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def by_torch(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dX and dW."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = F.linear(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


def by_layer(
    layer: ColumnParallelLinear | RowParallelLinear, x: Tensor, weight: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        layer.weight.copy_(weight)
    x = x.clone().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, layer.weight), grad)


def context_of(axis: Axis, sequence_parallel: bool) -> LayerContext:
    return replace(LayerContext.single(DTYPE), tp=axis, sequence_parallel=sequence_parallel)


@LAYOUTS
def test_column_parallel(degree: int, sequence_parallel: bool) -> None:
    x, weight = randn(TOKENS, NARROW, seed=0), randn(WIDE, NARROW, seed=1)
    grad = randn(TOKENS, WIDE, seed=2)

    def run(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
        rows = BlockPartition(WIDE, 4).span(axis.rank, axis.size)
        layer = ColumnParallelLinear(NARROW, rows, context_of(axis, sequence_parallel))
        own_x = x.chunk(axis.size)[axis.rank] if sequence_parallel else x
        own_rows = slice(rows.start, rows.stop)
        return by_layer(layer, own_x, weight[own_rows], grad[:, own_rows])

    y, dx, dw = by_torch(x, weight, grad)
    ys, dxs, dws = zip(*on_axis(degree, run), strict=True)
    torch.testing.assert_close(torch.cat(ys, 1), y, **CLOSE)
    torch.testing.assert_close(torch.cat(dws, 0), dw, **CLOSE)
    for found in [torch.cat(dxs)] if sequence_parallel else dxs:
        torch.testing.assert_close(found, dx, **CLOSE)


@LAYOUTS
def test_row_parallel(degree: int, sequence_parallel: bool) -> None:
    x, weight = randn(TOKENS, WIDE, seed=0), randn(NARROW, WIDE, seed=1)
    grad = randn(TOKENS, NARROW, seed=2)

    def run(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
        columns = BlockPartition(WIDE, 4).span(axis.rank, axis.size)
        layer = RowParallelLinear(columns, NARROW, context_of(axis, sequence_parallel))
        own_grad = grad.chunk(axis.size)[axis.rank] if sequence_parallel else grad
        own_columns = slice(columns.start, columns.stop)
        return by_layer(layer, x[:, own_columns], weight[:, own_columns], own_grad)

    y, dx, dw = by_torch(x, weight, grad)
    ys, dxs, dws = zip(*on_axis(degree, run), strict=True)
    torch.testing.assert_close(torch.cat(dxs, 1), dx, **CLOSE)
    torch.testing.assert_close(torch.cat(dws, 1), dw, **CLOSE)
    for found in [torch.cat(ys)] if sequence_parallel else ys:
        torch.testing.assert_close(found, y, **CLOSE)


def test_layers_that_share_an_input_gather_it_once() -> None:
    def run(axis: Axis) -> tuple[bool, float]:
        rows = BlockPartition(WIDE, 4).span(axis.rank, axis.size)
        context = context_of(axis, sequence_parallel=True)
        layers = [ColumnParallelLinear(NARROW, rows, context) for _ in range(2)]
        for seed, layer in enumerate(layers):
            with torch.no_grad():
                layer.weight.copy_(randn(WIDE, NARROW, seed=seed)[rows.start : rows.stop])
        x = randn(TOKENS, NARROW, seed=2).chunk(axis.size)[axis.rank]
        together = layers[0].forward_together(layers, x)
        sent_bytes = axis.sent_bytes
        separate = [layer(x) for layer in layers]
        equal = all(torch.equal(a, b) for a, b in zip(together, separate, strict=True))
        return equal, sent_bytes

    # Each rank sends its half of the tokens, 8 bytes for each value.
    assert on_axis(2, run) == [(True, TOKENS / 2 * NARROW * 8)] * 2
