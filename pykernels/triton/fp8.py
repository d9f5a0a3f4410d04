"""8-bit codes to floats and back, exact: float8_e4m3fn in integer arithmetic, for the interpreter and for devices whose
Triton has no such type; int8 in fewer instructions than Triton's own conversion.

e4m3fn: sign, 4 bits of exponent (bias 7), 3 bits of mantissa, no infinity, 0x7f and 0xff are NaN, largest value 448.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _widen(shift: int, keep: str, rescale: str, step: str) -> tl.constexpr:
    """Four e4m3 bytes to four 16-bit floats times 2^-8: byte to the high half, exponent and mantissa down, sign kept.

    NaN's code comes out as 480 x 2^-8, which is 2 less one `step`: adding that sets bit 14 for it alone, and with bit 14 it is NaN.
    """
    return tl.constexpr(f"""{{
        .reg .b32 a, b, s, t;
        prmt.b32 a, 0, $2, 0x5040;
        prmt.b32 b, 0, $2, 0x7060;
        and.b32 s, a, 0x80008000;
        and.b32 t, b, 0x80008000;
        shr.u32 a, a, {shift};
        shr.u32 b, b, {shift};
        lop3.b32 $0, a, {keep}, s, 0xEA;
        lop3.b32 $1, b, {keep}, t, 0xEA;
        {rescale}
        add.u32 s, $0, {step};
        add.u32 t, $1, {step};
        lop3.b32 $0, s, 0x40004000, $0, 0xEA;
        lop3.b32 $1, t, 0x40004000, $1, 0xEA;
    }}""")


TO_FP16 = _widen(1, "0x3F803F80", "", "0x00800080")
TO_BF16 = _widen(
    4,
    "0x07F007F0",
    "mov.b32 s, 0x77807780; mov.b32 t, 0x80008000; fma.rn.bf16x2 $0, $0, s, t; fma.rn.bf16x2 $1, $1, s, t;",
    "0x00100010",
)


@triton.jit
def widen_e4m3(x, TYPE: tl.constexpr, BITS: tl.constexpr):
    """x as TYPE. BITS: x is uint8 holding e4m3 codes, and the result is the value times 2^-8 in every TYPE."""
    # One return: a compiled function may not have two types, whichever of its branches is taken.
    if not BITS:
        wide = x.to(TYPE)
    elif tl.float32 == TYPE:
        code = x.to(tl.uint32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * (2.0**112)
        wide = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    elif tl.float16 == TYPE:
        wide = tl.inline_asm_elementwise(TO_FP16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        wide = tl.inline_asm_elementwise(TO_BF16, "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)
    return wide


# A code + 128 becomes the low byte of 1024's mantissa, then 1152 is taken off: 7 instructions for 4 codes instead of 20.
INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 t, c;
    xor.b32 t, $2, 0x80808080;
    mov.b32 c, 0x64806480;
    prmt.b32 $0, t, 0x64646464, 0x4140;
    prmt.b32 $1, t, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, $0, c;
    sub.rn.f16x2 $1, $1, c;
}""")


@triton.jit
def widen_int8(x):
    """x (int8) as float16, in NVIDIA's instructions."""
    return tl.inline_asm_elementwise(INT8_TO_FP16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def encode_e4m3(x):
    """The uint8 code nearest to x (float32), ties to even, saturated to 448; NaN gives 0x7f with x's sign."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    held = size.to(tl.int32, bitcast=True)
    normal = ((held + 0x7FFFF + ((held >> 20) & 1)) >> 20) - (120 << 3)  # rebias 127 -> 7 on the rounded bits
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF  # below 2^-6 the spacing is 2^-9: the sum's own rounding
    code = tl.where(size < 0.015625, small, normal)
    return tl.where(x == x, sign | code, sign | 0x7F).to(tl.uint8)
