"""Ternary layers that compute in floating point: λ ramps and full-precision activations, against an
independent straight-through estimator in plain torch."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.tensor_parallel import (
    ActivationProbe,
    BitLinear,
    BlockPartition,
    ColumnParallelBitLinear,
    ColumnParallelLinear,
    ForwardPass,
    Kept,
    LayerContext,
    Quantization,
    RowParallelBitLinear,
    RowParallelLinear,
    TernaryLayer,
    WeightGradientQueue,
)
from megabit.tensor_parallel.activations import ActivationQuantizer
from megabit_kernels import TernaryWeight

T = TypeVar("T")
CPU = torch.device("cpu")
TOKENS, WIDE, NARROW, BLOCKS = 12, 52, 24, 4  # 52 columns in 4 blocks: 12, 12, 12, 16
A16 = Quantization(full_precision_activations=True)
MIXED = [Quantization(0.0), Quantization(0.3), A16, replace(A16, share=0.3)]
# Ranks add terms of size 10 in another order than one product does: some roundings of 2^-53.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def set_weight(layer: nn.Module, weight: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)


def at(quantization: Quantization) -> ForwardPass:
    return ForwardPass(quantization=quantization)


def plain(x: Tensor, weight: Tensor, quantization: Quantization) -> Tensor:
    """What the documentation says, by autograd: ``detach`` makes it straight-through."""
    share = quantization.share
    gamma = weight.detach().double().abs().mean().clamp_min(1e-5).to(weight.dtype)
    code = (weight.detach() / gamma).round().clamp(-1, 1)
    w = weight + (share * (gamma * code - weight)).detach()
    if not quantization.full_precision_activations:
        s = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
        x_hat = (x.detach() / s).round().clamp(-128, 127) * s
        x = x + (share * (x_hat - x)).detach()
    return x @ w.t()


@pytest.mark.parametrize("quantization", [*MIXED, Quantization(1.0)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Sums of 52 products of size 1, of numbers that were rounded in other places: x + (x̂ − x) is
    # not x̂ here.
    [(torch.float32, 2e-5), (torch.float64, 1e-13)],
)
def test_a_layer_is_a_straight_through_estimator(
    quantization: Quantization, dtype: torch.dtype, tolerance: float
) -> None:
    layer = BitLinear(WIDE, NARROW, dtype)
    # Below 1: of larger weights γ has fewer bits than fp64 (``numerics.fixed_point_abs_sum``).
    set_weight(layer, 0.2 * randn(NARROW, WIDE, dtype=dtype))
    x = randn(TOKENS, WIDE, seed=1, dtype=dtype).requires_grad_()
    grad = randn(TOKENS, NARROW, seed=2, dtype=dtype)
    y = layer(x, forward_pass=at(quantization))
    found = y, *torch.autograd.grad(y, (x, layer.weight), grad)
    weight = layer.weight.detach().clone().requires_grad_()
    reference = plain(x, weight, quantization)
    wanted = reference, *torch.autograd.grad(reference, (x, weight), grad)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    # Each setting is told from the others by much more than that.
    for other in (*MIXED, Quantization(1.0)):
        if other != quantization:
            assert (plain(x, weight, other) - reference).abs().max() > 1e-3


def test_nothing_quantized_is_a_dense_layer_bit_by_bit() -> None:
    span = BlockPartition(WIDE, BLOCKS).span(0, 1)
    context = LayerContext.single()
    ternary_layers = [
        ColumnParallelBitLinear(NARROW, span, context),
        RowParallelBitLinear(span, NARROW, context),
    ]
    dense_layers = [
        ColumnParallelLinear(NARROW, span, context),
        RowParallelLinear(span, NARROW, context),
    ]
    for ternary, dense in zip(ternary_layers, dense_layers, strict=True):
        n, k = ternary.weight.shape
        for layer in (ternary, dense):
            set_weight(layer, randn(n, k))
        x, grad = randn(TOKENS, k, seed=1).requires_grad_(), randn(TOKENS, n, seed=2)
        found, wanted = ternary(x, forward_pass=at(Quantization(0.0))), dense(x)
        assert torch.equal(found, wanted)
        pair = (
            torch.autograd.grad(y, (x, layer.weight), grad)
            for y, layer in ((found, ternary), (wanted, dense))
        )
        for a, b in zip(*pair, strict=True):
            assert torch.equal(a, b)


def test_full_precision_activations_multiply_the_codes_of_the_integer_path() -> None:
    """W1.58A16 in bf16: activations as they are, times γ·code, rounded to bf16 once each."""
    layer = BitLinear(WIDE, NARROW)
    layer.quantizer = ActivationQuantizer("none")
    x = randn(TOKENS, WIDE).bfloat16()
    ternary = layer.ternary()
    weight = (ternary.codes() * ternary.scale).bfloat16()
    assert torch.equal(layer(x), F.linear(x, weight))
    # By the model's setting, or by that of the pass.
    layer.quantizer = ActivationQuantizer("int8")
    assert torch.equal(layer(x, forward_pass=at(A16)), F.linear(x, weight))
    assert not torch.equal(layer(x), F.linear(x, weight))


# Split over ranks


def on_axis(degree: int, function: Callable[[Axis], T]) -> list[T]:
    def rank_main() -> T:
        return function(ParallelMesh.create(degree, 1, CPU).tp if degree > 1 else Axis.single("tp"))

    return run_ranks(rank_main, degree)


def own(x: Tensor, axis: Axis, is_split: bool) -> Tensor:
    return x.chunk(axis.size)[axis.rank] if is_split else x


def run_split(axis: Axis, is_split: bool, is_row: bool, how: Quantization) -> list[Tensor]:
    """y, dX and dW of this rank, in fp64."""
    span = BlockPartition(WIDE, BLOCKS).span(axis.rank, axis.size)
    context = replace(LayerContext.single(torch.float64), tp=axis, sequence_parallel=is_split)
    held = slice(span.start, span.stop)
    draw = {"dtype": torch.float64}
    if is_row:
        layer = RowParallelBitLinear(span, NARROW, context)
        set_weight(layer, randn(NARROW, WIDE, **draw)[:, held])
        x = randn(TOKENS, WIDE, seed=1, **draw)[:, held].clone()
        grad = own(randn(TOKENS, NARROW, seed=2, **draw), axis, is_split)
    else:
        layer = ColumnParallelBitLinear(NARROW, span, context)
        set_weight(layer, randn(WIDE, NARROW, **draw)[held])
        x = own(randn(TOKENS, NARROW, seed=1, **draw), axis, is_split).clone()
        grad = randn(TOKENS, WIDE, seed=2, **draw)[:, held]
    x.requires_grad_()
    queue = WeightGradientQueue()
    y = layer(x, forward_pass=replace(at(how), weight_gradients=queue))
    y.backward(grad)
    assert layer.weight.grad is None
    queue.run()  # what is put off is the same
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize(("degree", "is_split"), [(2, False), (2, True), (4, False), (4, True)])
def test_layers_split_over_ranks(degree: int, is_split: bool) -> None:
    cases = [(is_row, how) for is_row in (False, True) for how in MIXED]

    def run(axis: Axis) -> list[list[Tensor]]:
        return [run_split(axis, is_split, *case) for case in cases]

    ranks = on_axis(degree, run)
    for number, (is_row, how) in enumerate(cases):
        y, dx, dw = run_split(Axis.single("tp"), False, is_row, how)
        ys, dxs, dws = zip(*(rank[number] for rank in ranks), strict=True)
        columns, tokens = (dxs, ys) if is_row else (ys, dxs)
        whole, per_token = (dx, y) if is_row else (y, dx)
        torch.testing.assert_close(torch.cat(columns, 1), whole, **CLOSE)
        for found in [torch.cat(tokens)] if is_split else tokens:
            torch.testing.assert_close(found, per_token, **CLOSE)
        torch.testing.assert_close(torch.cat(dws, 1 if is_row else 0), dw, **CLOSE)


# What a layer holds, and what it refuses


def trained_layer(kind: type[TernaryLayer] = ColumnParallelBitLinear) -> TernaryLayer:
    """A layer whose weight is a shape, as in training."""
    span = BlockPartition(8, 2).span(0, 1)
    context = LayerContext.single()
    layer = kind(8, span, context) if kind is ColumnParallelBitLinear else kind(span, 8, context)
    layer.name = "q_proj"
    layer.give_up_latent()
    return layer


@pytest.mark.parametrize("kind", [ColumnParallelBitLinear, RowParallelBitLinear])
def test_a_layer_computes_with_what_it_received_or_not_at_all(kind: type[TernaryLayer]) -> None:
    layer, x = trained_layer(kind), randn(3, 8)
    ternary = TernaryWeight.from_latent(randn(8, 8, seed=1))
    mixed = randn(8, 8, seed=2)

    layer.receive_mixed(mixed, 0.3)
    assert torch.equal(layer(x, forward_pass=at(replace(A16, share=0.3))), F.linear(x, mixed))
    layer(x, forward_pass=at(Quantization(0.3)))
    with pytest.raises(RuntimeError, match=r"q_proj is .* with λ = 0.3: it has no codes"):
        layer.ternary()
    for wrong in (Quantization(), A16):
        with pytest.raises(RuntimeError, match=r"with λ = 0.3: it has no codes"):
            layer(x, forward_pass=at(wrong))
    for wrong in (Quantization(0.4), Quantization(0.0), replace(A16, share=0.4)):
        with pytest.raises(RuntimeError, match=r"W̃ with λ = 0.3, and the forward pass has λ = 0"):
            layer(x, forward_pass=at(wrong))

    layer.receive(ternary)
    assert layer.mixed is None  # freed
    assert layer.ternary() is ternary
    layer(x)
    with pytest.raises(RuntimeError, match=r"q_proj is codes, and the forward pass has λ = 0.3"):
        layer(x, forward_pass=at(Quantization(0.3)))

    layer.receive_mixed(mixed, 0.5)
    assert layer._ternary is None
    layer.weight.expect(lambda: layer.receive(ternary))  # newer ones are waited for
    assert layer.mixed is None


def test_layers_with_one_input_quantize_it_alike() -> None:
    layers = [trained_layer(), trained_layer()]
    layers[1].quantizer = ActivationQuantizer("int4")
    for layer in layers:
        layer.receive(TernaryWeight.from_latent(randn(8, 8)))
    with pytest.raises(ValueError, match="in different ways"):
        ColumnParallelBitLinear.forward_together(layers, randn(3, 8))


# What a probe counts


def count_by_hand(x: Tensor) -> list[int]:
    """Values that become ±127 or beyond, and all."""
    s = x.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    codes = (x / s).round().clamp(-128, 127)
    return [int((codes.abs() >= 127).sum()), x.numel()]


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_probe_counts_each_input_once(share: float) -> None:
    """Ties at a token's largest value saturate together."""
    x = randn(TOKENS, 8)
    x[3] = torch.tensor([2.0, -2, 2, 1, 0, 0.5, -1, 1.999])
    probe = ActivationProbe()
    carried = replace(at(Quantization(share)), probe=probe)
    layers = [BitLinear(8, 8) for _ in range(3)]
    for name, layer in zip(("q", "k", "v"), layers, strict=True):
        layer.name = name
    layers[0].forward_together(layers, x, forward_pass=carried)
    # Layers with one input: under the name of the first.
    assert {name: c.tolist() for name, c in probe.counts.items()} == {"q": count_by_hand(x)}
    assert count_by_hand(x)[0] == TOKENS + 3
    layers[1](x, forward_pass=carried)
    layers[1](x[:5], forward_pass=carried)
    again = [a + b for a, b in zip(count_by_hand(x), count_by_hand(x[:5]), strict=True)]
    assert probe.counts["k"].tolist() == again
    # A recomputation is a second pass over the same.
    layers[2](x, forward_pass=replace(carried, kept=Kept()))
    layers[2](x, forward_pass=replace(carried, kept=Kept(is_replay=True)))
    assert probe.counts["v"].tolist() == count_by_hand(x)
    # Activations that are not quantized saturate nowhere.
    layers[0](x, forward_pass=replace(carried, quantization=A16))
    assert probe.counts["q"].tolist() == count_by_hand(x)


@pytest.mark.parametrize("is_split", [False, True])
def test_ranks_count_their_own_part(is_split: bool) -> None:
    wide, narrow = randn(TOKENS, WIDE), randn(TOKENS, NARROW, seed=1)

    def run(axis: Axis) -> dict[str, list[int]]:
        span = BlockPartition(WIDE, BLOCKS).span(axis.rank, axis.size)
        context = replace(LayerContext.single(), tp=axis, sequence_parallel=is_split)
        column = ColumnParallelBitLinear(NARROW, span, context)
        row = RowParallelBitLinear(span, NARROW, context)
        for name, layer in (("column", column), ("row", row)):
            layer.name = name
            nn.init.normal_(layer.weight)
        carried = ForwardPass(probe=ActivationProbe())
        column(own(narrow, axis, is_split), forward_pass=carried)
        row(wide[:, span.start : span.stop], forward_pass=carried)
        assert carried.probe is not None
        return {name: count.tolist() for name, count in carried.probe.counts.items()}

    first, second = on_axis(2, run)
    assert [a + b for a, b in zip(first["row"], second["row"], strict=True)] == count_by_hand(wide)
    if is_split:
        both = [a + b for a, b in zip(first["column"], second["column"], strict=True)]
        assert both == count_by_hand(narrow)
    else:
        assert first["column"] == second["column"] == count_by_hand(narrow)
