"""Backward through split ternary layers: what is sent and when, and layout-exact sums."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.reduce import Pending, own_rows
from megabit.tensor_parallel import (
    BlockPartition,
    ColumnParallelBitLinear,
    ColumnParallelLinear,
    ForwardPass,
    LayerContext,
    Noise,
    RowParallelBitLinear,
    ShardedParameter,
    context,
    enter_column_parallel,
    ternary_backward,
    vocab_parallel_logits,
)
from megabit.tensor_parallel.parameter import Shard

T = TypeVar("T")
CPU = torch.device("cpu")
TOKENS, WIDE, NARROW, BLOCKS = 16, 52, 24, 4  # 52 in 4 blocks: 12, 12, 12, 16
TRAINING = ForwardPass(Noise(1, 2, 3))
SPLITS = [(2, False), (2, True), (4, False), (4, True)]
INT8 = {"ternary_backward_dtype": torch.int8}
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def on_axis(degree: int, function: Callable[[Axis], T]) -> list[T]:
    def rank_main() -> T:
        return function(ParallelMesh.create(degree, 1, CPU).tp if degree > 1 else Axis.single("tp"))

    return run_ranks(rank_main, degree)


def weight_of(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int) -> Tensor:
    """Of very different sizes along the last dimension: sums in another order show."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-1, 1, shape[-1])


def context_of(axis: Axis, sequence_parallel: bool, **changes: Any) -> LayerContext:
    sequence_parallel = sequence_parallel and axis.size > 1
    return replace(LayerContext.single(), tp=axis, sequence_parallel=sequence_parallel, **changes)


def own_tokens(x: Tensor, layer_context: LayerContext) -> Tensor:
    return own_rows(x, layer_context.tp) if layer_context.sequence_parallel else x


def column_layers(layer_context: LayerContext, count: int) -> list[ColumnParallelBitLinear]:
    tp = layer_context.tp
    rows = BlockPartition(WIDE, BLOCKS).span(tp.rank, tp.size)
    layers = [ColumnParallelBitLinear(NARROW, rows, layer_context) for _ in range(count)]
    for number, layer in enumerate(layers):
        layer.name = f"layers.0.{number}"
        with torch.no_grad():
            layer.weight.copy_(weight_of(WIDE, NARROW, number)[rows.start : rows.stop])
    return layers


def row_layer(layer_context: LayerContext) -> RowParallelBitLinear:
    tp = layer_context.tp
    columns = BlockPartition(WIDE, BLOCKS).span(tp.rank, tp.size)
    layer = RowParallelBitLinear(columns, NARROW, layer_context)
    layer.name = "layers.0.row"
    with torch.no_grad():
        layer.weight.copy_(weight_of(NARROW, WIDE, 5)[:, columns.start : columns.stop])
    return layer


# Sequence-parallel gathers


@pytest.mark.parametrize("degree", [2, 4])
def test_gathers_send_int8_and_a_scale(degree: int) -> None:
    """Of each token K + 4 bytes where a dense layer in bf16 sends 2·K, and the same bits as if bf16
    had been gathered and quantized then."""
    x = randn(TOKENS, NARROW, seed=9).bfloat16()

    def run(axis: Axis) -> tuple[float, float, Tensor, Tensor]:
        layer_context = context_of(axis, True, compute_dtype=torch.bfloat16)
        ternary = column_layers(layer_context, 2)
        dense = ColumnParallelLinear(NARROW, ternary[0].weight.shard.span, layer_context)
        own = own_rows(x, axis)
        for layer in ternary:
            layer.ternary()
        axis.sent.clear()
        y, _ = ColumnParallelBitLinear.forward_together(ternary, own)
        int8_bytes = dict(axis.sent)
        axis.sent.clear()
        dense(own)
        bf16_bytes = dict(axis.sent)
        assert int8_bytes.keys() == bf16_bytes.keys() == {"activations"}
        gathered = x if axis.group is None else enter_column_parallel(own, layer_context)
        by_gathering_bf16 = column_layers(
            replace(layer_context, tp=axis, sequence_parallel=False), 1
        )
        expected = by_gathering_bf16[0](gathered)
        return int8_bytes["activations"], bf16_bytes["activations"], y.detach(), expected.detach()

    others = (degree - 1) / degree
    for int8_bytes, bf16_bytes, y, expected in on_axis(degree, run):
        assert bf16_bytes == others * TOKENS * 2 * NARROW
        assert int8_bytes == bf16_bytes / 2 + others * TOKENS * 4
        assert torch.equal(y, expected)


# dX travels while dW is computed


class Recorder:
    """Notes products and collectives of a layer, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        for name, event in {
            "input_gradient": "dX",
            "int8_input_gradient": "dX",
            "weight_gradients": "dW",
            "int8_weight_gradients": "dW",
        }.items():
            monkeypatch.setattr(
                ternary_backward, name, self._noting(event, getattr(ternary_backward, name))
            )
        for name in ("all_reduce", "reduce_scatter", "tree_all_reduce", "tree_reduce_scatter"):
            original = getattr(context, f"start_{name}")
            monkeypatch.setattr(context, f"start_{name}", self._starting(name, original))

    def _noting(self, event: str, function: Callable[..., T]) -> Callable[..., T]:
        def noted(*args: Any, **kwargs: Any) -> T:
            self.events.append(event)
            return function(*args, **kwargs)

        return noted

    def _starting(self, name: str, function: Callable[..., Pending]) -> Callable[..., Pending]:
        def started(*args: Any, **kwargs: Any) -> Pending:
            self.events.append(f"start {name}")
            pending = function(*args, **kwargs)
            assert pending.work is not None
            pending.wait = self._noting(f"wait {name}", pending.wait)  # type: ignore[method-assign]
            return pending

        return started


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(
    ("sequence_parallel", "trees", "collective"),
    [
        (False, None, "all_reduce"),
        (True, None, "reduce_scatter"),
        (False, BLOCKS, "tree_all_reduce"),
        (True, BLOCKS, "tree_reduce_scatter"),
    ],
)
def test_dx_travels_while_dw_is_computed(
    sequence_parallel: bool, trees: int | None, collective: str, dtype: torch.dtype
) -> None:
    def run(axis: Axis) -> list[str]:
        layer_context = context_of(
            axis, sequence_parallel, tree_blocks=trees, ternary_backward_dtype=dtype
        )
        layers = column_layers(layer_context, 3)
        x = own_tokens(randn(TOKENS, NARROW, seed=9), layer_context).clone().requires_grad_()
        ys = ColumnParallelBitLinear.forward_together(layers, x, None, TRAINING)
        with pytest.MonkeyPatch.context() as monkeypatch:
            recorder = Recorder(monkeypatch)
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        assert all(layer.weight.grad is not None for layer in layers)
        return recorder.events

    for events in on_axis(2, run):
        started, waited = events.index(f"start {collective}"), events.index(f"wait {collective}")
        # All of dX, then the one collective, all of dW, and only then the wait.
        assert set(events[:started]) == {"dX"}
        assert set(events[started + 1 : waited]) == {"dW"}
        assert waited == len(events) - 1


# Layout-exact training


def run_columns(axis: Axis, sequence_parallel: bool, **changes: Any) -> dict[str, Tensor]:
    layer_context = context_of(axis, sequence_parallel, **changes)
    layers = column_layers(layer_context, 3)
    rows = layers[0].weight.shard.span
    x = own_tokens(randn(TOKENS, NARROW, seed=9), layer_context).clone().requires_grad_()
    ys = ColumnParallelBitLinear.forward_together(layers, x, None, TRAINING)
    grads = [randn(TOKENS, WIDE, seed=20 + i)[:, rows.start : rows.stop] for i in range(3)]
    torch.autograd.backward(ys, grads)
    assert x.grad is not None
    dws = [layer.weight.grad for layer in layers]
    return {"dx": x.grad, "dw": torch.stack([dw for dw in dws if dw is not None], 1)}


def run_rows(axis: Axis, sequence_parallel: bool, **changes: Any) -> dict[str, Tensor]:
    layer_context = context_of(axis, sequence_parallel, **changes)
    layer = row_layer(layer_context)
    columns = layer.weight.shard.span
    x = randn(TOKENS, WIDE, seed=9)[:, columns.start : columns.stop].clone().requires_grad_()
    y = layer(x, None, TRAINING)
    y.backward(own_tokens(randn(TOKENS, NARROW, seed=20), layer_context))
    assert x.grad is not None
    assert layer.weight.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


def run_logits(axis: Axis, sequence_parallel: bool, **changes: Any) -> dict[str, Tensor]:
    layer_context = context_of(axis, sequence_parallel, **changes)
    rows = BlockPartition(WIDE, BLOCKS).span(axis.rank, axis.size)
    weight = weight_of(WIDE, NARROW, 1)[rows.start : rows.stop].clone()
    parameter = ShardedParameter(Shard((WIDE, NARROW), 0, rows), torch.float32, CPU, weight)
    x = own_tokens(randn(TOKENS, NARROW, seed=9), layer_context).clone().requires_grad_()
    y = vocab_parallel_logits(
        enter_column_parallel(x, layer_context), parameter, rows, layer_context
    )
    y.backward(randn(TOKENS, WIDE, seed=20)[:, rows.start : rows.stop])
    assert x.grad is not None
    assert parameter.grad is not None
    return {"dx": x.grad, "dw": parameter.grad}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("degree", "sequence_parallel"), SPLITS)
def test_exact_column_layers(degree: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
    changes = {"tree_blocks": BLOCKS, "ternary_backward_dtype": dtype}
    unsplit = run_columns(Axis.single("tp"), False, **changes)
    ranks = on_axis(degree, lambda axis: run_columns(axis, sequence_parallel, **changes))
    assert_same_dx(ranks, unsplit["dx"], sequence_parallel)
    assert torch.equal(torch.cat([r["dw"] for r in ranks]), unsplit["dw"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("degree", "sequence_parallel"), SPLITS)
def test_exact_row_layers(degree: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
    changes = {"tree_blocks": BLOCKS, "ternary_backward_dtype": dtype}
    unsplit = run_rows(Axis.single("tp"), False, **changes)
    ranks = on_axis(degree, lambda axis: run_rows(axis, sequence_parallel, **changes))
    assert torch.equal(torch.cat([r["dx"] for r in ranks], 1), unsplit["dx"])
    assert torch.equal(torch.cat([r["dw"] for r in ranks], 1), unsplit["dw"])


@pytest.mark.parametrize(("degree", "sequence_parallel"), SPLITS)
def test_exact_logits(degree: int, sequence_parallel: bool) -> None:
    unsplit = run_logits(Axis.single("tp"), False, tree_blocks=BLOCKS)
    ranks = on_axis(degree, lambda axis: run_logits(axis, sequence_parallel, tree_blocks=BLOCKS))
    assert_same_dx(ranks, unsplit["dx"], sequence_parallel)
    assert torch.equal(torch.cat([r["dw"] for r in ranks]), unsplit["dw"])


def assert_same_dx(ranks: list[dict[str, Tensor]], dx: Tensor, sequence_parallel: bool) -> None:
    if sequence_parallel:
        assert torch.equal(torch.cat([r["dx"] for r in ranks]), dx)
    else:
        assert all(torch.equal(r["dx"], dx) for r in ranks)


@pytest.mark.parametrize("run", [run_columns, run_logits])
def test_without_the_tree_dx_has_other_bits(run: Callable[..., dict[str, Tensor]]) -> None:
    """So the comparisons above can fail: the same data, summed as it comes."""
    unsplit = run(Axis.single("tp"), False)["dx"]
    found = on_axis(4, lambda axis: run(axis, False))[0]["dx"]
    assert not torch.equal(found, unsplit)
    # And one process' own tree is another sum than its one product.
    assert not torch.equal(run(Axis.single("tp"), False, tree_blocks=BLOCKS)["dx"], unsplit)


# Stochastic rounding


def test_noise_of_the_rounding_is_of_a_layer_and_a_microbatch() -> None:
    """The same seed gives the same gradients; another microbatch or another layer others."""

    def dx_of(microbatch: int, name: str) -> Tensor:
        (layer,) = column_layers(context_of(Axis.single("tp"), False, **INT8), 1)
        layer.name = name
        x = randn(TOKENS, NARROW, seed=9).requires_grad_()
        y = layer(x, None, ForwardPass(Noise(0, 0, microbatch)))
        (dx,) = torch.autograd.grad(y, x, randn(TOKENS, WIDE, seed=20))
        return dx

    first = dx_of(0, "a")
    assert torch.equal(first, dx_of(0, "a"))
    assert not torch.equal(first, dx_of(1, "a"))
    assert not torch.equal(first, dx_of(0, "b"))


def test_layers_with_one_input_round_independently() -> None:
    """Two layers with the same weight and dY: with one seed, dX would be twice the one's."""
    layers = column_layers(context_of(Axis.single("tp"), False, **INT8), 2)
    with torch.no_grad():
        layers[1].weight.copy_(layers[0].weight)
    grad = randn(TOKENS, WIDE, seed=20)
    dxs = []
    for chosen in (layers[:1], layers):
        x = randn(TOKENS, NARROW, seed=9).requires_grad_()
        ys = ColumnParallelBitLinear.forward_together(chosen, x, None, TRAINING)
        dxs += torch.autograd.grad(ys, x, [grad] * len(chosen))
    assert not torch.equal(dxs[1], 2 * dxs[0])


@pytest.mark.parametrize("trees", [None, BLOCKS])
def test_the_rounded_gradients_are_right_on_average(trees: int | None) -> None:
    """Over 400 microbatches, against the gradients in fp32."""

    def gradients(dtype: torch.dtype, microbatch: int) -> Tensor:
        layer_context = context_of(
            Axis.single("tp"), False, tree_blocks=trees, ternary_backward_dtype=dtype
        )
        x = randn(TOKENS, NARROW, seed=9).requires_grad_()
        forward_pass = ForwardPass(Noise(0, 0, microbatch))
        (y,) = ColumnParallelBitLinear.forward_together(
            column_layers(layer_context, 1), x, None, forward_pass
        )
        (dx,) = torch.autograd.grad(y, x, randn(TOKENS, WIDE, seed=20))
        return dx

    expected = gradients(torch.float32, 0)
    draws = torch.stack([gradients(torch.int8, i) for i in range(400)])
    error = (draws.mean(0) - expected).abs()
    # Five and a half standard errors for each of 384 elements, and fp32's own rounding.
    assert (error <= 5.5 * draws.std(0) / 400**0.5 + 1e-4 * expected.abs().max()).all()
    assert draws.std(0).min() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trees", [None, BLOCKS])
def test_the_forward_pass_does_not_depend_on_the_backward_mode(
    dtype: torch.dtype, trees: int | None
) -> None:
    axis = Axis.single("tp")
    plain = run_rows(axis, False)["y"]
    assert torch.equal(
        run_rows(axis, False, tree_blocks=trees, ternary_backward_dtype=dtype)["y"], plain
    )
