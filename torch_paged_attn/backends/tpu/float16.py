"""float16 is read as 16-bit integers: TPUs have no instructions for it, not even loads.

A kernel takes no argument of float16, and to XLA its bits are a copy of the array. So a cache that
is never copied is allocated as int16, which attention takes for float16 queries, and a cache write
for float16 keys.

Numbers below 2**-14 become zero on a chip, which flushes float32 of that encoding.
"""

import jax.numpy as jnp
from jax import Array, lax

MAGNITUDE, SIGN, INFINITY = 0x7FFF, 0x8000, 0x7C00
FLOAT32_INFINITY = 0x7F800000


def to_bits(x: Array) -> Array:
    """An int16 array of the same memory; other types as they are."""
    return lax.bitcast_convert_type(x, jnp.int16) if x.dtype == jnp.float16 else x


def widen(x: Array, dtype: jnp.dtype) -> Array:
    """Stored numbers as `dtype`; int16 are the bits of float16, which become float32."""
    if x.dtype != jnp.int16:
        return x.astype(dtype)
    bits = x.astype(jnp.int32)
    magnitude = bits & MAGNITUDE
    shifted = magnitude << 13
    shifted = jnp.where(magnitude >= INFINITY, shifted | FLOAT32_INFINITY, shifted)
    value = lax.bitcast_convert_type(shifted | (bits & SIGN) << 16, jnp.float32)
    # float32 counts exponents from 112 below float16
    return value * jnp.float32(2.0**112)
