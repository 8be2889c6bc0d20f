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
    limit = rows.width if num_ids is None else max(0, min(rows.width, num_ids - rows.start))
    dtype = numerics.stats_dtype(logits.dtype)
    if limit:
        values = logits[:, :limit].to(dtype)
        column = values.argmax(-1)  # the first of equals; of numbers and NaN, NaN
        own = values.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    else:
        column = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        own = torch.full_like(column, -torch.inf, dtype=dtype)
    is_nan = own.isnan()
    flagged = torch.stack([own.masked_fill(is_nan, -torch.inf), is_nan.to(own.dtype)])
    largest, any_nan = all_reduce(flagged, tp, "max", "statistics")
    candidate = torch.where(own == largest, column + rows.start, torch.iinfo(torch.int64).max)
    lowest = -all_reduce(-candidate, tp, "max", "statistics")
    return lowest.masked_fill(any_nan > 0, -1)
