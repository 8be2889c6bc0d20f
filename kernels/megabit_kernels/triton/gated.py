"""Gated linear units, ``numerics.gated_linear_unit`` in registers."""

import triton
import triton.language as tl

from megabit_kernels.triton.arithmetic import rounded


@triton.jit
def gated_linear_unit(
    gate: tl.tensor,
    up: tl.tensor,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """``act(gate) · up`` of fp32 tensors that hold ``DTYPE`` values, rounded to it at each step.

    The steps of SiLU have the definition's bits only as far as the exponential has: a GPU's is an
    approximation, to about two units in the last place of fp32.
    """
    if ACTIVATION == "relu2":
        positive = tl.where(gate < 0, 0.0, gate)  # a NaN stays one
        activated = rounded(positive * positive, DTYPE, INTERPRETED)
    else:
        exponential = rounded(tl.exp(-gate), DTYPE, INTERPRETED)
        # Not the slower IEEE division: that would be more exact than what it divides by.
        sigmoid = rounded(1.0 / rounded(1.0 + exponential, DTYPE, INTERPRETED), DTYPE, INTERPRETED)
        activated = rounded(sigmoid * gate, DTYPE, INTERPRETED)
    return rounded(activated * up, DTYPE, INTERPRETED)
