"""Operations that Triton's interpreter rounds otherwise than a GPU, made equal.

It multiplies and adds where a GPU fuses, cuts off bits where a GPU rounds to bf16, and gives
matrices to a BLAS, which adds up some rows in another order than others. Kernels that need one of
these as a GPU does it take a constant ``INTERPRETED``, from ``is_interpreted()``.
"""

import triton
import triton.language as tl


@triton.jit
def fma(a: tl.tensor, b: tl.tensor, c: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """``a · b + c`` in fp32, in one rounding."""
    if INTERPRETED:  # a product of two fp32 numbers is exact in fp64
        result = (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        result = tl.fma(a, b, c)
    return result


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """fp32 → the nearest value of ``dtype`` (fp32 or bf16), still in fp32; ties to even."""
    if dtype == tl.bfloat16:
        if INTERPRETED:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
        else:
            x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """``acc + a · b`` with fp32 sums, of matrices of one float dtype; fp32 is not rounded to TF32.

    All elements of ``a · b`` are added up in one order.
    """
    if INTERPRETED:
        terms = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        result = acc + tl.sum(terms, 1)
    else:
        result = tl.dot(a, b, acc, input_precision="ieee")
    return result


def is_interpreted() -> bool:
    """Whether Triton was told to run kernels in its interpreter when it was imported."""
    return not isinstance(fma, triton.JITFunction)
