"""Shards of logical tensors; who gets their gradients, and how their values arrive."""

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from megabit.tensor_parallel.parameter import Shard, ShardedParameter, sharded_parameters
from megabit.tensor_parallel.partition import BlockPartition, whole

Backward: TypeAlias = Callable[[ShardedParameter, Tensor], None]

ROWS = BlockPartition(16, 4)
# Which blocks of 4 rows each of four ranks holds: some on one rank, on two, on three.
HELD = [(0, 1), (0, 2), (1, 3), (1, 4)]


def parameter_of(
    rows: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> ShardedParameter:
    data = None if device == "meta" else torch.arange(3.0 * rows).view(rows, 3).to(dtype)
    return ShardedParameter(Shard((rows, 3), 0, whole(rows, True)), dtype, device, data)


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


def test_parameters_by_logical_name() -> None:
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.weight = parameter_of()
    assert sharded_parameters(module) == {"inner.weight": module.inner.weight}
    module.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match="bias is a Parameter, not a ShardedParameter"):
        sharded_parameters(module)


# Gradients


class _Scale(Function):
    """``x · w``, which hands the gradient of ``w`` over in fp64, as a layer does in its dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x if weight.is_meta else x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None]:
        gradient = (grads[0] * ctx.x).double()
        return None, ctx.weight.give_gradient(gradient)


def backward_by_function(weight: ShardedParameter, x: Tensor) -> None:
    # A weight without storage takes part in the graph with its shape only.
    _Scale.apply(x, weight).sum().backward()


def backward_by_autograd(weight: ShardedParameter, x: Tensor) -> None:
    (x * weight).sum().backward()


X = torch.tensor([[1.0, -2.0, 4.0]]).repeat(4, 1)


@pytest.mark.parametrize("backward", [backward_by_function, backward_by_autograd])
def test_alone_it_is_an_ordinary_parameter(backward: Backward) -> None:
    weight = parameter_of()
    backward(weight, X)
    backward(weight, X)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, 2 * X)


@pytest.mark.parametrize(
    ("backward", "dtype"),
    # What a function hands over keeps its precision; what autograd accumulates is the parameter's.
    [(backward_by_function, torch.float64), (backward_by_autograd, torch.float32)],
)
def test_a_collector_gets_each_gradient_and_the_parameter_keeps_none(
    backward: Backward, dtype: torch.dtype
) -> None:
    weight = parameter_of()
    collected: list[Tensor] = []
    weight.collect(collected.append)
    for factor in (1, 10):
        backward(weight, factor * X)
        assert weight.grad is None
    assert [gradient.dtype for gradient in collected] == [dtype] * 2
    assert torch.equal(collected[0].float(), X)
    assert torch.equal(collected[1].float(), 10 * X)


def test_a_weight_without_storage_hands_its_gradient_over_too() -> None:
    weight = parameter_of(device="meta")
    collected: list[Tensor] = []
    weight.collect(collected.append)
    backward_by_function(weight, X)
    assert weight.is_meta
    assert weight.grad is None
    (gradient,) = collected
    assert torch.equal(gradient, X.double())


def test_a_second_use_has_the_same_values_and_a_gradient_of_its_own() -> None:
    weight = parameter_of()
    other = weight.second_use()
    assert other.shard == weight.shard
    assert other.data_ptr() == weight.data_ptr()
    backward_by_autograd(other, X)
    assert weight.grad is None
    with torch.no_grad():
        weight.fill_(7)
    assert (other == 7).all()


# Values


def test_who_reads_new_values_waits_for_them_once() -> None:
    weight = parameter_of()
    assert weight.ready() is weight  # nothing is on its way
    arrivals = 0

    def arriving() -> None:
        nonlocal arrivals
        arrivals += 1
        weight.data.fill_(5)

    weight.expect(arriving)
    assert arrivals == 0
    assert weight[0, 1] == 1  # whoever does not ask sees the old values
    assert (weight.ready() == 5).all()
    weight.ready()
    assert arrivals == 1


def test_a_copy_has_storage_shard_and_gradient_of_its_own() -> None:
    weight = parameter_of(dtype=torch.bfloat16)
    collected: list[Tensor] = []
    weight.collect(collected.append)
    weight.requires_grad_(False)
    copied = copy.deepcopy(weight)
    assert torch.equal(copied, weight)
    assert (copied.shard, copied.dtype) == (weight.shard, torch.bfloat16)
    assert not copied.requires_grad
    assert copied.data_ptr() != weight.data_ptr()
    copied.requires_grad_()
    backward_by_function(copied, X.bfloat16())
    assert copied.grad is not None  # nobody collects a copy's
    assert collected == []
