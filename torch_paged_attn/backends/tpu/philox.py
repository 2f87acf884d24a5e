"""Philox-4x32-10 (Salmon et al., SC 2011) on vectors: the dropout mask that every backend draws.

The counter's layout is that of `reference/philox.py`. Each lane computes the four words of its
column and takes one of them: the other three are its neighbours' work done again.
"""

import jax.numpy as jnp
from jax import Array

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def _mulhilo(a: int, b: Array) -> tuple[Array, Array]:
    """High and low halves of a 32 x 32 bit product, from 16-bit pieces."""
    a_low, a_high = jnp.uint32(a & 0xFFFF), jnp.uint32(a >> 16)
    b_low, b_high = b & jnp.uint32(0xFFFF), b >> jnp.uint32(16)
    low = a_low * b_low
    left = a_high * b_low + (low >> jnp.uint32(16))
    right = a_low * b_high + (left & jnp.uint32(0xFFFF))
    high = a_high * b_high + (left >> jnp.uint32(16)) + (right >> jnp.uint32(16))
    return high, jnp.uint32(a) * b


def draw(column: Array, row: Array, head: Array, key: tuple[Array, Array], offset: Array) -> Array:
    """A uint32 for each `column`; the others broadcast. `head` is sequence << 16 | head."""
    c0, c1, c2, c3 = column >> jnp.uint32(2), row, head, offset
    c0, c1, c2, c3 = (jnp.broadcast_to(c, column.shape) for c in (c0, c1, c2, c3))
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _mulhilo(MULTIPLIERS[0], c0)
        high1, low1 = _mulhilo(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    lane = column & jnp.uint32(3)
    pair = jnp.where(lane == 0, c0, c1), jnp.where(lane == 2, c2, c3)
    return jnp.where(lane < 2, *pair)
