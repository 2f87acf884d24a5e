"""Conversion of stored numbers, also on GPUs (or in the interpreter) that cannot convert a type.

A format is a `tl.constexpr` name. Tensors of `E4M3` and `E5M2` are passed to kernels as uint8,
those of `BF16` as int16, and are converted by integer operations. `NATIVE` is the tensor's own
type; `RAW` is not converted. Of `INT4`, a byte holds two numbers: see `int4.py`.

8-bit numbers may be loaded by pairs, as int16. A matrix instruction needs operands in registers
that hold two 16-bit numbers each; a pair is decoded directly into these, as a tensor of the even
and one of the odd elements. Of int4 such an int16 holds four numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.runtime.target import Target

FLOAT8 = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
PAIRED = FLOAT8 | {torch.int8: "INT8", torch.uint8: "INT4"}


def stored_format(dtype: torch.dtype, target: Target) -> str:
    """The format of a kernel's tensors of this dtype."""
    if dtype == torch.uint8:
        return "INT4"
    if dtype in FLOAT8 and not target.converts_float8:
        return FLOAT8[dtype]
    return "BF16" if dtype == torch.bfloat16 and not target.converts_bfloat16 else "NATIVE"


def as_stored(x: Tensor, target: Target) -> tuple[Tensor, str]:
    """The tensor as it is passed to a kernel, and its format."""
    found = stored_format(x.dtype, target)
    if found == "NATIVE":
        return x, found
    return x.view(torch.int16 if found == "BF16" else torch.uint8), found


def holds_pairs(x: Tensor) -> bool:
    """Whether x has 8-bit numbers, or bytes of int4, that can be loaded by pairs: rows of a power
    of two elements, at even offsets.
    """
    width = x.shape[-1]
    whole = x.dtype in PAIRED and width >= 32 and width & (width - 1) == 0
    return whole and not any(n % 2 for n in (x.storage_offset(), *x.stride()[:-1]))


@triton.jit
def decode(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Stored values as DTYPE. float16 represents every float8 number exactly."""
    if FORMAT == "RAW":
        return x
    elif FORMAT == "BF16":
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(DTYPE)
    elif FORMAT == "E5M2":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    elif FORMAT == "E4M3":
        bits = x.to(tl.uint16)
        sign, magnitude = (bits & 0x80) << 8, bits & 0x7F
        # the factor corrects the exponent's bias, which is 15 in float16 and 7 in e4m3
        value = (sign | (magnitude << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), value).to(DTYPE)
    else:
        return x.to(DTYPE)


# four numbers in one register to two registers of float16 pairs: bytes 0 and 2, bytes 1 and 3. No
# line breaks: Inductor prints these strings in triple quotes, where an escaped one would be wrong
_E4M3_PTX = tl.constexpr(
    "{.reg .b32 bytes; .reg .b16 even, odd; prmt.b32 bytes, $2, 0, 0x3120;"
    " mov.b32 {even, odd}, bytes;"
    " cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd;}"
)
_E5M2_PTX = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")
# 0x6400 + n is the float16 1024 + n, for n from 0 to 255
_INT8_PTX = tl.constexpr(
    "{.reg .b32 bytes, offset; xor.b32 bytes, $2, 0x80808080; mov.b32 offset, 0x64806480;"
    " prmt.b32 $0, bytes, 0x64646464, 0x4240; prmt.b32 $1, bytes, 0x64646464, 0x4341;"
    " sub.f16x2 $0, $0, offset; sub.f16x2 $1, $1, offset;}"
)

# 0x00nn is the float16 nn * 2**-24
_RAISED_INT8_PTX = tl.constexpr(
    "{.reg .b32 bytes; xor.b32 bytes, $2, 0x80808080;"
    " prmt.b32 $0, bytes, 0, 0x4240; prmt.b32 $1, bytes, 0, 0x4341;}"
)


@triton.jit
def decode_raised_pairs(x, IN_PTX: tl.constexpr):
    """The first and the second of each pair of 8-bit integers n, as float16 (n + 128) * 2**-24,
    which takes fewer instructions than n.
    """
    if IN_PTX:
        return tl.inline_asm_elementwise(
            _RAISED_INT8_PTX, "=&r,=&r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    raised = x ^ -0x7F80
    return (raised & 0xFF).to(tl.float16, bitcast=True), ((raised >> 8) & 0xFF).to(
        tl.float16, bitcast=True
    )


@triton.jit
def decode_pairs(x, FORMAT: tl.constexpr, IN_PTX: tl.constexpr):
    """The first and the second of each pair of 8-bit numbers as float16, which is exact."""
    if IN_PTX:
        asm: tl.constexpr = (
            _E4M3_PTX if FORMAT == "E4M3" else _E5M2_PTX if FORMAT == "E5M2" else _INT8_PTX
        )
        return tl.inline_asm_elementwise(
            asm, "=&r,=&r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    even, odd = (x & 0xFF).to(tl.uint8), ((x >> 8) & 0xFF).to(tl.uint8)
    if FORMAT == "INT8":
        return even.to(tl.int8, bitcast=True).to(tl.float16), odd.to(tl.int8, bitcast=True).to(
            tl.float16
        )
    else:
        return decode(even, FORMAT, tl.float16), decode(odd, FORMAT, tl.float16)


@triton.jit
def float16_range(largest):
    """Powers of two that scale numbers up to `largest` to float16's range, and back."""
    exponent = (largest.to(tl.uint32, bitcast=True) >> 23).to(tl.int32)
    # the largest becomes 2**14 to 2**15, so that as few small numbers as possible are lost
    enlarge = tl.minimum(127 + 14 + 127 - exponent, 253)
    reduce = 254 - enlarge
    return (
        (enlarge.to(tl.uint32) << 23).to(tl.float32, bitcast=True),
        (reduce.to(tl.uint32) << 23).to(tl.float32, bitcast=True),
    )


@triton.jit
def _encode(
    x,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_NORMAL: tl.constexpr,
    MAGIC: tl.constexpr,
):
    """float32 in an 8-bit format, rounded to nearest even. Adding MAGIC rounds a subnormal number:
    the last bits of the sum are its code.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LARGEST)
    drop: tl.constexpr = 23 - MANTISSA
    raw = size.to(tl.uint32, bitcast=True)
    raw = raw + ((raw >> drop) & 1) + ((1 << (drop - 1)) - 1)
    normal = (raw >> drop) - ((127 - BIAS) << MANTISSA)
    subnormal = (size + MAGIC).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(size < SMALLEST_NORMAL, subnormal, normal)
    return (sign | tl.where(x == x, code, 0x7F)).to(tl.uint8)


@triton.jit
def encode(x, pointer_type: tl.constexpr, FORMAT: tl.constexpr):
    """float32 in the format of a stored tensor, rounded to nearest even; 8-bit formats saturate."""
    if FORMAT == "BF16":
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)
    elif FORMAT == "E4M3":
        return _encode(x, 3, 7, 448.0, 2.0**-6, 2.0**14)
    elif FORMAT == "E5M2":
        return _encode(x, 2, 15, 57344.0, 2.0**-14, 2.0**7)
    elif pointer_type == tl.float8e4nv:
        return tl.clamp(x, -448.0, 448.0).to(pointer_type)
    elif pointer_type == tl.float8e5:
        return tl.clamp(x, -57344.0, 57344.0).to(pointer_type)
    elif pointer_type == tl.int8:
        # adding and subtracting 1.5 * 2**23 rounds to the nearest even integer
        whole = (tl.clamp(x, -128.0, 127.0) + 12582912.0) - 12582912.0
        return whole.to(tl.int8)
    else:
        return x.to(pointer_type)
