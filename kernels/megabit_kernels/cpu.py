"""The operations on a CPU with the native library; what it doesn't compute goes to ``plain``.

The library computes in fp32 and bf16. fp64, in which runs are checked, is for ``plain``.
"""

import torch
from torch import Tensor

from megabit_kernels import native, plain
from megabit_kernels.conversion import Layout, lay_out
from megabit_kernels.epilogue import Epilogue, fused


def is_available() -> bool:
    """Whether the library was built and loads."""
    return native.library() is not None


def instruction_set() -> str:
    """What the library computes with on this machine."""
    return native.isas()[0]


def ternary_product(x_q: Tensor, panels: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """int8 ``[M, K]`` × ``panels`` → ``[M, N]``."""
    library = native.require()

    def product(own: Epilogue | None) -> Tensor:
        if own is None:
            return library.ternary_matmul(x_q, panels, n)
        gamma = float(own.w_scale)
        return library.ternary_linear(x_q, own.x_scale, panels, n, gamma, own.dtype)

    return fused(product, epilogue)


def int8_product(x_q: Tensor, panels: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """int8 ``[M, K]`` × int8 panels → ``[M, N]``."""
    library = native.require()

    def product(own: Epilogue | None) -> Tensor:
        if own is None:
            return library.int8_matmul(x_q, panels, n)
        return library.int8_linear(x_q, own.x_scale, panels, n, own.w_scale, own.dtype)

    return fused(product, epilogue)


def quantize_activation(x: Tensor, absmax: Tensor | None) -> tuple[Tensor, Tensor]:
    """``plain.quantize_activation`` in one pass over ``x``."""
    if x.dtype not in native.FLOATS or (absmax is not None and absmax.dtype != torch.float32):
        return plain.quantize_activation(x, absmax)
    return native.require().quantize_activation(x, absmax)


def ternarize(weight: Tensor, scale: Tensor, layout: Layout) -> Tensor:
    """``plain.ternarize`` in one pass, straight into panels where those are wanted."""
    if not weight.dtype == scale.dtype == torch.float32:
        return plain.ternarize(weight, scale, layout)
    library, gamma = native.require(), float(scale)
    if layout == "panels":
        return library.ternarize_panels(weight, gamma)
    return lay_out(library.ternarize_codes(weight, gamma), layout)
