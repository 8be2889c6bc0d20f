"""The likeliest token, where the vocabulary is split over tensor-parallel ranks."""

import torch
from torch import Tensor

from megabit.mesh import Axis
from megabit.reduce import all_reduce
from megabit.tensor_parallel import Span
from megabit_kernels import numerics


def vocab_parallel_argmax(
    logits: Tensor, rows: Span, tp: Axis, num_ids: int | None = None
) -> Tensor:
    """Of each row, the id of the largest logit; the lowest of several: the same at every TP degree.

    Args:
        logits: ``[T, v]``, this rank's columns of the vocabulary.
        rows: which part of the vocabulary the columns are.
        num_ids: ids from this one on are no candidates; None: all are.

    Returns:
        int64 ``[T]``, on every rank.
    """
    values = logits.to(numerics.stats_dtype(logits.dtype))
    if num_ids is not None and num_ids < rows.stop:
        values = values.clone()
        values[:, max(0, num_ids - rows.start) :] = -torch.inf
    own, column = values.max(-1)
    largest = all_reduce(own.clone(), tp, "max", "statistics")
    # max() promises no order among equals; argmax of a 0/1 mask is the first one.
    column = (values == own.unsqueeze(-1)).to(torch.uint8).argmax(-1)
    candidate = torch.where(own == largest, column + rows.start, torch.iinfo(torch.int64).max)
    lowest = -all_reduce(-candidate, tp, "max", "statistics")
    return lowest.clamp(max=rows.size - 1)  # where logits are not numbers there is no candidate
