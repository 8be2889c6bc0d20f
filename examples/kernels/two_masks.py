"""A kernel of your own, to begin with: a ternary product as a difference of two sums.

    x_q int8 [M, K], codes int8 [N, K] → Σ of x where the code is 1, minus Σ where it is −1 → [M, N]

Nothing is multiplied by a weight but 0 and 1. Written in torch it is slower than what there is; in
another language its loops would be the ones to fill in. It may go through fp32, since each of both
sums stays within 128 · K ≤ 2^24, up to which fp32 counts exactly.

A row of ``megabit_kernels.dispatch.TABLE`` is what it takes to be used; ``ROW`` is it.
``tests/kernels/test_example_kernel.py`` compares it with an int64 oracle, as every row is.
"""

import torch
from torch import Tensor

from megabit_kernels.dispatch import Implementation
from megabit_kernels.epilogue import Epilogue, finish


def two_masks(x_q: Tensor, weight: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """The product in the layout ``int8``.

    Args:
        x_q: int8 ``[M, K]``.
        weight: codes, int8 ``[N, K]``.
        n: N.
        epilogue: the scaling behind it; None gives the integers.

    Returns:
        ``[M, N]``: int32, or what the epilogue makes of it.
    """
    x = x_q.float()
    sums = [torch.mm(x, (weight == sign).float().t()).to(torch.int32) for sign in (1, -1)]
    return finish(sums[0] - sums[1], epilogue)


ROW = Implementation("two_masks", None, two_masks, "int8")
