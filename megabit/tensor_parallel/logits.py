"""The output head's product: logits over this rank's rows of the vocabulary."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.tensor_parallel.partition import Span


def vocab_parallel_logits(x: Tensor, weight: Tensor, rows: Span) -> Tensor:
    """``x [T, H]`` and this rank's ``weight [v, H]`` → ``[T, v]``, with the same bits at every TP.

    A floating-point product may be summed in another order when its shape changes, so there is one
    for each fixed block of the vocabulary. Sends nothing; the caller sums dX over TP
    (``enter_column_parallel``).
    """
    return _VocabParallelLogits.apply(x, weight, rows)


class _VocabParallelLogits(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Span) -> Tensor:
        ctx.save_for_backward(x, weight)
        logits = x.new_empty(x.shape[0], rows.width)
        blocks = weight.to(x.dtype).split(rows.block_widths)
        for columns, block in zip(logits.split(rows.block_widths, dim=1), blocks, strict=True):
            torch.mm(x, block.t(), out=columns)
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx = torch.mm(grads[0], weight.to(x.dtype))
        dw = torch.mm(grads[0].t(), x).to(weight.dtype)
        return dx, dw, None
