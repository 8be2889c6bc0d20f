"""The one table that says what computes an operation: device × M → implementation.

Rows stand in the order of preference. A row takes a call if it is for the device, is for the layout
that the weight is held in, and accepts the sizes; the last row of an operation takes anything. All
implementations of an integer product give the same bits, so the choice is about time only, and the
slowest one serves as the oracle of the others. A test or a benchmark names one instead, and the
weight is then converted for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from megabit_kernels import cpu, gpu, numerics, plain, plain_attention
from megabit_kernels.conversion import Int8Layout, Layout
from megabit_kernels.triton.limits import DECODE_ROWS

Operation = Literal[
    "ternary_matmul",
    "int8_linear",
    "input_gradient",
    "weight_gradient",
    "int8_input_gradient",
    "int8_weight_gradients",
    "quantize_activation",
    "rms_norm_quantize",
    "glu_rms_norm_quantize",
    "abs_sum",
    "square_sum",
    "absmean_scale",
    "ternarize",
    "cross_entropy",
    "cross_entropy_gradient",
    "write_pages",
    "paged_attention",
    "dense_linear",
]


@dataclass(frozen=True)
class Implementation:
    """A row of the table."""

    name: str
    device: str | None
    """A torch device type; None is any."""
    run: Callable[..., Any]
    layout: Layout | Int8Layout | None = None
    """The layout of the weight that it reads; None where the operation has no weight."""
    accepts: Callable[[int, int, int], bool] = lambda m, n, k: True
    """Whether it computes ``[M, K] × [N, K]ᵀ`` well, or at all, on this machine."""

    def runs_on(self, device: torch.device) -> bool:
        """Whether it takes tensors of ``device``; Triton's interpreter takes a CPU's."""
        if self.device in (None, device.type):
            return True
        return self.name.startswith("triton") and gpu.runs_on(device)


def _native(m: int, n: int, k: int) -> bool:
    """Portable C, for CPUs of which no vector code is known, loses to torch beyond 3 tokens."""
    return cpu.is_available() and cpu.instruction_set() != "portable"


def _library(m: int, n: int, k: int) -> bool:
    """Portable C is faster than torch where torch would take one elementwise step after another."""
    return cpu.is_available()


def _vnni(m: int, n: int, k: int) -> bool:
    """``torch._int_mm`` is 8 times faster than fp32 with VNNI, and a naive loop without."""
    return torch.cpu._is_vnni_supported()


def _cublas_int8(m: int, n: int, k: int) -> bool:
    return m > 16 and k % 8 == 0 and n % 8 == 0


def _triton(m: int, n: int, k: int) -> bool:
    return gpu.is_available()


def _triton_decode(m: int, n: int, k: int) -> bool:
    return m <= DECODE_ROWS and gpu.is_available()


TABLE: dict[Operation, tuple[Implementation, ...]] = {
    "ternary_matmul": (
        Implementation("native", "cpu", cpu.ternary_product, "panels", _native),
        Implementation("triton_split_k", "cuda", gpu.split_k_product, "planes", _triton_decode),
        Implementation("triton", "cuda", gpu.packed_product, "planes", _triton),
        Implementation("torch_int_mm", "cpu", plain.int_mm_product, "int8", _vnni),
        Implementation("cublas_int8", "cuda", plain.int_mm_product, "int8", _cublas_int8),
        Implementation("bf16", "cuda", plain.bf16_product, "int8"),
        Implementation("torch_fp32", None, plain.fp32_product, "int8"),
    ),
    "int8_linear": (
        Implementation("native", "cpu", cpu.int8_product, "int8_panels", _native),
        Implementation("triton", "cuda", gpu.int8_product, "int8", _triton),
        Implementation("torch_int_mm", "cpu", plain.int_mm_product, "int8", _vnni),
        Implementation("torch_fp32", None, plain.fp32_int8_product, "int8"),
    ),
    "input_gradient": (
        Implementation("triton", "cuda", gpu.input_gradient, accepts=_triton),
        Implementation("torch", None, plain.input_gradient),
    ),
    "weight_gradient": (
        Implementation("triton", "cuda", gpu.weight_gradient, accepts=_triton),
        Implementation("torch", None, plain.weight_gradient),
    ),
    "int8_input_gradient": (
        Implementation("native", "cpu", cpu.int8_input_gradient, accepts=_native),
        Implementation("triton", "cuda", gpu.int8_input_gradient, accepts=_triton),
        Implementation("torch", None, plain.int8_input_gradient),
    ),
    "int8_weight_gradients": (
        Implementation("native", "cpu", cpu.int8_weight_gradients, accepts=_native),
        Implementation("triton", "cuda", gpu.int8_weight_gradients, accepts=_triton),
        Implementation("torch", None, plain.int8_weight_gradients),
    ),
    "quantize_activation": (
        Implementation("native", "cpu", cpu.quantize_activation, accepts=_native),
        Implementation("triton", "cuda", gpu.quantize_activation, accepts=_triton),
        Implementation("torch", None, plain.quantize_activation),
    ),
    "rms_norm_quantize": (
        Implementation("triton", "cuda", gpu.rms_norm_quantize, accepts=_triton),
        Implementation("torch", None, plain.rms_norm_quantize),
    ),
    "glu_rms_norm_quantize": (
        Implementation("triton", "cuda", gpu.glu_rms_norm_quantize, accepts=_triton),
        Implementation("torch", None, plain.glu_rms_norm_quantize),
    ),
    "abs_sum": (
        Implementation("native", "cpu", cpu.abs_sum, accepts=_native),
        Implementation("torch", None, numerics.fixed_point_abs_sum),
    ),
    "square_sum": (
        Implementation("native", "cpu", cpu.square_sum, accepts=_native),
        Implementation("torch", None, numerics.fixed_point_square_sum),
    ),
    "absmean_scale": (
        Implementation("native", "cpu", cpu.absmean_scale, accepts=_native),
        Implementation("torch", None, numerics.absmean_scale),
    ),
    "ternarize": (
        Implementation("native", "cpu", cpu.ternarize, accepts=_native),
        Implementation("triton", "cuda", gpu.ternarize, accepts=_triton),
        Implementation("torch", None, plain.ternarize),
    ),
    "cross_entropy": (
        Implementation("triton", "cuda", gpu.cross_entropy, accepts=_triton),
        Implementation("torch", None, plain.cross_entropy),
    ),
    "cross_entropy_gradient": (
        Implementation("triton", "cuda", gpu.cross_entropy_gradient, accepts=_triton),
        Implementation("torch", None, plain.cross_entropy_gradient),
    ),
    "write_pages": (
        Implementation("native", "cpu", cpu.write_pages, accepts=_library),
        Implementation("triton", "cuda", gpu.write_pages, accepts=_triton),
        Implementation("torch", None, plain_attention.write_pages),
    ),
    "paged_attention": (
        Implementation("native", "cpu", cpu.paged_attention, accepts=_library),
        Implementation("triton", "cuda", gpu.paged_attention, accepts=_triton),
        Implementation("torch", None, plain_attention.paged_attention),
    ),
    "dense_linear": (
        Implementation("native", "cpu", cpu.dense_linear, accepts=_library),
        Implementation("triton", "cuda", gpu.dense_linear, accepts=_triton),
        Implementation("torch", None, plain_attention.dense_linear),
    ),
}


def implementations(operation: Operation, device: str | torch.device) -> tuple[str, ...]:
    """Names of what can compute ``operation`` on a device type, in the order of preference."""
    kind = torch.device(device).type
    return tuple(
        row.name
        for row in TABLE[operation]
        if row.device in (None, kind) and any(row.accepts(m, 64, 64) for m in (1, 64))
    )


def product_kernel(device: torch.device) -> str:
    """What computes ternary products of many tokens on ``device``, in words."""
    name = select("ternary_matmul", device, 1024, 64, 64).name
    return f"{name} ({cpu.instruction_set()})" if name == "native" else name


def best_layout(device: torch.device) -> Layout:
    """The layout in which a ternary weight is held on ``device``."""
    return cast(Layout, select("ternary_matmul", device, 64, 64, 64).layout)


def best_int8_layout(device: torch.device) -> Int8Layout:
    """The layout in which an int8 weight is held on ``device``."""
    return cast(Int8Layout, select("int8_linear", device, 64, 64, 64).layout)


def layout_of(operation: Operation, name: str) -> Layout:
    """The layout in which an implementation wants a ternary weight."""
    return cast(Layout, _named(operation, name).layout)


def select(
    operation: Operation,
    device: torch.device,
    m: int,
    n: int,
    k: int,
    layout: str | None = None,
    name: str | None = None,
) -> Implementation:
    """The implementation for a call; ``layout`` is None where there is no weight yet or at all."""
    if name is not None:
        return _named(operation, name, device)
    fallback = None
    for row in TABLE[operation]:
        if row.device in (None, device.type) and row.accepts(m, n, k):
            if layout in (None, row.layout):
                return row
            fallback = fallback or row
    assert fallback is not None  # the last row takes anything
    return fallback


def _named(operation: Operation, name: str, device: torch.device | None = None) -> Implementation:
    for row in TABLE[operation]:
        if row.name == name:
            if device is not None and not row.runs_on(device):
                raise ValueError(f"implementation {name!r}: it is for {row.device}, not {device}")
            return row
    known = ", ".join(row.name for row in TABLE[operation])
    raise ValueError(f"implementation {name!r}: {operation} has {known}")
