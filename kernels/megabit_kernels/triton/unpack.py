"""Ternary codes out of 2-bit planes, in registers.

A byte of the ``planes`` layout holds four codes of one row, 64 columns apart: plane p of a block
of 256 columns is bits 2p and 2p + 1 of the block's 64 bytes. A tile of bytes thus becomes four
tiles of 64 columns by a shift and a mask each, with no exchange between lanes, and each meets 64
neighbouring columns of the other operand.

For int8 tensor cores the four codes w + 1 of a byte are made two's complement of w at once. The two
bits of a plane, moved to the top of their byte, are then the number 64 · w: as cheap as w + 1, and
the product needs no correction by the sum of the other operand, only a shift at its end.

Inline assembly works on four bytes at once: two instructions for four int8 weights and two more for
all planes of them, six for four weights in fp16 or bf16. The compiler would take the bytes apart,
several times as many, and then arithmetic and not memory would bound a product with few rows. The
interpreter has no assembler, so every function has a plain path too.
"""

import triton
import triton.language as tl


@triton.jit
def signed_planes(packed: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """A tile of bytes with all codes w + 1 (0, 1, 2) made two's complement of w (3, 0, 1).

    The low bit of w is 1 where that of the code is 0, the high bit where both of the code are.
    """
    if ASM:
        signed = tl.inline_asm_elementwise(
            "{ .reg .b32 t; add.u32 t, $1, $1; lop3.b32 $0, $1, t, 0xAAAAAAAA, 0x07; }",
            "=r,r",
            [packed],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        signed = (packed | ((packed << 1) & 0xAA)) ^ 0xFF
    return signed


@triton.jit
def plane_int8(signed: tl.tensor, P: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """Plane ``P`` of ``signed_planes`` as int8 numbers, each 64 · w."""
    if ASM:
        weights = tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; shl.b32 t, $1, {6 - 2 * P}; and.b32 $0, t, 0xC0C0C0C0; }}",
            "=r,r",
            [signed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        weights = ((signed << (6 - 2 * P)) & 0xC0).to(tl.int8, bitcast=True)
    return weights


@triton.jit
def plane_fp16(packed: tl.tensor, p: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """Plane ``p``, known only as the kernel runs, of a tile of bytes as fp16 weights w.

    A code in the low bits of 0x6400 is the fp16 number 1024 + code; 1025 less is w.
    """
    if ASM:
        weights = tl.inline_asm_elementwise(
            "{ .reg .b32 t, low, high, bias; mov.b32 bias, 0x64016401; shr.u32 t, $2, $3; "
            "and.b32 t, t, 0x03030303; prmt.b32 low, t, 0x64646464, 0x4140; "
            "prmt.b32 high, t, 0x64646464, 0x4342; sub.f16x2 $0, low, bias; "
            "sub.f16x2 $1, high, bias; }",
            "=r,=r,r,r,r,r,r",
            [packed, 2 * p],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        weights = ((packed >> (2 * p)) & 3).to(tl.float16) - 1.0
    return weights


@triton.jit
def plane_bf16(packed: tl.tensor, p: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """``plane_fp16`` in bf16: a code in the low bits of 0x4300 is 128 + code, 129 less is w.

    The difference is a fused multiply-add by one, for sm_80 has no other arithmetic in bf16. The
    plain path is in fp32: the interpreter multiplies bf16 wrongly.
    """
    if ASM:
        weights = tl.inline_asm_elementwise(
            "{ .reg .b32 t, low, high, one, bias; mov.b32 one, 0x3F803F80; "
            "mov.b32 bias, 0xC301C301; shr.u32 t, $2, $3; and.b32 t, t, 0x03030303; "
            "prmt.b32 low, t, 0x43434343, 0x4140; prmt.b32 high, t, 0x43434343, 0x4342; "
            "fma.rn.bf16x2 $0, low, one, bias; fma.rn.bf16x2 $1, high, one, bias; }",
            "=r,=r,r,r,r,r,r",
            [packed, 2 * p],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        weights = ((packed >> (2 * p)) & 3).to(tl.float32) - 1.0
    return weights
