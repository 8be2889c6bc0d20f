"""Activation recomputation: keep a part's inputs, and compute the rest of it again backward.

The second pass computes with the same codes and the same random numbers. What ranks reduced
together in the first one (sums of row-parallel products, statistics of split norms) is taken over
from it (``tensor_parallel.Kept``), and so are the products behind which nothing is reduced again.
``full`` keeps the input of a layer, ``selective`` the outputs of its column-parallel products: then
no product and no collective is repeated, only attention and elementwise work. (Dense row-parallel
layers keep nothing: their products and sums are repeated.)
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.tensor_parallel import ForwardPass, Kept


def recomputed(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], forward_pass: ForwardPass
) -> Tensor:
    """``function(*inputs, forward_pass)``, keeping nothing but ``inputs`` for its backward pass.

    ``function`` ends with a row-parallel layer, whose output nothing in it reads but additions.
    """
    return _Recomputed.apply(function, forward_pass, *inputs)


class _Recomputed(Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], forward_pass: ForwardPass, *inputs: Tensor
    ) -> Tensor:
        kept = Kept()
        y = function(*inputs, replace(forward_pass, kept=kept))
        kept.end_first_pass()
        ctx.function, ctx.forward_pass, ctx.num_inputs = function, forward_pass, len(inputs)
        # Not as attributes, which live as long as the graph: autograd frees these with the layer's
        # backward pass.
        ctx.save_for_backward(*inputs, *kept.results)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs = [
            x.detach().requires_grad_(is_needed)
            for x, is_needed in zip(saved[: ctx.num_inputs], ctx.needs_input_grad[2:], strict=True)
        ]
        kept = Kept(list(saved[ctx.num_inputs :]), is_replay=True)
        with torch.enable_grad():
            y = ctx.function(*inputs, replace(ctx.forward_pass, kept=kept))
        torch.autograd.backward(y, grads[0])
        return None, None, *(x.grad for x in inputs)
