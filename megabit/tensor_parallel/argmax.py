"""The likeliest token, where the vocabulary is split over tensor-parallel ranks."""

import torch
from torch import Tensor

from megabit.mesh import Axis
from megabit.reduce import all_reduce
from megabit.tensor_parallel.partition import Span
from megabit_kernels import numerics


def vocab_parallel_argmax(
    logits: Tensor, rows: Span, tp: Axis, num_ids: int | None = None
) -> Tensor:
    """Of each row, the id of the largest logit; the lowest of several: the same at every TP degree.

    Sends a value and a flag, and then an id, for each row over TP.

    Args:
        logits: ``[T, v]``, this rank's columns of the vocabulary.
        rows: which part of the vocabulary the columns are.
        num_ids: ids from this one on are no candidates; None: all are.

    Returns:
        int64 ``[T]``, on every rank; −1 where a logit of the row is not a number.
    """
    values = logits.to(numerics.stats_dtype(logits.dtype))
    if num_ids is not None and num_ids < rows.stop:
        values = values.clone()
        values[:, max(0, num_ids - rows.start) :] = -torch.inf
    own, _ = values.max(-1)  # NaN if there is one
    is_nan = own.isnan()
    flagged = torch.stack([own.masked_fill(is_nan, -torch.inf), is_nan.to(own.dtype)])
    largest, any_nan = all_reduce(flagged, tp, "max", "statistics")
    # max() promises no order among equals; argmax of a 0/1 mask is the first one.
    column = (values == own.unsqueeze(-1)).to(torch.uint8).argmax(-1)
    candidate = torch.where(own == largest, column + rows.start, torch.iinfo(torch.int64).max)
    lowest = -all_reduce(-candidate, tp, "max", "statistics")
    return lowest.masked_fill(any_nan > 0, -1)
