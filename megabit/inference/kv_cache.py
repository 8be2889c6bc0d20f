"""Keys and values of a rank's layers and heads, in pages, and a batch's view of them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megabit.inference.batch import Batch
from megabit_kernels import KVPages, paged_attention, write_pages


def bytes_per_block(
    num_layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Of all of a rank's layers."""
    scale = 4 if dtype == torch.int8 else 0
    return 2 * num_layers * block_size * kv_heads * (head_dim * dtype.itemsize + scale)


class KVCache:
    """Pages of each layer, all on one rank.

    Args:
        layers: numbers of the layers in the whole model.
        kv_heads: those that this rank has.
    """

    def __init__(
        self,
        layers: Iterable[int],
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self.pages = {
            layer: KVPages.allocate(num_blocks, block_size, kv_heads, head_dim, dtype, device)
            for layer in layers
        }

    def view(self, batch: Batch) -> "CacheView":
        """For the forward pass of ``batch``."""

        def moved(array: object, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(array, dtype=dtype).to(self.device, non_blocking=True)

        return CacheView(
            self,
            moved(batch.positions, torch.int64),
            moved(batch.slots, torch.int64),
            moved(batch.query_starts, torch.int32),
            moved(batch.context_lengths, torch.int32),
            moved(batch.block_tables, torch.int32),
        )


@dataclass(frozen=True)
class CacheView:
    """``AttentionCache`` of one batch; what the tensors are is said of ``Batch``."""

    cache: KVCache
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    block_tables: Tensor

    def keep(self, layer: int, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keep ``k`` and ``v`` of the batch's tokens, and give all of their sequences'."""
        pages = self.cache.pages[layer]
        write_pages(pages, k, v, self.slots)
        lengths = self.context_lengths.tolist()
        return [
            _of_sequence(pages, table, length, k.dtype)
            for table, length in zip(self.block_tables, lengths, strict=True)
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv_of_query: Tensor) -> Tensor:
        """Keep ``k`` and ``v`` of the batch's tokens, and attend to all of their sequences."""
        pages = self.cache.pages[layer]
        write_pages(pages, k, v, self.slots)
        return paged_attention(
            q, pages, kv_of_query, self.block_tables, self.query_starts, self.context_lengths
        )


def _of_sequence(
    pages: KVPages, table: Tensor, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[length, KV heads, D]`` of the sequence with block table ``table``."""
    table = table[: -(-length // pages.block_size)].long()
    keys = pages.keys[table].permute(0, 3, 1, 2).to(dtype)
    values = pages.values[table].transpose(1, 2).to(dtype)
    if pages.key_scale is not None and pages.value_scale is not None:
        keys = keys * pages.key_scale[table].mT.unsqueeze(-1).to(dtype)
        values = values * pages.value_scale[table].mT.unsqueeze(-1).to(dtype)
    return keys.flatten(0, 1)[:length], values.flatten(0, 1)[:length]
