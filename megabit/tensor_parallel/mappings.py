"""Autograd mappings between replicated and tensor-parallel regions, under Megatron's names.

Each is an identity or a collective over TP forward, and its transpose backward. Tensors are ``[T,
…]``: sequence parallelism splits the ``T`` tokens of a microbatch, contiguously, over the TP ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.mesh import Axis
from megabit.reduce import all_gather, all_reduce, reduce_scatter


def copy_to_tensor_model_parallel_region(x: Tensor, tp: Axis) -> Tensor:
    """Identity; backward sums the gradient over TP."""
    return x if tp.size == 1 else _CopyToTensorParallel.apply(x, tp)


def reduce_from_tensor_model_parallel_region(x: Tensor, tp: Axis) -> Tensor:
    """Sum over TP; backward is the identity."""
    return x if tp.size == 1 else _ReduceFromTensorParallel.apply(x, tp)


def gather_from_sequence_parallel_region(x: Tensor, tp: Axis) -> Tensor:
    """Own tokens ``[T/tp, …]`` → all tokens ``[T, …]``; backward sums and scatters."""
    return x if tp.size == 1 else _GatherFromSequenceParallel.apply(x, tp)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, tp: Axis) -> Tensor:
    """Sum ``[T, …]`` over TP and keep own tokens ``[T/tp, …]``; backward gathers."""
    return x if tp.size == 1 else _ReduceScatterToSequenceParallel.apply(x, tp)


class _CopyToTensorParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(_owned_copy(grads[0]), ctx.tp), None


class _ReduceFromTensorParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        return all_reduce(_owned_copy(x), tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherFromSequenceParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.tp), None


class _ReduceScatterToSequenceParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.tp), None


def _owned_copy(x: Tensor) -> Tensor:
    """A contiguous copy to reduce in place: autograd may still hand ``x`` to someone else."""
    return x.clone(memory_format=torch.contiguous_format)
