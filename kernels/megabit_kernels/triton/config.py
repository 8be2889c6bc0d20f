"""How a kernel cuts its work into tiles: what the tuner varies and what a launch needs to know."""

from dataclasses import dataclass
from typing import Literal

Kernel = Literal[
    "packed_gemm",
    "split_k",
    "int8_gemm",
    "input_gradient",
    "packed_input_gradient",
    "weight_gradient",
]
"""The products that are tuned; ``packed_input_gradient`` reads planes, ``input_gradient`` codes."""


@dataclass(frozen=True)
class TileConfig:
    """Sizes of one launch. No choice of them changes an integer result.

    In all kernels M counts tokens, N outputs and K inputs of the layer, whichever of them the
    kernel sums over.
    """

    block_m: int
    block_n: int
    block_k: int = 256
    """Fixed by the layout in kernels that read planes: a block holds 256 columns."""
    split: int = 1
    """Programs that share the sum over K of one tile."""
    group: int = 8
    """Rows of tiles that are walked together, so that their operands stay in the L2 cache."""
    warps: int = 4
    stages: int = 3
    """Depth of the pipeline that brings tiles to shared memory."""
    operand: Literal["int8", "fp16"] = "int8"
    """What the tensor cores multiply. In fp16, products of ternary codes are as exact."""

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} = {value} must be a power of two")
        for name in ("split", "group", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")


Choice = TileConfig | Literal["cublas"]
"""What the tuner chooses among: tiles of our kernel, or cuBLAS on unpacked codes."""
