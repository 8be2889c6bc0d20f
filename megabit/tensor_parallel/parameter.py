"""Parameters that know which part of which logical tensor they are."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from megabit.mesh import Axis
from megabit.reduce import all_reduce
from megabit.tensor_parallel.partition import Span


@dataclass(frozen=True)
class Shard:
    """A rank's part of a logical tensor: ``span`` of dimension ``dim``, all of the others."""

    shape: tuple[int, ...]
    """Of the logical tensor."""
    dim: int
    span: Span
    grad_is_partial: bool = False
    """Whether a rank's gradient is one term of a sum over TP: replicated weights that each rank
    used on its own tokens (norm gains under sequence parallelism) or its own heads (shared KV
    heads)."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.span.width, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Elements of the logical tensor."""
        return math.prod(self.shape)

    def owned(self, x: Tensor) -> Tensor:
        """The part of a local tensor that this rank counts."""
        return self.span.owned(x, self.dim)


class ShardedParameter(nn.Parameter):
    """An ``nn.Parameter`` that holds a shard of a logical tensor (possibly all of it)."""

    shard: Shard

    def __new__(cls, shard: Shard, dtype: torch.dtype, device: torch.device) -> Self:
        data = torch.empty(shard.local_shape, dtype=dtype, device=device)
        parameter = super().__new__(cls, data, requires_grad=True)
        parameter.shard = shard
        return parameter

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        copied = type(self)(self.shard, self.dtype, self.device)
        copied.requires_grad = self.requires_grad
        copied.data.copy_(self.data)
        memo[id(self)] = copied
        return copied


def sharded_parameters(module: nn.Module) -> dict[str, ShardedParameter]:
    """The parameters of ``module`` by logical name."""
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        if not isinstance(parameter, ShardedParameter):
            raise TypeError(f"{name} is a {type(parameter).__name__}, not a ShardedParameter")
    return named  # type: ignore[return-value]


def sum_partial_gradients(parameters: Iterable[ShardedParameter], tp: Axis) -> None:
    """Complete, in place, the gradients of which every TP rank holds one term.

    One all-reduce over TP for all of them. Each rank adds its terms into zeros of the logical
    shape, so that ranks which hold different but overlapping rows (shared KV heads) meet in the
    right place.
    """
    partial = [p for p in parameters if p.shard.grad_is_partial and p.grad is not None]
    if tp.size == 1 or not partial:
        return
    logical = [p.new_zeros(p.shard.shape) for p in partial]
    held = [
        whole.narrow(p.shard.dim, p.shard.span.start, p.shard.span.width)
        for p, whole in zip(partial, logical, strict=True)
    ]
    for part, parameter in zip(held, partial, strict=True):
        assert parameter.grad is not None
        part.copy_(parameter.grad)
    flat = torch.cat([whole.flatten() for whole in logical])
    all_reduce(flat, tp)
    for whole, summed in zip(logical, flat.split([w.numel() for w in logical]), strict=True):
        whole.copy_(summed.view_as(whole))
    for part, parameter in zip(held, partial, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(part)
