"""Kernels for ternary weights and int8 activations: Triton on GPUs, native code on CPUs, or torch.

``functional`` has the operations, ``weight`` what they take. This package never imports
``megabit``.
"""

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
from megabit_kernels.weight import Int8Weight, TernaryWeight

__version__ = "0.1.0"

__all__ = [
    "Int8Weight",
    "TernaryWeight",
    "abs_sum",
    "bit_linear",
    "cross_entropy",
    "glu_rms_norm_quantize",
    "implementations",
    "input_gradient",
    "int8_input_gradient",
    "int8_linear",
    "int8_weight_gradients",
    "product_kernel",
    "quantize_activation",
    "rms_norm_quantize",
    "square_sum",
    "ternary_linear",
    "ternary_matmul",
    "weight_gradients",
]
