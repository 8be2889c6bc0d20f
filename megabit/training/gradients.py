"""From each rank's gradients to those that the optimizer uses: complete, measured, clipped."""

from collections.abc import Collection

import torch
from torch import Tensor

from megabit.data_parallel import GradientBuckets
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStage
from megabit.reduce import all_reduce
from megabit.tensor_parallel import ShardedParameter, sum_partial_gradients


def complete_gradients(
    stage: CausalLMStage, parameters: Collection[ShardedParameter], mesh: ParallelMesh
) -> None:
    """Add, in place, the terms of a gradient that other TP ranks and the other tied copy hold."""
    sum_partial_gradients(parameters, mesh.tp)
    weight = stage.embedding_weight
    if stage.is_tied and weight is not None and weight.grad is not None:
        all_reduce(weight.grad, mesh.embedding)


def global_norm(parameters: Collection[ShardedParameter], mesh: ParallelMesh) -> Tensor:
    """L2 norm of the whole model's gradient, fp64 scalar, the same on every rank.

    Each logical element counts once, however many ranks hold it.
    """
    norms = [
        torch.linalg.vector_norm(p.shard.owned(p.grad), dtype=torch.float64)
        for p in parameters
        if p.grad is not None
    ]
    square = torch.stack(norms).square().sum()
    all_reduce(square, mesh.tp)
    return all_reduce(square, mesh.pp).sqrt()


def clip(gradients: GradientBuckets, norm: float, max_norm: float) -> None:
    """Scale all gradients so that their global norm is at most ``max_norm`` (0: leave them)."""
    if max_norm and norm > max_norm:
        for bucket in gradients.buckets:
            bucket.flat.mul_(max_norm / norm)
