"""Ternary layers: the textbook's values and gradients alone, the same bits at every TP degree."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.tensor_parallel import (
    BitLinear,
    BlockPartition,
    ColumnParallelBitLinear,
    LayerContext,
    RowParallelBitLinear,
    Span,
    ternarize_layers,
)
from megabit_kernels import TernaryWeight, numerics

T = TypeVar("T")
CPU = torch.device("cpu")
TOKENS, WIDE, NARROW, BLOCKS = 12, 52, 24, 4  # 52 columns in 4 blocks: 12, 12, 12, 16
SPLITS = [(2, False), (2, True), (4, False), (4, True)]


def on_axis(degree: int, function: Callable[[Axis], T]) -> list[T]:
    def rank_main() -> T:
        return function(ParallelMesh.create(degree, 1, CPU).tp if degree > 1 else Axis.single("tp"))

    return run_ranks(rank_main, degree)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven_weight(rows: int, columns: int, dim: int) -> Tensor:
    """Far larger at the end of ``dim`` than at its beginning, so that a shard's mean|W| is not the
    logical tensor's."""
    size = (rows, columns)[dim]
    growth = torch.logspace(-2, 1, size)
    return randn(rows, columns, seed=1) * (growth[:, None] if dim == 0 else growth)


def own(x: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size)[axis.rank]


def context_of(axis: Axis, sequence_parallel: bool) -> LayerContext:
    return replace(LayerContext.single(), tp=axis, sequence_parallel=sequence_parallel)


def set_weight(layer: nn.Module, weight: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)


# Alone


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # The reference sums dequantized numbers, x + (x̂ − x) among them, where the layer sums integers:
    # some units in the last place of terms of size 1.
    [(torch.float32, 2e-5), (torch.float64, 1e-13)],
)
@pytest.mark.parametrize("shape", [(20,), (7, 20), (2, 3, 20), (0, 20)])
def test_the_textbook_layer(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    layer = BitLinear(20, 9, dtype)
    set_weight(layer, randn(9, 20))
    x = randn(*shape, seed=2).to(dtype).requires_grad_()
    grad = randn(*shape[:-1], 9, seed=3).to(dtype)
    y = layer(x)
    found = torch.autograd.grad(y, (x, layer.weight), grad)

    weight = layer.weight.detach().clone().requires_grad_()
    reference = numerics.fake_quantized_linear(x, weight)
    wanted = torch.autograd.grad(reference, (x, weight), grad)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(y, reference, **close)
    torch.testing.assert_close(found[0], wanted[0], **close)
    torch.testing.assert_close(found[1], wanted[1], **close)


def test_bf16_activations_take_the_integer_path_too() -> None:
    layer = BitLinear(20, 9)
    x = randn(7, 20).bfloat16()
    codes, gamma = numerics.absmean_ternarize(layer.weight.detach())
    scale = numerics.activation_scale(x.float().abs().amax(-1, keepdim=True))
    acc = numerics.quantize_activation(x.float(), scale).int() @ codes.int().t()
    assert torch.equal(layer(x), (acc * (scale * gamma)).bfloat16())


def test_one_token_in_any_memory_layout() -> None:
    """A row that is a transposed column has strides (1, 1)."""
    layer, column = BitLinear(64, 16), randn(64, 1)
    assert torch.equal(layer(column.t()), layer(column.flatten()[None].clone()))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: torch.optim.SGD(p, lr=3.0), id="SGD"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.02, foreach=False), id="AdamW"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True), id="AdamW, foreach"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.02, fused=True), id="AdamW, fused"),
    ],
)
def test_any_optimizer_of_torch_trains_it(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    student, teacher = BitLinear(16, 16), BitLinear(16, 16)
    x = randn(256, 16)
    target = teacher(x).detach()
    optimizer = make(list(student.parameters()))
    losses = []
    for _ in range(120):
        optimizer.zero_grad()
        before = student.ternary()
        loss = (student(x) - target).square().mean()
        with torch.no_grad():
            student(x)  # a look in between must not keep the codes from before the step
        loss.backward()
        optimizer.step()
        assert student.ternary() is not before
        codes, gamma = numerics.absmean_ternarize(student.weight.detach())
        assert torch.equal(student.ternary().codes(), codes)
        assert torch.equal(student.ternary().scale, gamma)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_microbatches_derive_nothing_anew() -> None:
    layer = ColumnParallelBitLinear(8, BlockPartition(8, 2).span(0, 1), LayerContext.single())
    set_weight(layer, randn(8, 8))
    before = layer.ternary()
    for microbatch in range(3):
        layer(randn(4, 8, seed=microbatch)).sum().backward()
        assert layer.ternary() is before
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert layer.ternary() is not before


def test_loaded_or_converted_weights_are_quantized_anew() -> None:
    layer, other = BitLinear(8, 8), BitLinear(8, 8)
    for change in (
        lambda: layer.load_state_dict(other.state_dict()),
        lambda: layer.load_state_dict({"weight": -other.weight.detach()}, assign=False),
        lambda: nn.init.ones_(layer.weight),
        lambda: set_weight(layer, randn(8, 8)),
        lambda: layer.double(),
    ):
        before = layer.ternary()
        change()
        assert layer.ternary() is not before
        codes, gamma = numerics.absmean_ternarize(layer.weight.detach())
        assert torch.equal(layer.ternary().codes(), codes)
        assert torch.equal(layer.ternary().scale, gamma)
    assert list(layer.state_dict()) == ["weight"]  # codes are derived, never stored


def test_a_layer_without_its_latent_weight_computes_with_the_codes_it_receives() -> None:
    """As in training: what it holds is codes and γ, and where gradients go is a shape."""
    span = BlockPartition(8, 2).span(0, 1)
    layer, expected = (ColumnParallelBitLinear(8, span, LayerContext.single()) for _ in range(2))
    for other in (layer, expected):
        set_weight(other, randn(8, 8))
    ternary = layer.ternary()
    newer = TernaryWeight.from_latent(randn(8, 8, seed=1), torch.tensor(0.7))
    x, grad = randn(5, 8, seed=2), randn(5, 8, seed=3)
    wanted = torch.autograd.grad(expected(x.requires_grad_()), (x, expected.weight), grad)

    layer.give_up_latent()
    assert layer.weight.is_meta
    assert layer.weight.shard == expected.weight.shard
    collected: list[Tensor] = []
    layer.weight.collect(collected.append)
    layer.receive(ternary)
    assert layer.ternary() is ternary
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    assert torch.equal(dx, wanted[0])
    y.backward(grad)
    assert layer.weight.grad is None
    assert torch.equal(collected[-1], wanted[1])

    # Newer ones are waited for by the forward pass that needs them.
    layer.weight.expect(lambda: layer.receive(newer))
    assert torch.equal(layer(x), ternary_product(x, newer))


def ternary_product(x: Tensor, weight: TernaryWeight) -> Tensor:
    scale = numerics.activation_scale(x.detach().abs().amax(-1, keepdim=True))
    acc = numerics.quantize_activation(x.detach(), scale).int() @ weight.codes().int().t()
    return numerics.dequantize_product(acc, scale, weight.scale, x.dtype)


def test_a_copy_is_a_layer_of_its_own() -> None:
    """As torch.optim.swa_utils.AveragedModel makes one."""
    layer, x = BitLinear(8, 8), randn(3, 8)
    copied = copy.deepcopy(layer)
    before = layer(x)
    assert torch.equal(copied(x), before)
    set_weight(copied, randn(8, 8))
    assert not torch.equal(copied(x), before)
    assert torch.equal(layer(x), before)


# Split over ranks


def column_rows(axis: Axis) -> Span:
    return BlockPartition(WIDE, BLOCKS).span(axis.rank, axis.size)


def run_column(axis: Axis, sequence_parallel: bool) -> dict[str, Tensor]:
    weight = uneven_weight(WIDE, NARROW, dim=0)
    rows = column_rows(axis)
    layer = ColumnParallelBitLinear(NARROW, rows, context_of(axis, sequence_parallel))
    set_weight(layer, weight[rows.start : rows.stop])
    x = randn(TOKENS, NARROW, seed=2)
    x = own(x, axis).clone() if sequence_parallel else x
    x.requires_grad_()
    y = layer(x)
    y.backward(randn(TOKENS, WIDE, seed=3)[:, rows.start : rows.stop])
    return results_of(layer, x, y)


def run_row(axis: Axis, sequence_parallel: bool) -> dict[str, Tensor]:
    weight = uneven_weight(NARROW, WIDE, dim=1)
    columns = column_rows(axis)
    layer = RowParallelBitLinear(columns, NARROW, context_of(axis, sequence_parallel))
    set_weight(layer, weight[:, columns.start : columns.stop])
    # The largest magnitude of a token is on one rank only, and not on the same one for all.
    x = randn(TOKENS, WIDE, seed=2)[:, columns.start : columns.stop].clone().requires_grad_()
    y = layer(x)
    grad = randn(TOKENS, NARROW, seed=3)
    y.backward(own(grad, axis) if sequence_parallel else grad)
    return results_of(layer, x, y)


def results_of(layer: ColumnParallelBitLinear, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    assert x.grad is not None
    assert layer.weight.grad is not None
    return {
        "y": y.detach(),
        "codes": layer.ternary().codes(),
        "scale": layer.ternary().scale,
        "dx": x.grad,
        "dw": layer.weight.grad,
    }


@pytest.mark.parametrize(("degree", "sequence_parallel"), SPLITS)
def test_column_parallel(degree: int, sequence_parallel: bool) -> None:
    unsplit = run_column(Axis.single("tp"), False)
    ranks = on_axis(degree, lambda axis: run_column(axis, sequence_parallel))
    assert torch.equal(torch.cat([r["y"] for r in ranks], 1), unsplit["y"])
    assert_same_weight(ranks, unsplit, dim=0)
    # dX is summed over ranks in floating point: a few roundings of terms of size 10 in fp32.
    if sequence_parallel:
        dx = torch.cat([r["dx"] for r in ranks])
        torch.testing.assert_close(dx, unsplit["dx"], rtol=1e-5, atol=1e-5)
    else:
        for r in ranks:
            torch.testing.assert_close(r["dx"], unsplit["dx"], rtol=1e-5, atol=1e-5)
            assert torch.equal(r["dx"], ranks[0]["dx"])


@pytest.mark.parametrize(("degree", "sequence_parallel"), SPLITS)
def test_row_parallel(degree: int, sequence_parallel: bool) -> None:
    unsplit = run_row(Axis.single("tp"), False)
    ranks = on_axis(degree, lambda axis: run_row(axis, sequence_parallel))
    if sequence_parallel:
        assert torch.equal(torch.cat([r["y"] for r in ranks]), unsplit["y"])
    else:
        assert all(torch.equal(r["y"], unsplit["y"]) for r in ranks)
    assert_same_weight(ranks, unsplit, dim=1)
    # A product of the same terms, of another shape: its order of summation may differ.
    dx = torch.cat([r["dx"] for r in ranks], 1)
    torch.testing.assert_close(dx, unsplit["dx"], rtol=1e-5, atol=1e-5)


def assert_same_weight(
    ranks: list[dict[str, Tensor]], unsplit: dict[str, Tensor], dim: int
) -> None:
    """Codes and γ bit by bit, dW to the rounding of a product of another shape."""
    assert torch.equal(torch.cat([r["codes"] for r in ranks], dim), unsplit["codes"])
    assert all(torch.equal(r["scale"], unsplit["scale"]) for r in ranks)
    dw = torch.cat([r["dw"] for r in ranks], dim)
    torch.testing.assert_close(dw, unsplit["dw"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_scale_per_shard_would_be_another_model(dim: int) -> None:
    """So the comparisons above can fail: each shard by itself gives other codes and another γ."""
    weight = uneven_weight(*((WIDE, NARROW) if dim == 0 else (NARROW, WIDE)), dim=dim)
    codes, scale = numerics.absmean_ternarize(weight)
    for degree in (2, 4):
        spans = [BlockPartition(WIDE, BLOCKS).span(rank, degree) for rank in range(degree)]
        shards = [weight.narrow(dim, span.start, span.width) for span in spans]
        by_shard = [numerics.absmean_ternarize(shard) for shard in shards]
        assert not torch.equal(torch.cat([c for c, _ in by_shard], dim), codes)
        assert all(s != scale for _, s in by_shard)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_replica_is_counted_once_in_the_scale(degree: int) -> None:
    """One KV head on all ranks (2 at degree 4: two ranks hold each), all of different magnitude."""
    kv_heads, head_dim = degree // 2, 4
    weight = uneven_weight(kv_heads * head_dim, NARROW, dim=0)

    def ternary(axis: Axis) -> tuple[Tensor, Tensor]:
        head = axis.rank * kv_heads // axis.size
        rows = BlockPartition(kv_heads * head_dim, kv_heads).blocks(head, head + 1)
        is_first = axis.rank * kv_heads % axis.size == 0
        rows = rows.owning(rows.start, rows.stop if is_first else rows.start)
        layer = ColumnParallelBitLinear(NARROW, rows, context_of(axis, False))
        set_weight(layer, weight[rows.start : rows.stop])
        return layer.ternary().codes(), layer.ternary().scale

    codes, scale = numerics.absmean_ternarize(weight)
    for rank, (found_codes, found_scale) in enumerate(on_axis(degree, ternary)):
        head = rank * kv_heads // degree
        assert torch.equal(found_codes, codes[head * head_dim : (head + 1) * head_dim])
        assert torch.equal(found_scale, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layers_at_once_are_the_same_as_one_by_one(dtype: torch.dtype) -> None:
    def ternary(axis: Axis) -> bool:
        context = replace(context_of(axis, False), compute_dtype=dtype)
        rows = column_rows(axis)
        layers = [
            ColumnParallelBitLinear(NARROW, rows, context),
            RowParallelBitLinear(rows, NARROW, context),
        ]
        set_weight(layers[0], uneven_weight(WIDE, NARROW, 0)[rows.start : rows.stop])
        set_weight(layers[1], uneven_weight(NARROW, WIDE, 1)[:, rows.start : rows.stop])
        one_by_one = [layer.ternary() for layer in layers]
        sent_bytes = axis.sent_bytes
        ternarize_layers(layers, axis)
        # Two int64 numbers for each layer, by a ring's two rounds.
        assert axis.sent_bytes - sent_bytes == 2 * (axis.size - 1) / axis.size * 8 * 2 * 2
        together = [layer.ternary() for layer in layers]
        return all(
            torch.equal(a.codes(), b.codes()) and torch.equal(a.scale, b.scale)
            for a, b in zip(one_by_one, together, strict=True)
        )

    assert all(on_axis(2, ternary))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_that_share_an_input(sequence_parallel: bool) -> None:
    """``forward_together`` gives what separate calls give, at the communication of one."""

    def compare(axis: Axis) -> tuple[float, float]:
        rows = column_rows(axis)
        context = context_of(axis, sequence_parallel)
        layers = [ColumnParallelBitLinear(NARROW, rows, context) for _ in range(3)]
        for seed, layer in enumerate(layers):
            set_weight(layer, randn(WIDE, NARROW, seed=seed)[rows.start : rows.stop])
            layer.ternary()  # so that the bytes below are those of the forward pass only
        x = randn(TOKENS, NARROW, seed=9)
        x = (own(x, axis).clone() if sequence_parallel else x).requires_grad_()
        grads = [randn(TOKENS, rows.width, seed=seed) for seed in range(3)]
        weights = [layer.weight for layer in layers]

        start = axis.sent_bytes
        together = layers[0].forward_together(layers, x)
        found = torch.autograd.grad(together, (x, *weights), grads)
        sent_together = axis.sent_bytes - start
        separate = [layer(x) for layer in layers]
        wanted = torch.autograd.grad(separate, (x, *weights), grads)
        sent_separate = axis.sent_bytes - start - sent_together

        for a, b in zip((*together, *found[1:]), (*separate, *wanted[1:]), strict=True):
            assert torch.equal(a, b)
        # dX adds three products before the sum over ranks, not after it.
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
        return sent_together, sent_separate

    for together, separate in on_axis(2, compare):
        assert separate == 3 * together > 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_known_absmax_saves_finding_it(sequence_parallel: bool) -> None:
    def compare(axis: Axis) -> tuple[bool, bool]:
        span = column_rows(axis)
        context = context_of(axis, sequence_parallel)
        column = ColumnParallelBitLinear(NARROW, span, context)
        row = RowParallelBitLinear(span, NARROW, context)
        set_weight(column, randn(WIDE, NARROW)[span.start : span.stop])
        set_weight(row, randn(NARROW, WIDE)[:, span.start : span.stop])
        x, wide = randn(TOKENS, NARROW), randn(TOKENS, WIDE)
        x = own(x, axis) if sequence_parallel else x
        wide_own = wide[:, span.start : span.stop]
        return (
            torch.equal(column(x), column(x, x.abs().amax(-1, keepdim=True))),
            torch.equal(row(wide_own), row(wide_own, wide.abs().amax(-1, keepdim=True))),
        )

    assert on_axis(2, compare) == [(True, True)] * 2


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_stay_exact(sign: int) -> None:
    """131,072 times ±127 in int32, over two ranks: half of it is already beyond fp32's 2^23."""
    width = 131_072

    def product(axis: Axis) -> Tensor:
        columns = BlockPartition(width, 4).span(axis.rank, axis.size)
        layer = RowParallelBitLinear(columns, 3, context_of(axis, False))
        weight = torch.ones(3, width)
        weight[1] = -1
        weight[2, 0] = -1
        set_weight(layer, weight[:, columns.start : columns.stop])
        return layer(torch.full((2, columns.width), 127.0 * sign)).detach()  # s = 1, γ = 1

    full = 127.0 * width * sign
    expected = torch.tensor([full, -full, full - 254 * sign]).expand(2, 3)
    for degree in (1, 2):
        for y in on_axis(degree, product):
            assert torch.equal(y, expected)
