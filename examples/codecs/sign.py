"""A codec of your own, to begin with: of each element its sign, of each row the mean of |x|.

    x [n, rows, columns] → scale = mean|x| of the row, fp32; a bit for each element, 1 where x ≥ 0
    decoded: ±scale

That is 1/32 of fp32's bytes. It is biased, so it needs error feedback (EF-SignSGD, arXiv
1901.09847): what stays of x has ‖e‖² = ‖x‖² − ‖x‖₁²/columns, always less than ‖x‖², so that what is
lost in one step arrives in later ones. A row that holds NaN or ±Inf has no finite scale, hence no
finite element when it arrives: all ranks see that, and skip the step.

A tensor's message is ``[scales, fp32 | bits, rows in whole bytes | zeros up to 4 bytes]``.
``tests/data_parallel/test_example_codec.py`` holds it to what ``wire.Codec`` promises.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megabit.data_parallel.codecs.message import FLOAT_BYTES, aligned, floats_of

BITS = 8


@dataclass(frozen=True)
class SignCodec:
    """One bit for each element and a scale for each row."""

    needs_maximum = False

    def tensor_bytes(self, rows: int, columns: int) -> int:
        """4 for each row, and a bit for each element."""
        return FLOAT_BYTES * rows + aligned(rows * -(-columns // BITS))

    def encode(self, x: Tensor, maximum: Tensor | None, generator: torch.Generator) -> Tensor:
        """See ``wire.Codec``. Deterministic: draws nothing from ``generator``."""
        n, rows, columns = x.shape
        message = x.new_zeros((n, self.tensor_bytes(rows, columns)), dtype=torch.uint8)
        floats_of(message, rows).copy_(x.abs().mean(-1))
        is_positive = torch.nn.functional.pad((x >= 0).to(torch.uint8), (0, -columns % BITS))
        weights = 1 << torch.arange(BITS, dtype=torch.uint8, device=x.device)
        packed = (is_positive.unflatten(-1, (-1, BITS)) * weights).sum(-1, dtype=torch.uint8)
        held = packed.flatten(1)
        message[:, FLOAT_BYTES * rows : FLOAT_BYTES * rows + held.shape[1]] = held
        return message

    def decode(self, message: Tensor, rows: int, columns: int) -> Tensor:
        """See ``wire.Codec``."""
        width = -(-columns // BITS)
        start = FLOAT_BYTES * rows
        packed = message[:, start : start + rows * width].unflatten(1, (rows, width, 1))
        shifts = torch.arange(BITS, dtype=torch.uint8, device=message.device)
        signs = (packed >> shifts & 1).flatten(2)[..., :columns].float() * 2 - 1
        return signs * floats_of(message, rows).unsqueeze(-1)
