"""The types of a call's numbers, by their names, and how they are rounded to 8 bits."""

from typing import Any

import jax.numpy as jnp
from jax import Array

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
