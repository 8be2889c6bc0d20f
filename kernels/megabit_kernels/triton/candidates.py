"""The tiles worth trying for a product, and those to use where nothing was measured.

A default holds its sums in registers without a spill on sm_80, sm_90 and sm_100, which compiling it
shows. Whether it is fast only a card can tell: that is what the tuner is for.
"""

from dataclasses import dataclass, replace

from megabit_kernels.triton.config import Choice, Kernel, TileConfig
from megabit_kernels.triton.limits import DECODE_ROWS

BLOCK = 256
"""Columns of a block of planes: the unit in which split-K splits."""


@dataclass(frozen=True)
class Card:
    """What the choice of tiles depends on."""

    name: str
    multiprocessors: int
    capability: int
    """Compute capability times ten: 80 is Ampere, 90 Hopper, 100 and 103 Blackwell."""

    @property
    def favours_fp16(self) -> bool:
        """Whether fp16 has the newest tensor cores to itself.

        So it is on data-centre Blackwell: Triton multiplies int8 by the instructions of older cards
        on sm_100, and sm_103 has no others.
        """
        return 100 <= self.capability < 120


def default(kernel: Kernel, m: int, n: int, k: int, card: Card) -> TileConfig:
    """Tiles for a shape that was not measured."""
    if kernel == "split_k":
        return _split(DECODE, n, k, card, waves=2)
    if kernel == "packed_gemm" and card.favours_fp16:
        return replace(FEW_ROWS if m <= 32 else MANY_ROWS, operand="fp16")
    if kernel == "packed_gemm":
        return FEW_ROWS if m <= 32 else SOME_ROWS if m <= 64 else MANY_ROWS if m <= 512 else PREFILL
    if kernel == "int8_gemm":
        return INT8_DECODE if m <= DECODE_ROWS else INT8_SOME_ROWS if m <= 64 else INT8_MANY_ROWS
    return WEIGHT_GRADIENT if kernel == "weight_gradient" else INPUT_GRADIENT


def candidates(kernel: Kernel, m: int, n: int, k: int, card: Card) -> tuple[Choice, ...]:
    """What to measure: the default, all else that fits M, and cuBLAS last."""
    if kernel == "split_k":
        tiles = [_split(tile, n, k, card, waves) for tile in _SPLIT_K for waves in (0, 1, 2, 4, 8)]
    elif kernel == "packed_gemm":
        tiles = [tile for tile in _PACKED_GEMM if tile.block_m <= max(32, 2 * m)]
        if card.capability >= 100:
            tiles += [replace(tile, operand="fp16") for tile in tiles]
    elif kernel == "int8_gemm":
        tiles = [tile for tile in _INT8_GEMM if tile.block_m <= max(DECODE_ROWS, 2 * m)]
    else:
        tiles = list(_WEIGHT_GRADIENT if kernel == "weight_gradient" else _INPUT_GRADIENT)
    return (*dict.fromkeys((default(kernel, m, n, k, card), *tiles)), "cublas")


def _split(tile: TileConfig, n: int, k: int, card: Card, waves: int) -> TileConfig:
    """``tile`` with so many programs on a sum that each multiprocessor gets ``waves`` of them."""
    tiles = max(1, -(-n // tile.block_n))
    blocks = max(1, -(-k // BLOCK))
    return replace(tile, split=min(max(1, waves * card.multiprocessors // tiles), blocks))


DECODE = TileConfig(DECODE_ROWS, 64, stages=4)
FEW_ROWS = TileConfig(32, 128, stages=4)
SOME_ROWS = TileConfig(64, 128)
MANY_ROWS = TileConfig(128, 128, warps=8)
PREFILL = TileConfig(128, 256, warps=8)
INT8_DECODE = TileConfig(DECODE_ROWS, 128, 128, stages=4)
INT8_SOME_ROWS = TileConfig(64, 128, 128)
INT8_MANY_ROWS = TileConfig(128, 128, 64, warps=8, stages=4)
INPUT_GRADIENT = TileConfig(128, 64, 128, warps=8)
WEIGHT_GRADIENT = TileConfig(64, 128, 128, warps=8)

_SPLIT_K = (
    TileConfig(DECODE_ROWS, 16, warps=1, stages=6),
    TileConfig(DECODE_ROWS, 32, warps=2, stages=5),
    TileConfig(DECODE_ROWS, 64, warps=4, stages=3),
    TileConfig(DECODE_ROWS, 64, warps=4, stages=5),
    TileConfig(DECODE_ROWS, 128, warps=4, stages=4),
)
_PACKED_GEMM = (
    TileConfig(32, 64, stages=4),
    TileConfig(32, 128, stages=4),
    TileConfig(64, 64, stages=4),
    TileConfig(64, 128),
    TileConfig(64, 128, stages=4),
    TileConfig(64, 256, warps=8),
    TileConfig(128, 64, stages=3),
    TileConfig(128, 128),
    TileConfig(128, 128, warps=8),
    TileConfig(128, 128, warps=8, stages=4),
    TileConfig(128, 256, warps=8),
    TileConfig(128, 256, warps=8, stages=4),
    TileConfig(256, 128, warps=8),
)
_INT8_GEMM = (
    TileConfig(DECODE_ROWS, 64, 128, stages=5),
    TileConfig(DECODE_ROWS, 128, 128, stages=4),
    TileConfig(DECODE_ROWS, 128, 256, stages=3),
    TileConfig(32, 128, 128, stages=4),
    TileConfig(64, 64, 128, stages=4),
    TileConfig(64, 128, 128),
    TileConfig(64, 256, 128, warps=8),
    TileConfig(128, 128, 64, stages=4),
    TileConfig(128, 128, 64, warps=8, stages=4),
    TileConfig(128, 128, 128, warps=8),
    TileConfig(128, 128, 128, warps=8, stages=4),
    TileConfig(128, 256, 128, warps=8),
    TileConfig(256, 128, 128, warps=8),
)
_INPUT_GRADIENT = (
    TileConfig(64, 64, 128),
    TileConfig(128, 32, 128, warps=8, stages=4),
    TileConfig(128, 64, 64),
    TileConfig(128, 64, 128),
    TileConfig(128, 64, 128, warps=8),
    TileConfig(128, 64, 128, warps=8, stages=4),
    TileConfig(128, 64, 256, warps=8),
    TileConfig(256, 64, 128, warps=8),
)
_WEIGHT_GRADIENT = (
    TileConfig(32, 128, 128, warps=8, stages=4),
    TileConfig(64, 64, 128),
    TileConfig(64, 128, 64),
    TileConfig(64, 128, 128),
    TileConfig(64, 128, 128, warps=8),
    TileConfig(64, 128, 128, warps=8, stages=4),
    TileConfig(64, 128, 256, warps=8),
    TileConfig(64, 256, 128, warps=8),
)
