"""Parameters that know which part of which logical tensor they are."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from megabit.tensor_parallel.partition import Span


@dataclass(frozen=True)
class Shard:
    """A rank's part of a logical tensor: ``span`` of dimension ``dim``, all of the others."""

    shape: tuple[int, ...]
    """Of the logical tensor."""
    dim: int
    span: Span
    grad_is_partial: bool = False
    """Whether a rank's gradient is one term of a sum over TP: norm gains under sequence
    parallelism, which each rank uses on its own tokens."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the part that this rank has."""
        return (*self.shape[: self.dim], self.span.width, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Elements of the logical tensor."""
        return math.prod(self.shape)

    def owned(self, x: Tensor) -> Tensor:
        """The part of a local tensor that this rank counts."""
        return self.span.owned(x, self.dim)


class ShardedParameter(nn.Parameter):
    """An ``nn.Parameter`` that holds a shard of a logical tensor (possibly all of it).

    Alone it is an ordinary parameter. An optimizer that keeps the values elsewhere
    (``data_parallel``) takes over its gradients (``collect``), and may leave it as a shape without
    storage, on device ``meta``: then its layer computes with what was made of the values.
    """

    shard: Shard
    uses: int
    """How many gradients are handed over in a backward pass."""
    _collector: Callable[[Tensor], None] | None
    _arriving: Callable[[], None] | None

    def __new__(
        cls,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device | str,
        data: Tensor | None = None,
    ) -> Self:
        if data is None:
            data = torch.empty(shard.local_shape, dtype=dtype, device=device)
        parameter = super().__new__(cls, data, requires_grad=True)
        parameter.shard, parameter.uses = shard, 1
        parameter._collector = parameter._arriving = None
        return parameter

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        copied = type(self)(self.shard, self.dtype, self.device)
        copied.requires_grad = self.requires_grad
        copied.data.copy_(self.data)
        memo[id(self)] = copied
        return copied

    def collect(self, collector: Callable[[Tensor], None]) -> None:
        """Give each gradient that a backward pass computes to ``collector``, from now on and
        instead of to whoever had them, and keep none."""

        def hand_over(parameter: Tensor) -> None:
            assert isinstance(parameter, ShardedParameter)
            assert parameter._collector is not None
            if parameter.grad is not None:  # else a function has handed it over
                parameter._collector(parameter.grad)
                parameter.grad = None

        is_first, self._collector = self._collector is None, collector
        if is_first and not self.is_meta:
            self.register_post_accumulate_grad_hook(hand_over)

    def second_use(self) -> "ShardedParameter":
        """The same values with a gradient of its own."""
        return type(self)(self.shard, self.dtype, self.device, self.data)

    def give_gradient(self, gradient: Tensor) -> Tensor | None:
        """For an autograd function's backward: hand over a gradient of any dtype or, where nobody
        collects, return what autograd is to accumulate."""
        if self._collector is None:
            return gradient.to(self.dtype)
        self._collector(gradient)
        return None

    def add_gradient(self, gradient: Tensor) -> None:
        """The same after the backward pass: hand over or, where nobody collects, accumulate as
        autograd does."""
        if not self.requires_grad:
            return
        kept = self.give_gradient(gradient)
        if kept is not None:
            self.backward(kept)

    def expect(self, arriving: Callable[[], None]) -> None:
        """New values are on their way; ``arriving`` waits for them and puts them in place."""
        self._arriving = arriving

    def ready(self) -> Self:
        """This parameter, once its newest values are there; whoever reads them asks so."""
        if self._arriving is not None:
            arriving, self._arriving = self._arriving, None
            arriving()
        return self


def sharded_parameters(module: nn.Module) -> dict[str, ShardedParameter]:
    """The parameters of ``module`` by logical name."""
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        if not isinstance(parameter, ShardedParameter):
            raise TypeError(f"{name} is a {type(parameter).__name__}, not a ShardedParameter")
    return named  # type: ignore[return-value]
