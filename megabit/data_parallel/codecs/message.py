"""What messages of all codecs have in common: fp32 numbers in front, a length of whole words."""

import torch
from torch import Tensor

FLOAT_BYTES = 4
"""Of an fp32 number, and what every tensor's message is a multiple of."""


def aligned(size: int) -> int:
    """``size`` in bytes, rounded up to whole fp32 numbers."""
    return -(-size // FLOAT_BYTES) * FLOAT_BYTES


def floats_of(message: Tensor, count: int) -> Tensor:
    """The first ``count`` fp32 numbers of uint8 ``[n, bytes]``: a view ``[n, count]``."""
    return message[:, : FLOAT_BYTES * count].view(torch.float32)
