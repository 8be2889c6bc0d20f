"""Cross-entropy over logits whose vocabulary is split over tensor-parallel ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.mesh import Axis
from megabit.reduce import all_reduce, gather_blocks
from megabit.tensor_parallel.partition import Span, reduce_blocks
from megabit_kernels import numerics


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, rows: Span, tp: Axis) -> Tensor:
    """Negative log likelihood of each token, the same bits at every TP degree.

    Args:
        logits: ``[T, v]``, this rank's columns of the vocabulary.
        targets: int64 ``[T]``, ids of the whole vocabulary.
        rows: which part of the vocabulary the columns are.

    Returns:
        ``[T]`` in fp32 (fp64 for fp64 logits), on every rank. Sends a maximum and one sum per block
        of the vocabulary for each token over TP; backward sends nothing.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, rows, tp)


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows: Span, tp: Axis) -> Tensor:
        dtype = numerics.stats_dtype(logits.dtype)
        largest = all_reduce(logits.amax(-1).to(dtype), tp, "max", "statistics")
        shifted = logits.to(dtype) - largest.unsqueeze(-1)
        here = (targets >= rows.start) & (targets < rows.stop)
        columns = (targets - rows.start).masked_fill(~here, 0).unsqueeze(-1)
        own_target = shifted.gather(-1, columns).squeeze(-1).masked_fill(~here, 0)
        exp = shifted.exp_()
        sums = reduce_blocks(exp, rows.block_widths, lambda block: block.sum(-1))
        # One exchange for both: the target's logit is a value on one rank and zero on the others.
        blocks = gather_blocks(torch.cat([sums, own_target.unsqueeze(-1)], -1), tp)
        blocks = blocks.unflatten(-1, (tp.size, -1))
        normalizer = blocks[..., :-1].flatten(-2).contiguous().sum(-1)  # see gather_blocks
        target = blocks[..., -1].sum(-1)
        ctx.save_for_backward(exp, normalizer, columns, here)
        ctx.logits_dtype = logits.dtype
        return normalizer.log() - target

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        exp, normalizer, columns, here = ctx.saved_tensors
        grad = exp * (grads[0] / normalizer).unsqueeze(-1)
        grad.scatter_add_(-1, columns, -(grads[0] * here).unsqueeze(-1))
        return grad.to(ctx.logits_dtype), None, None, None
