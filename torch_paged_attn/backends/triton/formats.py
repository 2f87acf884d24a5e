"""How numbers are stored, where a chip (or the interpreter) does not convert them itself.

A format is a `tl.constexpr` name. `E4M3` and `E5M2` travel as uint8 and `BF16` as int16, taken
apart and put together bit by bit; `NATIVE` is whatever type the tensor has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.target import Target

FLOAT8 = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}


def as_stored(x: Tensor, target: Target) -> tuple[Tensor, str]:
    """The tensor a kernel is given, and its format."""
    if x.dtype in FLOAT8 and not target.converts_float8:
        return x.view(torch.uint8), FLOAT8[x.dtype]
    if x.dtype == torch.bfloat16 and not target.converts_bfloat16:
        return x.view(torch.int16), "BF16"
    return x, "NATIVE"


@triton.jit
def decode(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Stored values as DTYPE; every float8 is exactly a float16."""
    if FORMAT == "BF16":
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(DTYPE)
    elif FORMAT == "E5M2":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    elif FORMAT == "E4M3":
        bits = x.to(tl.uint16)
        sign, magnitude = (bits & 0x80) << 8, bits & 0x7F
        # float16's exponent bias is 15, that of e4m3 is 7: the factor makes up for it
        value = (sign | (magnitude << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), value).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def _encode(
    x,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_NORMAL: tl.constexpr,
    MAGIC: tl.constexpr,
):
    """float32 in eight bits, rounded to nearest even; added to MAGIC, a subnormal is rounded in the
    last bits of the sum."""
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
    """float32 as it is stored behind a pointer: rounded to nearest even, the 8-bit formats
    saturated.
    """
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
        # added to 1.5 * 2**23, a small number is rounded to nearest even
        whole = (tl.clamp(x, -128.0, 127.0) + 12582912.0) - 12582912.0
        return whole.to(tl.int8)
    else:
        return x.to(pointer_type)
