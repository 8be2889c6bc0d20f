"""The KV cache of one layer, in pages: what attention over it reads and writes.

A page (a *block*) has room for the keys and values of ``block_size`` consecutive tokens of one
sequence. A *slot* is a place for one token, ``block · block_size + offset``. A sequence has a
*block table*, the numbers of its pages in order, which may lie anywhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT_PAGES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PAGE_DTYPES = (*FLOAT_PAGES, torch.int8)


@dataclass(frozen=True)
class KVPages:
    """Pages of one layer, on one device.

    Attributes:
        keys: ``[blocks, KV heads, D, block size]``: the same dimension of a page's keys side by
            side, since scores of several keys are computed at a time.
        values: ``[blocks, KV heads, block size, D]``.
        key_scale, value_scale: fp32 ``[blocks, KV heads, block size]`` of int8 pages, else None: a
            number is ``code · scale``, with ``scale = max|x| / 127`` of each token and head.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @staticmethod
    def allocate(
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> "KVPages":
        """Pages of zeros.

        Raises:
            TypeError: ``dtype`` is not one of ``PAGE_DTYPES``.
        """
        if dtype not in PAGE_DTYPES:
            names = ", ".join(str(known).removeprefix("torch.") for known in PAGE_DTYPES)
            raise TypeError(f"dtype is {dtype}; pages are of one of {names}")
        shape = (blocks, kv_heads)
        keys = torch.zeros(*shape, head_dim, block_size, dtype=dtype, device=device)
        values = torch.zeros(*shape, block_size, head_dim, dtype=dtype, device=device)
        if dtype != torch.int8:
            return KVPages(keys, values)
        scales = torch.zeros(2, *shape, block_size, device=device)
        return KVPages(keys, values, scales[0], scales[1])

    @property
    def blocks(self) -> int:
        """Blocks of the cache, for all sequences together."""
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, on this rank."""
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.keys.shape[2]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.keys.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values, as they are kept."""
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.keys.device

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and scales."""
        tensors = (self.keys, self.values, self.key_scale, self.value_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
