"""The output head's product: logits over this rank's rows of the vocabulary, and all of them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.mesh import Axis
from megabit.reduce import all_gather, tree_sum
from megabit.tensor_parallel.context import LayerContext
from megabit.tensor_parallel.forward_pass import PLAIN, ForwardPass
from megabit.tensor_parallel.parameter import ShardedParameter
from megabit.tensor_parallel.partition import BlockPartition, Span
from megabit.tensor_parallel.weight_gradients import WeightGradientQueue, weight_gradient
from megabit_kernels import dense_linear, runs_native


def vocab_parallel_logits(
    x: Tensor,
    weight: ShardedParameter,
    rows: Span,
    context: LayerContext,
    forward_pass: ForwardPass = PLAIN,
) -> Tensor:
    """``x [T, H]`` and this rank's ``weight [v, H]`` → ``[T, v]``, with the same bits at every TP.

    Each logit is summed in one order (``dense_linear``), whatever else is computed with it. Where
    that is too slow for training, its forward pass has a product for each fixed block of the
    vocabulary instead, since a product of another shape may be summed in another order; the
    backward pass of layout-exact training has one for each block of the tree. Sends nothing; the
    caller sums dX over TP (``enter_column_parallel``).
    """
    queue = forward_pass.weight_gradients
    is_in_blocks = torch.is_grad_enabled() and not runs_native(x)
    return _VocabParallelLogits.apply(x, weight.ready(), rows, context, queue, is_in_blocks)


def whole_logits(logits: Tensor, rows: Span, tp: Axis) -> Tensor:
    """``[T, v]`` of each TP rank → ``[T, V]``, on every rank; gathers ``T·V`` numbers over TP.

    Args:
        rows: of the vocabulary, that this rank's columns are. Ranks may have differently many.
    """
    if tp.size == 1:
        return logits
    partition = BlockPartition(rows.size, rows.num_blocks)
    widths = [partition.span(rank, tp.size).width for rank in range(tp.size)]
    padded = logits.new_zeros(max(widths), len(logits))
    padded[: rows.width] = logits.t()
    parts = all_gather(padded, tp, "activations").split(max(widths))
    return torch.cat([p[:w] for p, w in zip(parts, widths, strict=True)]).t().contiguous()


class _VocabParallelLogits(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ShardedParameter,
        rows: Span,
        context: LayerContext,
        queue: WeightGradientQueue | None,
        is_in_blocks: bool,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        ctx.widths = _tree_widths(rows, context)
        if not is_in_blocks:
            return dense_linear(x, weight.to(x.dtype))
        logits = x.new_empty(x.shape[0], rows.width)
        blocks = weight.to(x.dtype).split(rows.block_widths)
        for columns, block in zip(logits.split(rows.block_widths, dim=1), blocks, strict=True):
            torch.mm(x, block.t(), out=columns)
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach()  # what is put off must not hold the graph before ``x``
        parts = [part.contiguous() for part in grads[0].split(ctx.widths, dim=1)]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            blocks = ctx.weight.detach().to(x.dtype).split(ctx.widths)
            terms = [torch.mm(part, block) for part, block in zip(parts, blocks, strict=True)]
            dx = terms[0] if len(terms) == 1 else tree_sum(torch.stack(terms))

        def compute() -> Tensor:
            dws = [torch.mm(part.t(), x) for part in parts]
            return dws[0] if len(dws) == 1 else torch.cat(dws)

        if ctx.needs_input_grad[1]:
            dw = weight_gradient(ctx.weight, compute, ctx.queue)
        return dx, dw, None, None, None, None


def _tree_widths(rows: Span, context: LayerContext) -> list[int]:
    """Columns of each product of the backward pass."""
    blocks = len(rows.block_widths) // context.own_tree_blocks
    if context.tree_blocks is None:
        return [rows.width]
    starts = range(0, len(rows.block_widths), blocks)
    return [sum(rows.block_widths[start : start + blocks]) for start in starts]
