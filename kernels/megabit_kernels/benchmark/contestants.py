"""Who takes part: our implementations, and what people use in their place.

Every contestant multiplies the same tokens ``[M, K]`` with a weight ``[N, K]`` of one layer, in the
form that it likes best:

- ``default``: ``ternary_matmul`` as dispatch decides, from int8 tokens to int32
- ``native``, ``triton``, …: the same by the implementation of that name
- ``native:avx2``, …: by an instruction set that is not this machine's best, if asked for
- ``bitlinear``: the whole layer, from floating point through quantization and back
- ``fp32``, ``bf16``: ``torch.mm``, on a card cuBLAS
- ``int_mm``: ``torch._int_mm`` of int8 codes, on a card cuBLAS
- ``fake_quantized``: the layer as people write it, both operands quantized and dequantized at every
  call before ``F.linear``

Whole layers are in fp32 on a CPU and in bf16 on a card.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megabit_kernels import native
from megabit_kernels.benchmark.clock import Call
from megabit_kernels.benchmark.roofline import Operands, Roofline
from megabit_kernels.benchmark.shapes import Layer
from megabit_kernels.benchmark.weights import Form, LayerWeights, bytes_per_value
from megabit_kernels.dispatch import best_layout, implementations, layout_of, select
from megabit_kernels.functional import quantize_activation, ternary_linear, ternary_matmul
from megabit_kernels.numerics import MIN_SCALE
from megabit_kernels.weight import TernaryWeight

BASELINES = ("fp32", "bf16", "int_mm", "fake_quantized")

COMPUTES_IN: dict[str, Operands] = {"torch_fp32": "float32", "bf16": "bfloat16"}
"""Implementations that multiply in floating point; the others do in int8."""

# What a prediction takes for the time of a call. Passes count the traffic of temporaries, too.
COMPUTE_SLACK = 1.5
CONVERSION_PASSES = 9
FAKE_QUANTIZATION_PASSES = 12
LEAST_CALL_S = 5e-6


@dataclass(frozen=True)
class Contestant:
    """A way to compute the product of one layer with some number of tokens."""

    name: str
    implementation: str
    """What computes it: for ``default`` and ``bitlinear`` the one that dispatch chose"""
    is_ours: bool
    operands: Operands
    """What it multiplies, which says which peak bounds it"""
    form: Form
    """Of the weights"""
    prepare: Callable[[Tensor], Callable[[Any], object]]
    """Tokens, fp32 ``[M, K]`` → the product as a function of one weight"""
    passes: int = 1
    """Roughly how often a call goes through its weight"""

    def calls(self, x: Tensor, weights: LayerWeights, cold: bool) -> list[Call]:
        """One call for each distinct weight, or one only, that finds its weight where it left it.

        Raises:
            NoRoom: the weights need more memory than they may take.
        """
        product = self.prepare(x)
        forms = weights.of(self.form)
        return [partial(product, form) for form in (forms if cold else forms[:1])]

    def predicted_s(self, layer: Layer, m: int, roofline: Roofline) -> float:
        """About how long a call takes."""
        computing = COMPUTE_SLACK * layer.operations(m) / roofline.peaks[self.operands]
        weight_bytes = layer.n * layer.k * bytes_per_value(self.form)
        return LEAST_CALL_S + computing + self.passes * weight_bytes / roofline.memory_bandwidth


def our_names(device: torch.device) -> tuple[str, ...]:
    """The contestants of this package that take part unless others are named."""
    return ("default", *implementations("ternary_matmul", device), "bitlinear")


def other_names(device: torch.device) -> tuple[str, ...]:
    """Those that take part only if they are named."""
    return tuple(f"native:{isa}" for isa in native.isas()[1:]) if device.type == "cpu" else ()


def contestant(name: str, layer: Layer, m: int, device: torch.device) -> Contestant:
    """The contestant of that name, from ``BASELINES``, ``our_names`` or ``other_names``."""
    if name in BASELINES:
        return _baseline(name, device)
    implementation, _, isa = name.partition(":")
    asked = None if name in ("default", "bitlinear") else implementation
    layout = best_layout(device) if asked is None else layout_of("ternary_matmul", asked)
    chosen = select("ternary_matmul", device, m, layer.n, layer.k, layout, asked).name
    prepare: Callable[[Tensor], Callable[[TernaryWeight], Tensor]] = partial(_matmul, asked)
    if name == "bitlinear":
        prepare = partial(_bit_linear, _layer_dtype(device))
    elif isa:
        prepare = partial(_native_matmul, isa)
    return Contestant(
        name,
        name if isa else chosen,
        is_ours=True,
        operands=COMPUTES_IN.get(chosen, "int8"),
        form=layout,
        prepare=prepare,
        passes=CONVERSION_PASSES if chosen in COMPUTES_IN else 1,
    )


def _baseline(name: str, device: torch.device) -> Contestant:
    library = "cuBLAS" if device.type == "cuda" else "torch"
    if name == "int_mm":
        return Contestant(name, library, False, "int8", torch.int8, _int_mm)
    if name == "fake_quantized":
        dtype = _layer_dtype(device)
        prepare = partial(_fake_quantized, dtype)
        operands, passes = OPERANDS_OF[dtype], FAKE_QUANTIZATION_PASSES
        return Contestant(name, library, False, operands, dtype, prepare, passes)
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    return Contestant(name, library, False, OPERANDS_OF[dtype], dtype, partial(_mm, dtype))


OPERANDS_OF: dict[torch.dtype, Operands] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def _layer_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _matmul(implementation: str | None, x: Tensor) -> Callable[[TernaryWeight], Tensor]:
    x_q, _ = quantize_activation(x)
    return lambda weight: ternary_matmul(x_q, weight, implementation)


def _native_matmul(isa: str, x: Tensor) -> Callable[[TernaryWeight], Tensor]:
    x_q, _ = quantize_activation(x)
    matmul = native.require().ternary_matmul
    return lambda weight: matmul(x_q, weight.data, weight.shape[0], isa)


def _bit_linear(dtype: torch.dtype, x: Tensor) -> Callable[[TernaryWeight], Tensor]:
    x = x.to(dtype)
    return lambda weight: ternary_linear(*quantize_activation(x), weight, dtype)


def _mm(dtype: torch.dtype, x: Tensor) -> Callable[[Tensor], Tensor]:
    x = x.to(dtype)
    return lambda weight: torch.mm(x, weight.t())


def _int_mm(x: Tensor) -> Callable[[Tensor], Tensor]:
    x_q, _ = quantize_activation(x)
    return lambda weight: torch._int_mm(x_q, weight.t())


def _fake_quantized(dtype: torch.dtype, x: Tensor) -> Callable[[Tensor], Tensor]:
    x = x.to(dtype)
    return lambda weight: fake_quantized_linear(x, weight)


def fake_quantized_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``numerics.fake_quantized_linear`` as it is written for speed.

    Without a gradient it needs no straight-through terms, and γ is summed in the weight's dtype,
    not in fp64.
    """
    gamma = weight.abs().mean().clamp_min(MIN_SCALE)
    w_hat = (weight / gamma).round().clamp(-1, 1) * gamma
    s = x.abs().amax(-1, keepdim=True).clamp_min(MIN_SCALE) / 127
    x_hat = (x / s).round().clamp(-128, 127) * s
    return torch.nn.functional.linear(x_hat, w_hat)
