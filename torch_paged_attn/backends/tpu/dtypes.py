"""The types of a call's numbers, how they are rounded and stored, and how they lie in registers.

A vector register holds 8 sublanes of 128 lanes, words of 32 bits. Narrower numbers share words,
those of neighbouring rows. Memory is tiled alike.

float16 is read as 16-bit integers: TPUs have no instructions for it, not even loads. A kernel takes
no argument of float16, and to XLA its bits are a copy of the array. So a cache that is never copied
is allocated as int16, which attention takes for float16 queries, and a cache write for float16
keys. Numbers below 2**-14 become zero on a chip, which flushes float32 of that encoding.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

import jax.numpy as jnp
from jax import Array, lax

from torch_paged_attn.ops import checks

FLOATS = ("float32", "bfloat16", "float16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
EIGHT_BITS = (*FLOAT8, "int8")  # what a cache holds besides the type of new keys


def compute_dtype_of(dtype: Any) -> Any:
    """What products of queries of this type are computed on."""
    is_narrow = dtype.name in (*FLOAT8, "bfloat16")
    return jnp.dtype(jnp.bfloat16 if is_narrow else jnp.float32)


def to_float8(x: Array, dtype: Any) -> Array:
    """Rounded to nearest even; what is too large becomes the largest number."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32), -limit, limit).astype(dtype)


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


SUBLANES = 8
LANES = 128

UPPER_HALF = -(1 << 16)  # of a word


def rows_of_tile(dtype: Any) -> int:
    """Rows of an array of this type that one register holds, and one tile of memory."""
    return SUBLANES * numbers_of_word(dtype)


def numbers_of_word(dtype: Any) -> int:
    """How many numbers share a word of 32 bits."""
    return 4 // jnp.dtype(dtype).itemsize


def halves_of_words(words: Array) -> Iterator[Array]:
    """The two bfloat16 of each word, lower and upper ones, as float32."""
    # bfloat16 is the upper half of a float32
    halves = words << 16, words & jnp.int32(UPPER_HALF)
    return (lax.bitcast_convert_type(half, jnp.float32) for half in halves)


def divided(x: Array, by: int) -> tuple[Array, Array]:
    """Quotient and rest of a number that is not negative: by a power of two it takes one
    instruction each, where the sign of a number takes five more.
    """
    if by & (by - 1):
        return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))
    return lax.shift_right_logical(x, jnp.int32(by.bit_length() - 1)), x & (by - 1)


def refuse(op: str, reason: str) -> NoReturn:
    """Raise for a call that `unsupported` has a reason against."""
    checks.refuse(op, f"not supported by the tpu backend: {reason}")
