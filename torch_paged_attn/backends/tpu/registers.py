"""What a vector register holds: 8 sublanes of 128 lanes, words of 32 bits.

Narrower numbers share words, those of neighbouring rows. Memory is tiled alike.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

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
