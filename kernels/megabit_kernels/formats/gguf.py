"""The ternary tensor types of GGUF files: TQ1_0 and TQ2_0 of llama.cpp, I2_S of bitnet.cpp.

**TQ1_0 and TQ2_0** cut each row into blocks of 256 weights, so K must be a multiple of 256, and end
each block with an fp16 scale d: a weight is d·w. Here the data is uint8 ``[N, bytes per row]``; a
file holds its rows one after the other.

- TQ2_0, 66 bytes: two chunks of 128 weights, 32 bytes each. Byte m of a chunk holds the codes
  w + 1 of its weights m, m + 32, m + 64, m + 96, in bits 0-1, 2-3, 4-5, 6-7. Then d.
- TQ1_0, 54 bytes: five digits w + 1 of base 3 to a byte. Bytes 0-31 hold weights 0-159, byte m
  those at m + 32n (n = 0..4); bytes 32-47 hold weights 160-239 in steps of 16; bytes 48-51 hold the
  last 16 weights in steps of 4, four to a byte, and a fifth digit 0. Then d. The digits are those
  of a fraction, 0.t₀t₁t₂t₃t₄ in base 3, and the byte is that fraction of 256, rounded up:
  ceil(256/243 · Σ t_n·3^(4−n)). So t_n is the integer part of 3·(byte·3^n mod 256)/256.

llama.cpp takes d from the largest magnitude in a block, so a block of zero weights has d = 0 and
any other has γ, rounded to fp16. The bytes here are the same.

**I2_S** has one fp32 scale for the matrix: uint8 ``[N·K/4 + 32]``. Row after row, 128 weights take
32 bytes; byte j of these holds the codes of weights j, j + 32, j + 64, j + 96, in bits 6-7, 4-5,
2-3, 0-1. Then γ, and 28 bytes without a meaning (here 0). K must be a multiple of 128: products of
bitnet.cpp read whole blocks of a row. Its ARM builds once wrote blocks of 64 weights under the same
name; nothing in a file tells, so such a file is read wrongly here, as it is by x86 builds.

Sources: llama.cpp, ``ggml/src/ggml-quants.c``; bitnet.cpp, ``src/ggml-bitnet-mad.cpp``
(``quantize_i2_s``). Numbers are little-endian.
"""

from enum import IntEnum

import torch
from torch import Tensor

from megabit_kernels.packing import (
    check_bytes,
    merge_codes,
    pack,
    require_matrix,
    split_codes,
    unpack,
)

TQ_BLOCK = 256
I2_S_BLOCK = 128
I2_S_TAIL_BYTES = 32

_TQ1_0_BYTES = 54
_TQ2_0_BYTES = 66
_SCALE_BYTES = 2
_TQ1_0_GROUPS = ((5, 32), (5, 16), (4, 4))
"""(digits to a byte, bytes) of the three parts of a TQ1_0 block: 160 + 80 + 16 weights."""


class TensorType(IntEnum):
    """What a GGUF file calls them. Mainline llama.cpp retired 36, so only bitnet.cpp reads I2_S."""

    TQ1_0 = 34
    TQ2_0 = 35
    I2_S = 36


def encode_tq1_0(packed: Tensor, k: int, scale: Tensor) -> Tensor:
    """Canonical uint8 ``[N, k/4]`` and γ → TQ1_0, uint8 ``[N, 54·k/256]``; γ is rounded to fp16."""
    blocks = _tq_blocks(packed, k)
    parts = blocks.split([digits * count for digits, count in _TQ1_0_GROUPS], dim=2)
    data = [
        _merge_digits(part.unflatten(2, group))
        for part, group in zip(parts, _TQ1_0_GROUPS, strict=True)
    ]
    return torch.cat([*data, _block_scales(blocks, scale)], dim=2).flatten(1)


def decode_tq1_0(data: Tensor) -> tuple[Tensor, Tensor]:
    """TQ1_0, uint8 ``[N, 54·K/256]`` → canonical uint8 ``[N, K/4]`` and γ, fp32 (0-dim).

    γ is 0 where every weight is 0.

    Raises:
        ValueError: blocks have different scales, so no single γ describes the matrix.
    """
    digits, scales = _tq_split(data, _TQ1_0_BYTES)
    parts = digits.split([count for _, count in _TQ1_0_GROUPS], dim=2)
    blocks = torch.cat(
        [
            _split_digits(part, count).flatten(2)
            for part, (count, _) in zip(parts, _TQ1_0_GROUPS, strict=True)
        ],
        dim=2,
    )
    return pack(blocks.flatten(1)), _common_scale(blocks, scales)


def encode_tq2_0(packed: Tensor, k: int, scale: Tensor) -> Tensor:
    """Canonical uint8 ``[N, k/4]`` and γ → TQ2_0, uint8 ``[N, 66·k/256]``; γ is rounded to fp16."""
    blocks = _tq_blocks(packed, k)
    data = merge_codes(blocks.unflatten(2, (2, 4, 32)), 3).flatten(2)
    return torch.cat([data, _block_scales(blocks, scale)], dim=2).flatten(1)


def decode_tq2_0(data: Tensor) -> tuple[Tensor, Tensor]:
    """TQ2_0, uint8 ``[N, 66·K/256]`` → canonical uint8 ``[N, K/4]`` and γ, fp32 (0-dim).

    γ is 0 where every weight is 0.

    Raises:
        ValueError: code 3, or blocks of different scales: no single γ describes the matrix.
    """
    fields, scales = _tq_split(data, _TQ2_0_BYTES)
    check_bytes(fields, "data")
    blocks = split_codes(fields.unflatten(2, (2, 32)), 3).flatten(2)
    return pack(blocks.flatten(1)), _common_scale(blocks, scales)


def encode_i2_s(packed: Tensor, k: int, scale: Tensor) -> Tensor:
    """Canonical uint8 ``[N, k/4]`` and γ → I2_S, uint8 ``[N·k/4 + 32]``; γ is rounded to fp32."""
    _require_blocks(k, I2_S_BLOCK, "I2_S")
    gamma = _gamma(scale).reshape(1).view(torch.uint8)
    # The first of four codes lies in the high bits, so they go in backwards.
    groups = unpack(packed, k).view(-1, 4, I2_S_BLOCK // 4).flip(1)
    tail = gamma.new_zeros(I2_S_TAIL_BYTES - gamma.numel())
    return torch.cat([merge_codes(groups, 1).flatten(), gamma, tail])


def decode_i2_s(data: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """I2_S of an ``[n, k]`` matrix → canonical uint8 ``[n, k/4]`` and γ, fp32 (0-dim)."""
    _require_blocks(k, I2_S_BLOCK, "I2_S")
    size = n * k // 4
    if data.dtype != torch.uint8:
        raise TypeError(f"data must be torch.uint8, not {data.dtype}")
    if tuple(data.shape) != (size + I2_S_TAIL_BYTES,):
        raise ValueError(
            f"data has shape {tuple(data.shape)}; I2_S of [{n}, {k}] is "
            f"{size + I2_S_TAIL_BYTES} bytes in one dimension"
        )
    fields = data[:size].view(-1, I2_S_BLOCK // 4)
    check_bytes(fields, "data")
    codes = split_codes(fields, 1).flip(1).view(n, k)
    gamma = data[size : size + 4].clone().view(torch.float32).view(())
    if not (bool(gamma.isfinite()) and bool(gamma >= 0)):
        raise ValueError(f"data has the scale {gamma.item()}; it must be finite and not negative")
    return pack(codes), gamma


def _tq_blocks(packed: Tensor, k: int) -> Tensor:
    """int8 codes ``[N, blocks, 256]``."""
    _require_blocks(k, TQ_BLOCK, "TQ1_0 and TQ2_0")
    return unpack(packed, k).unflatten(1, (k // TQ_BLOCK, TQ_BLOCK))


def _tq_split(data: Tensor, block_bytes: int) -> tuple[Tensor, Tensor]:
    """Bytes of the weights, ``[N, blocks, block_bytes − 2]``, and fp16 scales, ``[N, blocks]``."""
    require_matrix("data", data, torch.uint8)
    if data.shape[1] % block_bytes:
        raise ValueError(
            f"data has {data.shape[1]} bytes a row; it must be a multiple of {block_bytes}"
        )
    blocks = data.unflatten(1, (data.shape[1] // block_bytes, block_bytes))
    weights, scales = blocks.split([block_bytes - _SCALE_BYTES, _SCALE_BYTES], dim=2)
    # Fresh memory begins where fp16 may begin; a slice of a file need not.
    aligned = scales.clone(memory_format=torch.contiguous_format)
    return weights, aligned.view(torch.float16).squeeze(2)


def _block_scales(blocks: Tensor, scale: Tensor) -> Tensor:
    """The scale of each block as bytes, ``[N, blocks, 2]``."""
    gamma = _gamma(scale)
    half = gamma.to(torch.float16)
    if not (bool(half.isfinite()) and bool(half > 0)):
        raise ValueError(
            f"scale = {gamma.item()} must be in the range of fp16, which TQ types hold"
        )
    return (blocks != 0).any(2, keepdim=True) * half.view(1).view(torch.uint8)


def _common_scale(blocks: Tensor, scales: Tensor) -> Tensor:
    """The one scale that all blocks with nonzero weights have."""
    found = scales[(blocks != 0).any(2)].unique()
    if found.numel() > 1:
        raise ValueError(
            f"data has {found.numel()} different block scales, from {found.min().item()} to "
            f"{found.max().item()}; a ternary weight has one"
        )
    if found.numel() == 0:
        return torch.zeros((), device=blocks.device)
    gamma = found.to(torch.float32).view(())
    if not (bool(gamma.isfinite()) and bool(gamma > 0)):
        raise ValueError(f"data has the block scale {gamma.item()}; it must be positive and finite")
    return gamma


def _merge_digits(digits: Tensor) -> Tensor:
    """int8 codes ``[N, blocks, 4 or 5, m]`` → uint8 ``[N, blocks, m]``; the first weighs most."""
    value = torch.zeros_like(digits[:, :, 0], dtype=torch.int32)
    for place, digit in enumerate(digits.unbind(2)):
        value += (digit.to(torch.int32) + 1) * 3 ** (4 - place)
    return ((256 * value + 242) // 243).to(torch.uint8)


def _split_digits(data: Tensor, count: int) -> Tensor:
    """The inverse: uint8 ``[N, blocks, m]`` → int8 codes ``[N, blocks, count, m]``."""
    wide = data.to(torch.int32)
    fractions = torch.stack([wide * 3**place % 256 for place in range(count)], 2)
    return (3 * fractions // 256 - 1).to(torch.int8)


def _gamma(scale: Tensor) -> Tensor:
    """γ as a 0-dim fp32 tensor."""
    if scale.numel() != 1:
        raise ValueError(f"scale must have one element, not shape {tuple(scale.shape)}")
    gamma = scale.to(torch.float32).reshape(())
    if not (bool(gamma.isfinite()) and bool(gamma > 0)):
        raise ValueError(f"scale must be positive and finite, not {gamma.item()}")
    return gamma


def _require_blocks(k: int, block: int, what: str) -> None:
    if k % block:
        raise ValueError(f"K = {k} must be a multiple of {block}, the block of {what}")
