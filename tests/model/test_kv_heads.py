"""KV heads that ranks share: outputs and gradients are those of one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import pytest
import torch
from torch import Tensor

from megabit.config import ModelConfig, tree_blocks
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.model.attention import Attention
from megabit.model.initialize import initialize
from megabit.model.kv_heads import HeadSplit, KVHeads
from megabit.model.norm import Normalized
from megabit.model.rope import RotaryEmbedding
from megabit.reduce import own_rows
from megabit.tensor_parallel import LayerContext, Shard, sharded_parameters

T = TypeVar("T")
CPU = torch.device("cpu")
BATCH, LENGTH, HEAD_DIM = 2, 8, 8
TOKENS = BATCH * LENGTH
# (query heads, KV heads, TP): one rank for each KV head or several; KV heads that straddle ranks.
SPLITS = [(4, 2, 4), (8, 2, 4), (4, 1, 2), (6, 3, 2), (12, 3, 4), (4, 4, 2)]


def on_axis(degree: int, function: Callable[[Axis], T]) -> list[T]:
    def rank_main() -> T:
        return function(ParallelMesh.create(degree, 1, CPU).tp if degree > 1 else Axis.single("tp"))

    return run_ranks(rank_main, degree)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Alone


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "degree"), SPLITS)
def test_gradients_of_expanded_heads(
    heads: int, kv_heads: int, degree: int, is_exact: bool
) -> None:
    """Each rank that holds a KV head gets the whole gradient of it, in fp32."""
    k, v = (randn(BATCH, LENGTH, kv_heads, HEAD_DIM, seed=i).float() for i in range(2))
    grads = [randn(BATCH, LENGTH, heads, HEAD_DIM, seed=2 + i).float() for i in range(2)]

    def run(axis: Axis) -> tuple[list[int], list[Tensor], list[Tensor], dict[str, float]]:
        split = HeadSplit(heads, kv_heads, axis.rank, axis.size)
        trees = tree_blocks(heads) if is_exact else None
        context = replace(LayerContext.single(), tp=axis, tree_blocks=trees)
        held, query = list(split.kv), list(split.query)
        own = [x[:, :, held].clone().requires_grad_() for x in (k, v)]
        expanded = KVHeads(split, context).expand(*own)
        torch.autograd.backward(expanded, [grad[:, :, query] for grad in grads])
        found = [x.grad for x in own if x.grad is not None]
        return held, [x.detach() for x in expanded], found, dict(axis.sent)

    _, expanded, wanted, _ = run(Axis.single("tp"))
    ranks = on_axis(degree, run)
    for i in range(2):
        assert torch.equal(torch.cat([r[1][i] for r in ranks], 2), expanded[i])
        for held, _, found, _ in ranks:
            if is_exact:
                assert torch.equal(found[i], wanted[i][:, :, held])
            else:  # a sum of `heads / kv_heads` numbers of size 1 in another order
                torch.testing.assert_close(found[i], wanted[i][:, :, held], rtol=1e-5, atol=1e-5)
    # All KV heads' gradients of k and v travel if some are shared, else nothing does.
    is_shared = kv_heads % degree != 0
    values = 2 * TOKENS * kv_heads * HEAD_DIM * 4
    expected = {"activation gradients": 2 * (degree - 1) / degree * values} if is_shared else {}
    assert all(sent == expected for *_, sent in ranks)


def test_one_sum_over_queries_in_another_order_has_other_bits() -> None:
    """So that the exact comparison above can fail: of 8 query heads' terms, as they come."""
    grad = randn(BATCH, LENGTH, 8, HEAD_DIM, seed=2).float()
    split = HeadSplit(8, 1, 0, 1)
    by_tree, as_they_come = (
        KVHeads(split, replace(LayerContext.single(), tree_blocks=trees)).sum_over_queries(grad)
        for trees in (8, None)
    )
    assert not torch.equal(by_tree, as_they_come)


# In attention

Linear = Literal["ternary", "dense"]


def run_attention(
    axis: Axis, model: ModelConfig, dtype: torch.dtype, sequence_parallel: bool, **changes: Any
) -> tuple[Tensor, Tensor, dict[str, tuple[Shard, Tensor]]]:
    """The output, dX, and each parameter's gradient."""
    context = replace(
        LayerContext.single(dtype), tp=axis, sequence_parallel=sequence_parallel, **changes
    )
    attention = Attention(model, 0, context)
    initialize(attention, seed=1, std=0.3)
    x = randn(TOKENS, model.hidden_size, seed=4).to(dtype)
    grad = randn(TOKENS, model.hidden_size, seed=5).to(dtype)
    if sequence_parallel:
        x, grad = own_rows(x, axis), own_rows(grad, axis)
    x = x.clone().requires_grad_()
    rope = RotaryEmbedding(HEAD_DIM, LENGTH, 10_000.0, CPU).tables(LENGTH, dtype)
    y = attention(Normalized(x, x.detach().abs().amax(-1, keepdim=True)), rope, BATCH)
    y.backward(grad)
    assert x.grad is not None
    gradients = {
        name: (parameter.shard, parameter.grad)
        for name, parameter in sharded_parameters(attention).items()
        if parameter.grad is not None
    }
    assert len(gradients) == 5
    return y.detach(), x.grad, gradients


def compare_attention(
    heads: int,
    kv_heads: int,
    degree: int,
    linear: Linear,
    dtype: torch.dtype,
    compare: Callable[[Tensor, Tensor], Any],
    sequence_parallel: bool = False,
    **changes: Any,
) -> None:
    """Everything on each of ``degree`` ranks against what one process has in the same places."""
    model = ModelConfig(
        hidden_size=heads * HEAD_DIM,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        linear=linear,
    )
    y, dx, gradients = run_attention(Axis.single("tp"), model, dtype, False, **changes)
    ranks = on_axis(
        degree, lambda axis: run_attention(axis, model, dtype, sequence_parallel, **changes)
    )
    if sequence_parallel:
        compare(torch.cat([r[0] for r in ranks]), y)
        compare(torch.cat([r[1] for r in ranks]), dx)
    for own_y, own_dx, own_gradients in ranks:
        if not sequence_parallel:
            compare(own_y, y)
            compare(own_dx, dx)
        for name, (shard, gradient) in own_gradients.items():
            # Of all rows that a rank holds, owned or not: replicas must stay alike.
            expected = gradients[name][1].narrow(shard.dim, shard.span.start, shard.span.width)
            compare(gradient, expected)


def equal(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a, b)


def close(a: Tensor, b: Tensor) -> None:
    # fp64 through four products and an attention, relative to the largest.
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12 * b.abs().max().item())


@pytest.mark.parametrize("linear", ["ternary", "dense"])
@pytest.mark.parametrize(("heads", "kv_heads", "degree"), SPLITS)
def test_attention(heads: int, kv_heads: int, degree: int, linear: Linear) -> None:
    compare_attention(heads, kv_heads, degree, linear, torch.float64, close)


@pytest.mark.parametrize("linear", ["ternary", "dense"])
def test_attention_under_sequence_parallelism(linear: Linear) -> None:
    for heads, kv_heads, degree in [(4, 2, 4), (6, 3, 2)]:
        compare_attention(
            heads, kv_heads, degree, linear, torch.float64, close, sequence_parallel=True
        )


@pytest.mark.parametrize("backward", [torch.float32, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads", "degree"), SPLITS)
def test_attention_in_layout_exact_training(
    heads: int, kv_heads: int, degree: int, backward: torch.dtype
) -> None:
    for sequence_parallel in (False, True):
        compare_attention(
            *(heads, kv_heads, degree, "ternary", torch.float32, equal),
            sequence_parallel=sequence_parallel,
            tree_blocks=tree_blocks(heads),
            ternary_backward_dtype=backward,
        )
