"""Cross-entropy over logits whose vocabulary is split over tensor-parallel ranks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.mesh import Axis
from megabit.reduce import all_reduce, gather_blocks
from megabit.tensor_parallel.partition import Span, block_sums
from megabit_kernels import numerics


class TokenLosses(NamedTuple):
    """Of each token, ``[T]`` in fp32 (fp64 for fp64 logits), the same on every rank."""

    objective: Tensor
    """What is minimised."""
    cross_entropy: Tensor
    """The negative log likelihood, in nats, without a graph."""


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    rows: Span,
    tp: Axis,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> TokenLosses:
    """Losses of each token, the same bits at every TP degree.

    With ``lse = log Σexp(logits)`` over the vocabulary, ε the smoothing and ζ the z-loss, the
    objective is ``lse − (1 − ε) · logit of the target − ε · mean logit + ζ · lse²``.

    Sends a maximum and one sum per block of the vocabulary for each token over TP, with smoothing
    two; backward sends nothing.

    Args:
        logits: ``[T, v]``, this rank's columns of the vocabulary.
        targets: int64 ``[T]``, ids of the whole vocabulary.
        rows: which part of the vocabulary the columns are.
        z_loss: weight of lse², which keeps logits small (PaLM, arXiv 2204.02311, section 5).
        label_smoothing: share of the target that is spread evenly over the vocabulary, as in
            ``torch.nn.functional.cross_entropy``.
    """
    return TokenLosses(
        *_VocabParallelCrossEntropy.apply(logits, targets, rows, tp, z_loss, label_smoothing)
    )


def log_probabilities(logits: Tensor, rows: Span, tp: Axis) -> Tensor:
    """Of every token of this rank's part of the vocabulary: ``logits [T, v]`` → ``[T, v]`` in fp32
    (fp64 for fp64 logits). The same bits at every TP degree: those of ``−cross_entropy``.

    Sends a maximum and one sum per block of the vocabulary for each token over TP.
    """
    dtype = numerics.stats_dtype(logits.dtype)
    largest = all_reduce(logits.amax(-1).to(dtype), tp, "max", "statistics")
    shifted = logits.to(dtype) - largest.unsqueeze(-1)
    blocks = gather_blocks(block_sums(shifted.exp(), rows), tp)
    normalizer = _sum_in_order(blocks.unflatten(-1, (tp.size, -1)))
    return shifted - normalizer.log().unsqueeze(-1)


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        rows: Span,
        tp: Axis,
        z_loss: float,
        label_smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        dtype = numerics.stats_dtype(logits.dtype)
        largest = all_reduce(logits.amax(-1).to(dtype), tp, "max", "statistics")
        shifted = logits.to(dtype) - largest.unsqueeze(-1)
        here = (targets >= rows.start) & (targets < rows.stop)
        columns = (targets - rows.start).masked_fill(~here, 0).unsqueeze(-1)
        own_target = shifted.gather(-1, columns).squeeze(-1).masked_fill(~here, 0)
        own_logits = block_sums(shifted, rows) if label_smoothing else shifted[:, :0]
        exp = shifted.exp_()
        # One exchange for all: the target's logit is a value on one rank and zero on the others.
        own = torch.cat([block_sums(exp, rows), own_target.unsqueeze(-1), own_logits], -1)
        blocks = gather_blocks(own, tp).unflatten(-1, (tp.size, -1))
        count = len(rows.block_widths)
        normalizer = _sum_in_order(blocks[..., :count])
        target = blocks[..., count].sum(-1)
        log_normalizer = normalizer.log()
        cross_entropy = log_normalizer - target
        objective = cross_entropy.clone()
        if label_smoothing:
            mean = _sum_in_order(blocks[..., count + 1 :]) / rows.size
            objective += (target - mean) * label_smoothing
        lse = log_normalizer + largest
        if z_loss:
            objective += lse.square() * z_loss
        ctx.save_for_backward(exp, normalizer, columns, here, lse)
        ctx.logits_dtype, ctx.vocab_size = logits.dtype, rows.size
        ctx.z_loss, ctx.label_smoothing = z_loss, label_smoothing
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exp, normalizer, columns, here, lse = ctx.saved_tensors
        d_loss = grads[0]
        d_lse = d_loss * (1 + 2 * ctx.z_loss * lse) if ctx.z_loss else d_loss
        grad = exp * (d_lse / normalizer).unsqueeze(-1)
        d_target = d_loss
        if ctx.label_smoothing:
            d_target = d_loss * (1 - ctx.label_smoothing)
            grad -= (d_loss * (ctx.label_smoothing / ctx.vocab_size)).unsqueeze(-1)
        grad.scatter_add_(-1, columns, -(d_target * here).unsqueeze(-1))
        return grad.to(ctx.logits_dtype), None, None, None, None, None


def _sum_in_order(blocks: Tensor) -> Tensor:
    """``[T, ranks, blocks of a rank]`` → ``[T]``, in block order; see ``gather_blocks``."""
    return blocks.flatten(-2).contiguous().sum(-1)
