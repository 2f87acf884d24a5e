"""Hopper's tensor cores in Triton's interpreter: how they add up products of float16. An H100 and
this have the same bits (`test_attention.py::test_decode_with_scales_by_token` failed with them).

A step adds 16 products to a sum. All are aligned to the largest and cut off `BITS` bits below its
first bit. A number's exponent is that of its bits: those of a number below the smallest normal one
say 2**-14, however small it is, so that its products are cut off as if they were large.
"""

import numpy as np
from triton.runtime import interpreter

STEP, BITS = 16, 25
_OF_ZERO = -(2**20)

_numpy_dot = interpreter.InterpreterBuilder.create_dot


def _exponents(x, smallest=_OF_ZERO):
    exponents = np.maximum(np.frexp(x)[1] - 1, smallest)
    return np.where(x == 0, _OF_ZERO, exponents)


def add_products(a, b, total):
    """`total + a @ b` of float16 matrices (..., rows, k) and (..., k, columns), in float32."""
    a, b, total = (x.astype(np.float64) for x in (a, b, total))
    for k in range(0, a.shape[-1], STEP):
        x, y = a[..., k : k + STEP, None], b[..., None, k : k + STEP, :]
        exponents = (_exponents(x, -14) + _exponents(y, -14)).max(-2)
        bit = np.maximum(np.maximum(exponents, _exponents(total)), -126).astype(float) - BITS
        unit = np.exp2(bit)
        cut = np.trunc(total / unit) + np.trunc(x * y / unit[..., None, :]).sum(-2)
        # cut off, not rounded, to float32
        fraction, exponent = np.frexp(cut * unit)
        total = np.ldexp(np.trunc(np.ldexp(fraction, 24)), exponent - 24)
    return total.astype(np.float32)


def create_dot(self, a, b, d, *precision):
    """For `InterpreterBuilder.create_dot`."""
    if a.data.dtype != np.float16 or d.data.dtype != np.float32:
        return _numpy_dot(self, a, b, d, *precision)
    return interpreter.TensorHandle(add_products(a.data, b.data, d.data), d.dtype.scalar)
