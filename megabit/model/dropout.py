"""Dropout that does not depend on the layout: a mask is drawn for a whole microbatch, by name."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.reduce import own_rows
from megabit.tensor_parallel import ForwardPass, LayerContext


class Dropout:
    """Zeroes a share ``p`` of ``x [t, H]`` and scales the rest by 1/(1 − p); only in training.

    Every rank draws the mask of all tokens and takes its own, so the mask is the same at every
    layout; it is drawn again backward, not kept.
    """

    def __init__(self, p: float, name: str, context: LayerContext) -> None:
        self.p, self.name, self.context = p, name, context

    def __call__(self, x: Tensor, forward_pass: ForwardPass) -> Tensor:
        if self.p == 0 or forward_pass.noise is None:
            return x
        return _Dropout.apply(x, self, forward_pass.seed_of(self.name))

    def mask(self, x: Tensor, seed: int) -> Tensor:
        """0 or 1/(1 − p) for each element of ``x``, in its dtype."""
        ranks = self.context.tp.size if self.context.sequence_parallel else 1
        generator = torch.Generator(x.device).manual_seed(seed)
        drawn = torch.rand(ranks * x.shape[0], x.shape[1], generator=generator, device=x.device)
        own = own_rows(drawn, self.context.tp) if ranks > 1 else drawn
        return (own >= self.p).to(x.dtype).mul_(1 / (1 - self.p))


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: Dropout, seed: int) -> Tensor:
        ctx.dropout, ctx.seed = dropout, seed
        return dropout.mask(x, seed).mul_(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.dropout.mask(grads[0], ctx.seed).mul_(grads[0]), None, None
