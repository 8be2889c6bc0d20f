"""Autograd mappings between replicated and tensor-parallel regions, under Megatron's names.

Each is an identity or a collective over TP forward, and its transpose backward. Tensors are ``[T,
…]``: sequence parallelism splits the ``T`` tokens of a microbatch, contiguously, over the TP ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.reduce import all_gather, all_reduce, reduce_scatter
from megabit.tensor_parallel.context import LayerContext


def copy_to_tensor_model_parallel_region(x: Tensor, context: LayerContext) -> Tensor:
    """Identity; backward sums the gradient over TP."""
    return x if context.tp.size == 1 else _CopyToTensorParallel.apply(x, context)


def reduce_from_tensor_model_parallel_region(x: Tensor, context: LayerContext) -> Tensor:
    """Sum over TP; backward is the identity."""
    return x if context.tp.size == 1 else _ReduceFromTensorParallel.apply(x, context)


def gather_from_sequence_parallel_region(x: Tensor, context: LayerContext) -> Tensor:
    """Own tokens ``[T/tp, …]`` → all tokens ``[T, …]``; backward sums and scatters."""
    return x if context.tp.size == 1 else _GatherFromSequenceParallel.apply(x, context)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, context: LayerContext) -> Tensor:
    """Sum ``[T, …]`` over TP and keep own tokens ``[T/tp, …]``; backward gathers."""
    return x if context.tp.size == 1 else _ReduceScatterToSequenceParallel.apply(x, context)


class _CopyToTensorParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: LayerContext) -> Tensor:
        ctx.context = context
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.context.start_sum(_owned_copy(grads[0])).wait(), None


class _ReduceFromTensorParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: LayerContext) -> Tensor:
        return all_reduce(_owned_copy(x), context.tp, purpose="activations")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherFromSequenceParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: LayerContext) -> Tensor:
        ctx.context = context
        return all_gather(x, context.tp, "activations")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.context.start_sum_of_tokens(grads[0]).wait(), None


class _ReduceScatterToSequenceParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: LayerContext) -> Tensor:
        ctx.tp = context.tp
        return reduce_scatter(x, context.tp, "activations")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.tp, "activation gradients"), None


def _owned_copy(x: Tensor) -> Tensor:
    """A contiguous copy to reduce in place: autograd may still hand ``x`` to someone else."""
    return x.clone(memory_format=torch.contiguous_format)
