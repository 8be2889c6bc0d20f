"""Kernels for ternary weights and int8 activations: Triton on GPUs, native code on CPUs, or torch.

``functional`` has the operations, ``weight`` what they take. This package never imports
``megabit``.
"""

from megabit_kernels.attention import (
    causal_attention,
    dense_linear,
    paged_attention,
    runs_native,
    trained_attention,
    write_pages,
)
from megabit_kernels.dispatch import implementations, product_kernel
from megabit_kernels.functional import (
    abs_sum,
    bit_linear,
    cross_entropy,
    glu_rms_norm_quantize,
    input_gradient,
    int8_input_gradient,
    int8_linear,
    int8_weight_gradients,
    quantize_activation,
    rms_norm_quantize,
    square_sum,
    ternary_linear,
    ternary_matmul,
    weight_gradients,
)
from megabit_kernels.paged import KVPages
from megabit_kernels.weight import Int8Weight, TernaryWeight

__version__ = "0.9.0"

__all__ = [
    "Int8Weight",
    "KVPages",
    "TernaryWeight",
    "abs_sum",
    "bit_linear",
    "causal_attention",
    "cross_entropy",
    "dense_linear",
    "glu_rms_norm_quantize",
    "implementations",
    "input_gradient",
    "int8_input_gradient",
    "int8_linear",
    "int8_weight_gradients",
    "paged_attention",
    "product_kernel",
    "quantize_activation",
    "rms_norm_quantize",
    "runs_native",
    "square_sum",
    "ternary_linear",
    "ternary_matmul",
    "trained_attention",
    "weight_gradients",
    "write_pages",
]
