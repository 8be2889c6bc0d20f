"""Memory in huge pages, where the system has them.

Reading a weight once per token is bound by DRAM, and with pages of 4 KiB also by address
translation: on one machine 22 GB/s against 32 GB/s with pages of 2 MiB. Most systems give such
pages only to memory that asks for them (``madvise``), which neither torch nor malloc does.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
MIN_BYTES = 1 << 20
"""A smaller weight stays in ordinary memory: most of a huge page would be wasted."""

KEPT_BYTES = 32 << 20
"""Beyond that malloc asks the system for new memory at each call, whose 4 KiB pages are cleared one
by one: 18 ms for 46 MB, against 2 in huge pages."""


def result(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor of undefined values for what is computed anew again and again."""
    if math.prod(shape) * dtype.itemsize > KEPT_BYTES:
        return empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor of undefined values, in huge pages if it is large enough for them.

    It begins where a page does. Its memory goes back to the system with the last tensor that refers
    to it.
    """
    count = math.prod(shape)
    num_bytes = count * dtype.itemsize
    if num_bytes < MIN_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    # Private: shared memory, the default of mmap, is under another setting of the system. Of the
    # page that alignment may cost, what is not touched takes no memory.
    pages = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # advice only: a kernel may know no huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    offset = -start % PAGE_BYTES
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=offset).view(*shape)
