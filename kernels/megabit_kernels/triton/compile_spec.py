"""What a compiler that has no GPU at hand must be told of a kernel: types, constants, expectations.

A launch derives these from its arguments. Ahead of time each kernel's module lists them, with the
configurations that it launches by default, in ``compile_specs()``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megabit_kernels.triton.config import TileConfig

TensorCores = Literal["int8", "bf16"]


@dataclass(frozen=True)
class CompileSpec:
    """One compilation of one kernel."""

    name: str
    """Unique among all specs; says what sets this compilation apart from others of the kernel."""
    kernel: Any
    """The ``triton.JITFunction``."""
    signature: dict[str, str]
    """Triton type of every argument that is no constant: ``"*i8"``, ``"i32"``, ``"fp32"``."""
    constants: dict[str, object]
    """Value of every ``tl.constexpr`` argument, and None for every pointer that is left out."""
    num_warps: int
    num_stages: int
    tensor_cores: TensorCores | None
    """Kind of matrix instruction that the code must hold; None where it multiplies no matrices.

    ``bf16`` stands for every 16-bit operand.
    """
    aligned: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16, as a launch would find out by itself.

    They let rows be read 16 bytes at a time. Every pointer counts as aligned too.
    """
    architectures: tuple[int, ...] = (80, 90, 100)
    """Compute capabilities (times ten) that the configuration is meant for."""


def spec_of_tiles(
    name: str,
    kernel: Any,
    config: TileConfig,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    tensor_cores: TensorCores | None,
) -> CompileSpec:
    """The compilation of a product for shapes that are multiples of 16.

    Args:
        signature: of all arguments but the ``tl.constexpr`` ones.
        constants: of the ``tl.constexpr`` ones; None for those of ``signature`` that are left out.
    """
    present = {name: kind for name, kind in signature.items() if name not in constants}
    return CompileSpec(
        name=name,
        kernel=kernel,
        signature=present,
        constants=dict(constants),
        num_warps=config.warps,
        num_stages=config.stages,
        tensor_cores=tensor_cores,
        aligned=tuple(name for name, kind in present.items() if kind == "i32"),
    )
