"""What the native kernels take: CPU tensors of one dtype, contiguous, of sizes that fit.

The C library trusts what it is given, so all of this is checked before it is called.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megabit_kernels import huge_pages, numerics
from megabit_kernels.layouts import PANEL_COLUMNS, PANEL_ROWS


def int8_panels_shape(n: int, k: int) -> tuple[int, ...]:
    """Shape of the int8 panels of a weight ``[n, k]``."""
    return math.ceil(n / PANEL_ROWS), 4 * math.ceil(k / PANEL_COLUMNS), PANEL_ROWS, 4


def operands(
    x_q: Tensor, panels: Tensor, n: int, shape: Callable[[int, int], tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """int8 ``x_q [M, K]`` and the panels, of ``shape(n, K)``, that it is multiplied with."""
    x_q = matrix("x_q", x_q, torch.int8)
    k = x_q.shape[1]
    return x_q, checked_panels(panels, shape(n, k), n, k)


def matrix(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` contiguous, if it has two dimensions."""
    check(name, x, dtype)
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have two dimensions")
    return x.contiguous()


def vector(name: str, x: Tensor, count: int) -> Tensor:
    """fp32 ``x`` contiguous, if it has so many values."""
    check(name, x, torch.float32)
    if x.numel() != count:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have {count} values")
    return x.contiguous()


def checked_panels(panels: Tensor, shape: tuple[int, ...], n: int, k: int) -> Tensor:
    """``panels`` contiguous, if they have the ``shape`` of an ``[n, k]`` weight."""
    check("panels", panels, torch.uint8)
    if panels.shape != shape:
        raise ValueError(f"panels have shape {tuple(panels.shape)}; for {n} × {k} it is {shape}")
    if k > numerics.MAX_EXACT_K:
        raise ValueError(f"K = {k} exceeds {numerics.MAX_EXACT_K}, the widest exact product")
    return panels.contiguous()


def panels_to_fill(shape: tuple[int, ...], out: Tensor | None) -> Tensor:
    """``out``, or new memory in huge pages."""
    if out is None:
        return huge_pages.empty(shape, torch.uint8)
    check("out", out, torch.uint8)
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out has shape {tuple(out.shape)}; it must be {shape}, contiguous")
    return out


def check(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError unless ``x`` is on the CPU and of ``dtype``."""
    if x.dtype != dtype or not x.is_cpu:
        raise TypeError(f"{name} is {x.dtype} on {x.device}; it must be {dtype} on the CPU")


def check_one_of(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless ``dtype`` is one of those ``allowed``."""
    if dtype not in allowed:
        raise TypeError(f"{name} is {dtype}; it must be one of {', '.join(map(str, allowed))}")
