"""TernGrad: −1, 0 or +1 times the largest magnitude that any rank has, drawn so that the mean is x.

    x [n, rows, columns], maximum → code = sign(x) with probability |x| / maximum, else 0
    decoded: code · maximum

The expected result is x, to the 2⁻²⁴ of the maximum that random numbers resolve, so there is no
error to feed back. The variance of an element is |x| · (maximum − |x|), which is large. The maximum
is that of all ranks: what they send are multiples of the same number.

A tensor's message is ``[maximum, fp32 | codes, 2 bits each | zeros up to a multiple of 4 bytes]``;
codes as ``megabit_kernels.packing`` has them, row by row. A maximum that is not finite makes every
element so.

Source: arXiv 1705.07878, without its layer-wise clipping of gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megabit.data_parallel.codecs.message import FLOAT_BYTES, aligned, floats_of
from megabit_kernels.packing import pack, packed_width, unpack


@dataclass(frozen=True)
class TernaryCodec:
    """Two bits for each element, drawn at random."""

    needs_maximum = True

    def tensor_bytes(self, rows: int, columns: int) -> int:
        """4 for the maximum, and a quarter for each element: of a row a whole number."""
        return FLOAT_BYTES + aligned(rows * packed_width(columns))

    def encode(self, x: Tensor, maximum: Tensor | None, generator: torch.Generator) -> Tensor:
        """See ``wire.Codec``."""
        if maximum is None:
            raise ValueError("TernGrad needs the largest magnitude of all ranks")
        n, rows, columns = x.shape
        # Where all is 0, or the maximum is not finite, nothing is drawn: no number is below a NaN.
        drawn = torch.rand(x.shape, generator=generator, device=x.device) < (x / maximum).abs_()
        codes = x.sign().where(drawn, 0).to(torch.int8)

        message = x.new_zeros((n, self.tensor_bytes(rows, columns)), dtype=torch.uint8)
        floats_of(message, 1).copy_(maximum)
        packed = pack(codes.flatten(0, 1)).view(n, -1)
        message[:, FLOAT_BYTES : FLOAT_BYTES + packed.shape[1]] = packed
        return message

    def decode(self, message: Tensor, rows: int, columns: int) -> Tensor:
        """See ``wire.Codec``."""
        width = packed_width(columns)
        packed = message[:, FLOAT_BYTES : FLOAT_BYTES + rows * width].reshape(-1, width)
        codes = unpack(packed, columns).view(len(message), rows, columns)
        return codes * floats_of(message, 1).unsqueeze(-1)
