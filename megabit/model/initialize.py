"""Initialisation by logical tensor: a value depends on (seed, parameter name, index) only.

So every layout starts from the same bits. Rows are drawn in chunks of fixed size, each from its own
generator: a rank draws only the chunks that it holds rows of.
"""

import hashlib

import torch
from torch import Tensor, nn

from megabit.tensor_parallel import sharded_parameters

ROWS_PER_CHUNK = 64


@torch.no_grad()
def initialize(module: nn.Module, seed: int, std: float) -> None:
    """Fill norm gains with ones and matrices with N(0, std²)."""
    for name, parameter in sharded_parameters(module).items():
        shard = parameter.shard
        if len(shard.shape) == 1:
            parameter.fill_(1)
            continue
        row_span = (shard.span.start, shard.span.stop) if shard.dim == 0 else (0, shard.shape[0])
        rows = logical_normal(seed, name, shard.shape, *row_span)
        if shard.dim == 1:
            rows = rows[:, shard.span.start : shard.span.stop]
        parameter.copy_(rows.mul_(std))


def logical_normal(seed: int, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    """Rows ``start:stop`` of the standard normal fp32 tensor that ``(seed, name)`` stands for."""
    chunks = []
    for chunk in range(start // ROWS_PER_CHUNK, (stop - 1) // ROWS_PER_CHUNK + 1):
        digest = hashlib.sha256(f"{seed}/{name}/{chunk}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        chunks.append(torch.randn((ROWS_PER_CHUNK, shape[1]), generator=generator))
    offset = start // ROWS_PER_CHUNK * ROWS_PER_CHUNK
    return torch.cat(chunks)[start - offset : stop - offset]
