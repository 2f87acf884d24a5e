"""int4: a byte holds two numbers of two's complement, the even one in the low bits.

No kernel interleaves them: a byte's numbers belong to a tensor of the even and one of the odd
elements, and those of an int16 to four, with elements 0, 4, ..., elements 1, 5, ..., and so on.
Queries are loaded, and results are written, in the same order.

By fours, a few bits of an int16 are put in the mantissa of a float16, which takes fewer
instructions than a conversion. Of values, those in bits 4 to 7 stay where they are: so the odd
elements are 16 times as large, which results take back.

Keys are float16 below its smallest normal number. Tensor cores take the exponent of such a number
for that of 2**-14 where they align products, and cut off what is far below the largest of them: so
all keys are in bits 4 to 7, two bits below. In bits 0 to 3 they would lose four bits more.
"""

import triton
import triton.language as tl

# x ^ 8 is a number n plus 8, from 0 to 15, in four bits; `lop3` computes (x & mask) ^ bits. Two
# int16 in a register become four registers of two float16 each. 0x00n0 is the float16 n * 2**-20
_RAISED_PTX = tl.constexpr(
    "{.reg .b32 first, third, fourth;"
    " shl.b32 first, $4, 4; shr.u32 third, $4, 4; shr.u32 fourth, $4, 8;"
    " lop3.b32 $0, first, 0x00F000F0, 0x00800080, 0x6A;"
    " lop3.b32 $1, $4, 0x00F000F0, 0x00800080, 0x6A;"
    " lop3.b32 $2, third, 0x00F000F0, 0x00800080, 0x6A;"
    " lop3.b32 $3, fourth, 0x00F000F0, 0x00800080, 0x6A;}"
)
# 0x6400 + n is the float16 1024 + n
_FOURS_PTX = tl.constexpr(
    "{.reg .b32 upper, even, odd; shr.u32 upper, $4, 8;"
    " mov.b32 even, 0x64086408; mov.b32 odd, 0x64806480;"
    " lop3.b32 $0, $4, 0x000F000F, even, 0x6A; lop3.b32 $1, $4, 0x00F000F0, odd, 0x6A;"
    " lop3.b32 $2, upper, 0x000F000F, even, 0x6A; lop3.b32 $3, upper, 0x00F000F0, odd, 0x6A;"
    " sub.f16x2 $0, $0, even; sub.f16x2 $1, $1, odd;"
    " sub.f16x2 $2, $2, even; sub.f16x2 $3, $3, odd;}"
)


@triton.jit
def decode_two(x, DTYPE: tl.constexpr):
    """The even and the odd numbers of bytes."""
    x = x.to(tl.int8, bitcast=True)
    return ((x << 4).to(tl.int8) >> 4).to(tl.int16).to(DTYPE), (x >> 4).to(tl.int16).to(DTYPE)


@triton.jit
def decode_in_order(x, DTYPE: tl.constexpr):
    """The numbers of rows of bytes (rows, n), in order: (rows, 2 n).

    Not by `tl.join`: of a product over 16 keys, one factor of which was joined, Triton 3.6 takes
    some keys twice and others' columns (triton-lang/triton#10645).
    """
    x = x.to(tl.int8, bitcast=True)[:, :, None]
    in_low_bits = 4 - 4 * tl.arange(0, 2)[None, None, :]
    x = (x << in_low_bits.to(tl.int8)).to(tl.int8) >> 4
    return tl.reshape(x, [x.shape[0], 2 * x.shape[1]]).to(tl.int16).to(DTYPE)


@triton.jit
def _fours(PTX: tl.constexpr, x):
    """Four float16 of each int16."""
    return tl.inline_asm_elementwise(
        PTX,
        "=&r,=&r,=&r,=&r,r",
        [x],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def decode_raised_fours(x, IN_PTX: tl.constexpr):
    """The four numbers n of each int16 as float16 (n + 8) * 2**-20."""
    if IN_PTX:
        return _fours(_RAISED_PTX, x)
    return (
        (((x << 4) & 0xF0) ^ 0x80).to(tl.float16, bitcast=True),
        ((x & 0xF0) ^ 0x80).to(tl.float16, bitcast=True),
        (((x >> 4) & 0xF0) ^ 0x80).to(tl.float16, bitcast=True),
        (((x >> 8) & 0xF0) ^ 0x80).to(tl.float16, bitcast=True),
    )


@triton.jit
def decode_fours(x, IN_PTX: tl.constexpr):
    """The four numbers of each int16 as float16; the second and the fourth times 16."""
    if IN_PTX:
        return _fours(_FOURS_PTX, x)
    upper = x >> 8
    return (
        ((x & 0xF) ^ 0x6408).to(tl.float16, bitcast=True) - 1032.0,
        ((x & 0xF0) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0,
        ((upper & 0xF) ^ 0x6408).to(tl.float16, bitcast=True) - 1032.0,
        ((upper & 0xF0) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0,
    )


@triton.jit
def encode_two(even, odd):
    """Two float32 numbers from -7 to 7, rounded to nearest even, in a byte."""
    # adding 1.5 * 2**23 rounds, and leaves the integer in the last bits
    low = (even + 12582912.0).to(tl.uint32, bitcast=True) & 0xF
    high = (odd + 12582912.0).to(tl.uint32, bitcast=True) & 0xF
    return (low | (high << 4)).to(tl.uint8)
