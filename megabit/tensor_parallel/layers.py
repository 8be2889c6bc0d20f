"""Linear layers split over tensor-parallel ranks, by output features or by input features.

A *column*-parallel layer takes what every rank has (under sequence parallelism: its own tokens) and
gives each rank some of the output features; a *row*-parallel layer takes those and gives every rank
the sum. Names follow Megatron, where the weight matrix is thought of as transposed.

Shapes: ``T`` tokens of a microbatch, ``t`` tokens this rank holds outside the layers (T, or T/tp
under sequence parallelism), ``K``/``N`` logical in/out features, ``k``/``n`` this rank's part of
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megabit.mesh import Axis
from megabit.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megabit.tensor_parallel.parameter import Shard, ShardedParameter
from megabit.tensor_parallel.partition import Span


@dataclass(frozen=True)
class LayerContext:
    """What every layer of a stage needs to know beside its own sizes."""

    tp: Axis
    device: torch.device
    compute_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    ternary_backward_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False

    @staticmethod
    def single(dtype: torch.dtype = torch.float32) -> "LayerContext":
        """One process on the CPU, all in ``dtype``."""
        return LayerContext(Axis.single("tp"), torch.device("cpu"), dtype, dtype, dtype)


class ColumnParallelLinear(nn.Module):
    """``y = x Wᵀ`` with this rank's rows of ``W [N, K]``: ``x [t, K]`` → ``y [T, n]``."""

    def __init__(self, in_features: int, rows: Span, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        shard = Shard((rows.size, in_features), 0, rows, grad_is_partial=rows.is_shared)
        self.weight = ShardedParameter(shard, context.master_dtype, context.device)

    def extra_repr(self) -> str:
        return f"{self.weight.shard.shape}, rows {self.weight.shard.span}"

    def forward(self, x: Tensor, absmax: Tensor | None = None) -> Tensor:
        """``absmax`` is for ternary layers only, see ``ColumnParallelBitLinear``."""
        (y,) = self.forward_together([self], x, absmax)
        return y

    @staticmethod
    def forward_together(
        layers: Sequence["ColumnParallelLinear"], x: Tensor, absmax: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The outputs of several layers with the same input, at the communication of one.

        Forward all-gathers ``x`` under sequence parallelism and sends nothing otherwise; backward
        sums dX over TP once.
        """
        x = enter_column_parallel(x, layers[0].context)
        return tuple(F.linear(x, layer.weight.to(x.dtype)) for layer in layers)


class RowParallelLinear(nn.Module):
    """``y = Σ_ranks x Wᵀ`` with this rank's columns of ``W [N, K]``: ``[T, k]`` → ``[t, N]``."""

    def __init__(self, columns: Span, out_features: int, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        shard = Shard((out_features, columns.size), 1, columns)
        self.weight = ShardedParameter(shard, context.master_dtype, context.device)

    def extra_repr(self) -> str:
        return f"{self.weight.shard.shape}, columns {self.weight.shard.span}"

    def forward(self, x: Tensor, absmax: Tensor | None = None) -> Tensor:
        """Forward sums ``y`` over TP (a reduce-scatter under sequence parallelism)."""
        y = F.linear(x, self.weight.to(x.dtype))
        if self.context.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(y, self.context.tp)
        return reduce_from_tensor_model_parallel_region(y, self.context.tp)


def enter_column_parallel(x: Tensor, context: LayerContext) -> Tensor:
    """``[t, K]`` → ``[T, K]`` on every rank, whose gradient is summed over TP on the way back."""
    if context.sequence_parallel:
        return gather_from_sequence_parallel_region(x, context.tp)
    return copy_to_tensor_model_parallel_region(x, context.tp)
