"""From torch to a kernel: operands checked, made contiguous, and the launch itself.

What one kernel relies on, every wrapper checks here, so that a wrong shape is a ``ValueError`` with
the argument's name and not a fault on the device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabit_kernels.epilogue import Epilogue
from megabit_kernels.layouts import planes_shape
from megabit_kernels.numerics import MAX_EXACT_K
from megabit_kernels.triton.arithmetic import is_interpreted
from megabit_kernels.triton.config import TileConfig
from megabit_kernels.triton.limits import FLOATS, OUTPUTS


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, config: TileConfig) -> None:
    """Runs ``kernel`` over ``grid``, unless that is empty, where its first argument is."""
    if 0 in grid:
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, num_warps=config.warps, num_stages=config.stages)


def matrix(name: str, x: Tensor, *dtypes: torch.dtype) -> Tensor:
    """``x``, contiguous, if it is a matrix of one of ``dtypes``."""
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: two dimensions are wanted")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} is {x.dtype}: {' or '.join(map(str, dtypes))} is wanted")
    return x.contiguous()


def shaped(name: str, x: Tensor, *shape: int) -> Tensor:
    """``x``, contiguous, if it has ``shape``."""
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: {list(shape)} is wanted")
    return x.contiguous()


def check_float(name: str, x: Tensor) -> None:
    """Refuses what the kernels do not compute in fp32."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} is {x.dtype}: {' or '.join(map(str, FLOATS))} is wanted")


def on_one_device(**tensors: Tensor | None) -> None:
    """Refuses tensors on different devices, and tensors that the kernels cannot reach."""
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"operands are on different devices: {listed}")
    if not is_interpreted() and any(device.type != "cuda" for device in devices.values()):
        raise ValueError(f"{next(iter(devices))} is not on a GPU, where Triton's kernels run")


class Operands(NamedTuple):
    """The inputs of an integer product, checked."""

    x_q: Tensor
    """int8 ``[M, K]``"""
    weight: Tensor
    m: int
    n: int
    k: int


def packed_operands(x_q: Tensor, planes: Tensor, config: TileConfig) -> Operands:
    """Activations, in the dtype that ``config`` multiplies, and planes."""
    x_q = matrix("x_q", x_q, torch.int8)
    planes = matrix("planes", planes, torch.uint8)
    on_one_device(x_q=x_q, planes=planes)
    (m, k), n = x_q.shape, planes.shape[0]
    _check_k(k)
    planes = shaped("planes", planes, *planes_shape(n, k))
    x_q = x_q.to(torch.float16) if config.operand == "fp16" else x_q
    return Operands(x_q, planes, m, n, k)


def int8_operands(x_q: Tensor, weight: Tensor) -> Operands:
    """Activations and int8 weights ``[N, K]``."""
    x_q = matrix("x_q", x_q, torch.int8)
    weight = matrix("weight", weight, torch.int8)
    on_one_device(x_q=x_q, weight=weight)
    (m, k), n = x_q.shape, weight.shape[0]
    _check_k(k)
    return Operands(x_q, shaped("weight", weight, n, k), m, n, k)


def _check_k(k: int) -> None:
    if k > MAX_EXACT_K:
        raise ValueError(f"K = {k} exceeds {MAX_EXACT_K}, the widest exact product")


class Output(NamedTuple):
    """Where a product goes and what it is scaled by, checked."""

    y: Tensor
    x_scale: Tensor | None
    w_scale: Tensor | None


def output(operands: Operands, epilogue: Epilogue | None, rows_scaled: bool = False) -> Output:
    """An uninitialised ``[M, N]``: int32 without an epilogue.

    Args:
        rows_scaled: whether the weight has a scale for each of its N rows.
    """
    x_q, _, m, n, _ = operands
    if epilogue is None:
        return Output(x_q.new_empty(m, n, dtype=torch.int32), None, None)
    x_scale, w_scale, dtype = epilogue.x_scale, epilogue.w_scale, epilogue.dtype
    on_one_device(x_q=x_q, x_scale=x_scale, w_scale=w_scale)
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} is {scale.dtype}: torch.float32 is wanted")
    if dtype not in OUTPUTS:
        raise TypeError(f"dtype is {dtype}: {' or '.join(map(str, OUTPUTS))} is wanted")
    x_scale = shaped("x_scale", x_scale, m, 1)
    w_scale = shaped("w_scale", w_scale, *((n,) if rows_scaled else ()))
    return Output(x_q.new_empty(m, n, dtype=stored(dtype)), x_scale, w_scale)


def stored(dtype: torch.dtype) -> torch.dtype:
    """What a kernel is to store for a result in ``dtype``; the caller converts the rest of the way.

    The interpreter cuts off bits where a GPU rounds to bf16, so torch does that for it.
    """
    return torch.float32 if is_interpreted() and dtype == torch.bfloat16 else dtype
