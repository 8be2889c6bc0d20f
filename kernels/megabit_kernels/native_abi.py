"""The C library of CPU kernels (``kernels/csrc``) as it is: find it, load it, call it.

It has a plain C interface and knows nothing of torch or Python. It is built when the package is
installed, if a C compiler is there. It starts no threads of its own: it uses those of the OpenMP
runtime that torch has loaded.
"""

import ctypes
from collections.abc import Callable, Mapping
from ctypes import c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

PATH = Path(__file__).with_name("libmegabit_kernels.so")

ABI = 4
"""``MEGABIT_ABI`` of csrc/megabit_kernels.h; both are raised when a signature or layout changes."""

TYPES = {
    torch.int32: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.int8: 3,
    torch.float16: 4,
}
"""``enum megabit_type``."""

ISA, POINTER, SIZE, THREADS = c_void_p, c_void_p, c_int64, c_int
PRODUCT = (POINTER, POINTER, POINTER, c_int, SIZE, SIZE, SIZE)
"""Of a product: x_q, panels, out, out_type, m, n, k."""
SIGNATURES: dict[str, tuple[type, ...]] = {
    "ternary_product": (ISA, *PRODUCT, POINTER, c_float, THREADS),  # x_scale, w_scale
    "int8_product": (ISA, *PRODUCT, POINTER, POINTER, THREADS),  # x_scale, w_scale
    # x, x_type, absmax, x_q, scale, m, k
    "quantize_activation": (ISA, POINTER, c_int, POINTER, POINTER, POINTER, SIZE, SIZE, THREADS),
    # x, count, small_units, large_units, lanes
    "abs_sum": (ISA, POINTER, SIZE, c_double, c_double, POINTER, THREADS),
    # x, count, shrink, units, total
    "square_sum": (ISA, POINTER, SIZE, c_double, c_double, POINTER, THREADS),
    "ternarize_panels": (ISA, POINTER, c_float, POINTER, SIZE, SIZE, THREADS),  # weight … n, k
    "ternarize_codes": (ISA, POINTER, c_float, POINTER, SIZE, THREADS),  # weight … count
    # x, key, x_q, scale, m, n; and with x_scale
    "round_rows": (ISA, POINTER, c_uint64, POINTER, POINTER, SIZE, SIZE, THREADS),
    "round_columns": (ISA, POINTER, POINTER, c_uint64, POINTER, POINTER, SIZE, SIZE, THREADS),
    "pack_int8_transposed": (ISA, POINTER, POINTER, SIZE, SIZE, THREADS),  # weight, panels, n, k
    "transpose_panels": (ISA, POINTER, POINTER, SIZE, SIZE, THREADS),  # panels, result, n, k
    "pack_panels": (ISA, POINTER, POINTER, SIZE, SIZE, THREADS),  # codes, panels, n, k
    "pack_int8": (ISA, POINTER, POINTER, SIZE, SIZE, THREADS),  # weight, panels, n, k
    "unpack_panels": (ISA, POINTER, POINTER, c_int, SIZE, SIZE, THREADS),  # panels, out, type, n, k
    # pages, k, v, type, slots, tokens
    "write_pages": (ISA, POINTER, POINTER, POINTER, c_int, POINTER, SIZE, THREADS),
    # q, type, pages, kv_of_query, tokens, heads, block_tables, most_blocks, query_starts,
    # context_lengths, sequences, scale, out, statistics
    "paged_attention": (
        *(ISA, POINTER, c_int, POINTER, POINTER, SIZE, SIZE, POINTER, SIZE),
        *(POINTER, POINTER, SIZE, c_float, POINTER, POINTER, THREADS),
    ),
    # x, weight, out, type, m, n, k
    "dense_product": (ISA, POINTER, POINTER, POINTER, c_int, SIZE, SIZE, SIZE, THREADS),
    "measure_dot_peak": (ISA, POINTER, c_double, THREADS),  # result, seconds
    "measure_read_bandwidth": (ISA, POINTER, POINTER, SIZE, c_int, THREADS),  # result, buffer …
}


class Pages(ctypes.Structure):
    """``struct megabit_pages``."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("keys", "values", "key_scale", "value_scale")),
        *((name, c_int64) for name in ("blocks", "kv_heads", "head_dim", "block_size")),
        ("type", c_int32),
    ]


ERRORS: dict[int, type[Exception]] = {1: MemoryError, 2: ValueError}
"""What a status other than 0 means."""


@dataclass(frozen=True)
class CLibrary:
    """The loaded library.

    Attributes:
        functions: of the C interface by name, without the prefix ``megabit_``.
        isas: address of each instruction set that this machine has, best first.
    """

    functions: Mapping[str, Callable[..., int]]
    isas: Mapping[str, int]
    best: int

    def run(self, name: str, isa: str | None, *arguments: int | float | None) -> None:
        """Call ``megabit_<name>`` on as many threads as torch would use.

        Raises:
            MemoryError, ValueError: without a message, where the function reports it.
        """
        status = self.functions[name](self._isa(isa), *arguments, torch.get_num_threads())
        if status:
            raise ERRORS[status]

    def _isa(self, name: str | None) -> int:
        if name is None:
            return self.best
        if name not in self.isas:
            raise ValueError(f"isa = {name!r} is not usable here; take one of {list(self.isas)}")
        return self.isas[name]


def load(path: Path = PATH) -> CLibrary:
    """Load a built library.

    Raises:
        OSError: there is none at ``path``, or it is not of this version of the package.
    """
    if not path.exists():
        raise OSError("they were not built")
    cdll = ctypes.CDLL(str(path))
    version = getattr(cdll, "megabit_abi", None)
    if version is None or version() != ABI:
        raise OSError(f"{path.name} belongs to another version of the package")
    functions: dict[str, Callable[..., int]] = {}
    for name, arguments in SIGNATURES.items():
        function = getattr(cdll, f"megabit_{name}")
        function.restype, function.argtypes = c_int, arguments
        functions[name] = function
    isas = _usable_isas(cdll)
    return CLibrary(functions, isas, next(iter(isas.values())))


def _usable_isas(cdll: ctypes.CDLL) -> dict[str, int]:
    cdll.megabit_isa.restype, cdll.megabit_isa.argtypes = ISA, (c_int,)
    cdll.megabit_isa_name.restype, cdll.megabit_isa_name.argtypes = c_char_p, (ISA,)
    found: dict[str, int] = {}
    while address := cdll.megabit_isa(len(found)):
        found[cdll.megabit_isa_name(address).decode()] = address
    return found
