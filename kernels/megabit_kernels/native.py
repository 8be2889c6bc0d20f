"""The native CPU kernels, as operations on torch tensors.

Each one checks its arguments, allocates the result and calls the C library with addresses.
Elementwise results have the bits of ``numerics``, integer results are exact. ``isa`` names the
instruction set, for tests and benchmarks. Weights come in two layouts:

- ternary ``panels``, uint8 ``[P, Q, 4, 64]``, as ``layouts`` describes;
- ``int8 panels``, uint8 ``[P, Q, 64, 4]``, P = ⌈N/64⌉, Q = 4·⌈K/16⌉: entry (p, q, r, i) holds
  w + 128 of row n = 64p + r and k = 4q + i; what pads N and K is 128, a weight of zero.

Both keep side by side what one vector instruction multiplies: four values of k for each of as many
rows as a register has 32-bit lanes, so that no sum crosses lanes.
"""

import ctypes
import functools
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from megabit_kernels import huge_pages, layouts, native_abi, numerics
from megabit_kernels.native_abi import TYPES, CLibrary
from megabit_kernels.native_arguments import (
    check,
    check_one_of,
    checked_panels,
    int8_panels_shape,
    matrix,
    operands,
    panels_to_fill,
    vector,
)

FLOATS = (torch.float32, torch.bfloat16)
UNPACKED = (torch.int8, *FLOATS)
"""What ``unpack_panels`` writes."""


@functools.cache
def library() -> "NativeLibrary | None":
    """The kernels, or None where they were not built or do not load; then it warns, once."""
    try:
        return NativeLibrary(native_abi.load())
    except OSError as error:
        warnings.warn(
            f"megabit_kernels has no native CPU kernels here ({error}): on the CPU, ternary "
            "products run through torch, several times slower; install gcc or clang, then this "
            "package once more",
            stacklevel=2,
        )
        return None


def require() -> "NativeLibrary":
    """The kernels, where there is no way without them."""
    native = library()
    if native is None:
        raise RuntimeError("the native CPU kernels of megabit_kernels were not built or not loaded")
    return native


def isas() -> tuple[str, ...]:
    """Names of the instruction sets usable here, best first; none without the library."""
    native = library()
    return () if native is None else tuple(native.c.isas)


@dataclass(frozen=True)
class NativeLibrary:
    """The operations. The library computes on as many threads as torch is set to use."""

    c: CLibrary

    def ternary_matmul(self, x_q: Tensor, panels: Tensor, n: int, isa: str | None = None) -> Tensor:
        """int8 ``[M, K]`` × ternary ``panels`` of ``[n, K]`` → int32 ``[M, n]``, exact."""
        x_q, panels = operands(x_q, panels, n, layouts.panels_shape)
        return self._product("ternary_product", x_q, None, panels, n, 0.0, torch.int32, isa)

    def ternary_linear(
        self,
        x_q: Tensor,
        x_scale: Tensor,
        panels: Tensor,
        n: int,
        w_scale: float,
        dtype: torch.dtype,
        isa: str | None = None,
    ) -> Tensor:
        """The same product, times the scales: the bits of ``numerics.dequantize_product``.

        Args:
            x_q: int8 ``[M, K]``.
            x_scale: fp32 ``[M, 1]``, s of each row.
            panels: ternary panels of a weight ``[n, K]``.
            w_scale: γ, a value of fp32.
            dtype: of the result ``[M, n]``: fp32 or bf16.
        """
        check_one_of("dtype", dtype, FLOATS)
        x_q, panels = operands(x_q, panels, n, layouts.panels_shape)
        x_scale = vector("x_scale", x_scale, x_q.shape[0])
        return self._product("ternary_product", x_q, x_scale, panels, n, w_scale, dtype, isa)

    def int8_matmul(self, x_q: Tensor, panels: Tensor, n: int, isa: str | None = None) -> Tensor:
        """int8 ``[M, K]`` × ``int8 panels`` of ``[n, K]`` → int32 ``[M, n]``, exact."""
        x_q, panels = operands(x_q, panels, n, int8_panels_shape)
        return self._product("int8_product", x_q, None, panels, n, None, torch.int32, isa)

    def int8_linear(
        self,
        x_q: Tensor,
        x_scale: Tensor,
        panels: Tensor,
        n: int,
        w_scale: Tensor,
        dtype: torch.dtype,
        isa: str | None = None,
    ) -> Tensor:
        """The same product, times the scales: ``fp32(acc) · (s[m] · w_scale[n])``.

        Args:
            x_q: int8 ``[M, K]``.
            x_scale: fp32 ``[M, 1]``.
            panels: int8 panels of a weight ``[n, K]``.
            w_scale: fp32 ``[n]``, one for each row of the weight.
            dtype: of the result ``[M, n]``: fp32 or bf16.
        """
        check_one_of("dtype", dtype, FLOATS)
        x_q, panels = operands(x_q, panels, n, int8_panels_shape)
        x_scale = vector("x_scale", x_scale, x_q.shape[0])
        w_scale = vector("w_scale", w_scale, n)
        scale = w_scale.data_ptr()
        return self._product("int8_product", x_q, x_scale, panels, n, scale, dtype, isa)

    def quantize_activation(
        self, x: Tensor, absmax: Tensor | None = None, isa: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Codes and scale of each row of ``x``, with the bits of ``numerics``.

        A row that holds NaN or ±Inf gets that scale and codes of zero, so its products are NaN.

        Args:
            x: fp32 or bf16 ``[M, K]``.
            absmax: fp32 ``[M, 1]``, max|x| of each row where the caller knows it.

        Returns:
            int8 ``[M, K]`` and fp32 ``[M, 1]``.
        """
        check_one_of("x.dtype", x.dtype, FLOATS)
        x = matrix("x", x, x.dtype)
        m, k = x.shape
        if absmax is not None:
            absmax = vector("absmax", absmax, m)
        x_q = torch.empty((m, k), dtype=torch.int8)
        scale = torch.empty((m, 1), dtype=torch.float32)
        self.c.run(
            "quantize_activation",
            isa,
            x.data_ptr(),
            TYPES[x.dtype],
            None if absmax is None else absmax.data_ptr(),
            x_q.data_ptr(),
            scale.data_ptr(),
            m,
            k,
        )
        return x_q, scale

    def abs_sum(self, weight: Tensor, numel: int, isa: str | None = None) -> Tensor:
        """``numerics.fixed_point_abs_sum`` of fp32 ``weight`` of any shape: int64 ``[2]``."""
        check("weight", weight, torch.float32)
        weight = weight.contiguous()
        lanes = torch.empty(2, dtype=torch.int64)
        units = numerics.small_units(numel), numerics.large_units(numel)
        self.c.run("abs_sum", isa, weight.data_ptr(), weight.numel(), *units, lanes.data_ptr())
        return lanes

    def square_sum(self, x: Tensor, largest: float, numel: int, isa: str | None = None) -> Tensor:
        """``numerics.fixed_point_square_sum`` of fp32 ``x`` of any shape: int64, 0-dimensional.

        Args:
            largest: neither 0 nor infinite nor NaN.
        """
        check("x", x, torch.float32)
        x = x.contiguous()
        total = torch.empty((), dtype=torch.int64)
        scales = numerics.shrink(largest), numerics.small_units(numel)
        self.c.run("square_sum", isa, x.data_ptr(), x.numel(), *scales, total.data_ptr())
        return total

    def ternarize_panels(
        self, weight: Tensor, scale: float, out: Tensor | None = None, isa: str | None = None
    ) -> Tensor:
        """Panels of ``numerics.ternarize(weight, scale)``; NaN becomes a weight of zero.

        Args:
            weight: fp32 ``[N, K]``.
            scale: γ, a value of fp32.
            out: panels of an earlier call for the same shape, to be written anew.
        """
        weight = matrix("weight", weight, torch.float32)
        n, k = weight.shape
        panels = panels_to_fill(layouts.panels_shape(n, k), out)
        self.c.run("ternarize_panels", isa, weight.data_ptr(), scale, panels.data_ptr(), n, k)
        return panels

    def ternarize_codes(self, weight: Tensor, scale: float, isa: str | None = None) -> Tensor:
        """int8 ``numerics.ternarize(weight, scale)`` of fp32 ``weight`` of any shape."""
        check("weight", weight, torch.float32)
        weight = weight.contiguous()
        codes = torch.empty(weight.shape, dtype=torch.int8)
        self.c.run(
            "ternarize_codes", isa, weight.data_ptr(), scale, codes.data_ptr(), weight.numel()
        )
        return codes

    def pack_panels(self, codes: Tensor, out: Tensor | None = None) -> Tensor:
        """Panels of int8 ``codes [N, K]``, each −1, 0 or 1."""
        codes = matrix("codes", codes, torch.int8)
        n, k = codes.shape
        panels = panels_to_fill(layouts.panels_shape(n, k), out)
        try:
            self.c.run("pack_panels", None, codes.data_ptr(), panels.data_ptr(), n, k)
        except ValueError:
            raise ValueError("codes hold values other than -1, 0 and 1") from None
        return panels

    def unpack_panels(
        self, panels: Tensor, n: int, k: int, dtype: torch.dtype, isa: str | None = None
    ) -> Tensor:
        """The codes −1, 0, 1 of ternary ``panels`` as ``[n, k]`` in int8, bf16 or fp32."""
        check_one_of("dtype", dtype, UNPACKED)
        panels = checked_panels(panels, layouts.panels_shape(n, k), n, k)
        out = torch.empty((n, k), dtype=dtype)
        self.c.run("unpack_panels", isa, panels.data_ptr(), out.data_ptr(), TYPES[dtype], n, k)
        return out

    def pack_int8(self, weight: Tensor) -> Tensor:
        """``int8 panels`` of int8 ``weight [N, K]``, values −127 to 127."""
        weight = matrix("weight", weight, torch.int8)
        n, k = weight.shape
        panels = panels_to_fill(int8_panels_shape(n, k), None)
        try:
            self.c.run("pack_int8", None, weight.data_ptr(), panels.data_ptr(), n, k)
        except ValueError:
            raise ValueError("weight holds -128; an int8 weight is -127 to 127") from None
        return panels

    def pack_int8_transposed(self, weight: Tensor, isa: str | None = None) -> Tensor:
        """``int8 panels`` of the transpose of int8 ``weight [N, K]``, values −127 to 127."""
        weight = matrix("weight", weight, torch.int8)
        n, k = weight.shape
        panels = torch.empty(int8_panels_shape(k, n), dtype=torch.uint8)
        try:
            self.c.run("pack_int8_transposed", isa, weight.data_ptr(), panels.data_ptr(), n, k)
        except ValueError:
            raise ValueError("weight holds -128; an int8 weight is -127 to 127") from None
        return panels

    def transpose_panels(self, panels: Tensor, n: int, k: int, isa: str | None = None) -> Tensor:
        """``int8 panels`` of the transpose of what ternary ``panels`` hold, ``[n, k]``."""
        panels = checked_panels(panels, layouts.panels_shape(n, k), n, k)
        result = torch.empty(int8_panels_shape(k, n), dtype=torch.uint8)
        self.c.run("transpose_panels", isa, panels.data_ptr(), result.data_ptr(), n, k)
        return result

    def round_rows(self, x: Tensor, key: int, isa: str | None = None) -> tuple[Tensor, Tensor]:
        """``stochastic.quantize_rows`` of fp32 ``x [M, N]``: int8 ``[M, N]``, fp32 ``[M, 1]``."""
        x = matrix("x", x, torch.float32)
        m, n = x.shape
        x_q, scale = torch.empty((m, n), dtype=torch.int8), torch.empty((m, 1), dtype=torch.float32)
        self.c.run("round_rows", isa, x.data_ptr(), key, x_q.data_ptr(), scale.data_ptr(), m, n)
        return x_q, scale

    def round_columns(
        self, x: Tensor, row_scale: Tensor, key: int, isa: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """``stochastic.quantize_columns``, transposed in the same pass.

        Args:
            x: fp32 ``[M, N]``.
            row_scale: fp32 ``[M, 1]``.

        Returns:
            int8 ``[N, M]`` and fp32 ``[N, 1]``.
        """
        x = matrix("x", x, torch.float32)
        m, n = x.shape
        row_scale = vector("row_scale", row_scale, m)
        x_q, scale = torch.empty((n, m), dtype=torch.int8), torch.empty((n, 1), dtype=torch.float32)
        self.c.run(
            "round_columns",
            isa,
            x.data_ptr(),
            row_scale.data_ptr(),
            key,
            x_q.data_ptr(),
            scale.data_ptr(),
            m,
            n,
        )
        return x_q, scale

    def measure_dot_peak(self, seconds: float, isa: str | None = None) -> float:
        """10⁹ multiplications and additions per second, of dot products between registers."""
        result = ctypes.c_double()
        self.c.run("measure_dot_peak", isa, ctypes.addressof(result), seconds)
        return result.value

    def measure_read_bandwidth(self, buffer: Tensor, repetitions: int) -> float:
        """10⁹ bytes per second at which ``buffer`` is read: the best of some repetitions."""
        result = ctypes.c_double()
        self.c.run(
            "measure_read_bandwidth",
            None,
            ctypes.addressof(result),
            buffer.data_ptr(),
            buffer.nbytes,
            repetitions,
        )
        return result.value

    def _product(
        self,
        name: str,
        x_q: Tensor,
        x_scale: Tensor | None,
        panels: Tensor,
        n: int,
        w_scale: float | int | None,
        dtype: torch.dtype,
        isa: str | None,
    ) -> Tensor:
        m, k = x_q.shape
        out = huge_pages.result((m, n), dtype)
        self.c.run(
            name,
            isa,
            x_q.data_ptr(),
            panels.data_ptr(),
            out.data_ptr(),
            TYPES[dtype],
            m,
            n,
            k,
            None if x_scale is None else x_scale.data_ptr(),
            w_scale,
        )
        return out
