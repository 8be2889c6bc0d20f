"""What follows an integer product: nothing, or the scaling that kernels fuse into it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megabit_kernels import numerics


@dataclass(frozen=True)
class Epilogue:
    """``acc → acc · (s·γ)``, rounded once in the dtype of ``s`` and then to ``dtype``."""

    x_scale: Tensor
    """s, ``[M, 1]``"""
    w_scale: Tensor
    """γ: 0-dimensional for a ternary weight, ``[N]`` for an int8 one with a scale for each row"""
    dtype: torch.dtype

    @property
    def is_fp32(self) -> bool:
        """Whether the kernels' arithmetic is the one asked for; fp64 runs scale in torch."""
        return self.x_scale.dtype == self.w_scale.dtype == torch.float32 and self.dtype in (
            torch.float32,
            torch.bfloat16,
        )

    def apply(self, acc: Tensor) -> Tensor:
        """``[M, N]`` int32 → ``[M, N]`` in ``dtype``: the reference."""
        return numerics.dequantize_product(acc, self.x_scale, self.w_scale, self.dtype)


def fused(product: Callable[[Epilogue | None], Tensor], epilogue: Epilogue | None) -> Tensor:
    """A kernel's ``product`` with its own epilogue, or torch's behind it where that differs."""
    if epilogue is None or epilogue.is_fp32:
        return product(epilogue)
    return epilogue.apply(product(None))


def finish(acc: Tensor, epilogue: Epilogue | None) -> Tensor:
    """The integers themselves, or what the epilogue makes of them."""
    return acc if epilogue is None else epilogue.apply(acc)
