"""Codes into a layout and back, by a kernel of the device where there is one.

Every function gives what its plain form in ``layouts`` and ``packing`` gives, bit for bit.
"""

from typing import Literal, cast, get_args

import torch
from torch import Tensor

from megabit_kernels import layouts, native, packing

Layout = Literal["packed", "planes", "panels", "int8"]
"""How the codes of a ternary weight lie in memory, see ``packing`` and ``layouts``."""

Int8Layout = Literal["int8", "int8_panels"]
"""How an int8 weight lies in memory: by rows, or as the native CPU kernels read it."""


def data_shape(layout: Layout, n: int, k: int) -> tuple[int, ...]:
    """Shape of the tensor that holds ``[N, K]`` codes in ``layout``."""
    return {
        "int8": (n, k),
        "packed": (n, packing.packed_width(k)),
        "planes": layouts.planes_shape(n, k),
        "panels": layouts.panels_shape(n, k),
    }[layout]


def data_dtype(layout: Layout) -> torch.dtype:
    """``torch.int8`` for layout ``int8``, bytes for the others."""
    return torch.int8 if layout == "int8" else torch.uint8


def lay_out(codes: Tensor, layout: Layout) -> Tensor:
    """int8 codes ``[N, K]`` → ``layout``."""
    check_layout(layout)
    if layout == "int8":
        return codes.contiguous()
    if layout == "packed":
        return packing.pack(codes)
    if layout == "planes":
        return layouts.to_planes(codes)
    if _is_native(codes):
        return native.require().pack_panels(codes)
    return layouts.to_panels(codes)


def unpack(data: Tensor, layout: Layout, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """``layout`` → codes ``[N, K]`` in ``dtype``."""
    check_layout(layout)
    if layout == "panels" and _is_native(data):
        library = native.require()
        if dtype in native.UNPACKED:
            return library.unpack_panels(data, n, k, dtype)
        return library.unpack_panels(data, n, k, torch.int8).to(dtype)
    if layout == "int8":
        codes = data
    elif layout == "packed":
        codes = packing.unpack(data, k)
    elif layout == "planes":
        codes = layouts.from_planes(data, k)
    else:
        codes = layouts.from_panels(data, n, k)
    return codes.to(dtype)


def convert(data: Tensor, source: str, target: str, n: int, k: int) -> Tensor:
    """A weight for an implementation that reads another layout: for tests, not for speed."""
    if "int8_panels" in (source, target):
        return lay_out_int8(unpack_int8(data, cast(Int8Layout, source), n, k), target)
    codes = unpack(data, cast(Layout, source), n, k, torch.int8)
    return lay_out(codes, cast(Layout, target))


def lay_out_int8(values: Tensor, layout: str) -> Tensor:
    """int8 ``[N, K]``, each −127 to 127 → ``layout``."""
    return native.require().pack_int8(values) if layout == "int8_panels" else values


def unpack_int8(data: Tensor, layout: Int8Layout, n: int, k: int) -> Tensor:
    """``layout`` → int8 ``[N, K]``."""
    if layout == "int8":
        return data
    num_panels, num_quads, rows, _ = data.shape  # as ``native`` describes them
    values = data.transpose(1, 2).reshape(num_panels * rows, num_quads * 4)[:n, :k]
    return (values.to(torch.int16) - 128).to(torch.int8)


def check_layout(layout: str) -> None:
    """Raise ValueError unless a ternary weight can be held in ``layout``."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout {layout!r}: one of {', '.join(get_args(Layout))} is wanted")


def _is_native(x: Tensor) -> bool:
    return x.device.type == "cpu" and native.library() is not None
