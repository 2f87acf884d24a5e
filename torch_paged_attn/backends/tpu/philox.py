"""Philox-4x32-10 (Salmon et al., SC 2011) on vectors: the dropout mask that every backend draws.

The counter's layout is that of `reference/philox.py`: four neighbouring columns take the four words
of one counter.
"""

import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.wide_products import mulhilo

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORDS = 4


def draw(
    counter: Array,
    row: Array,
    head: Array,
    key: tuple[Array, Array],
    offset: Array,
    low_products_only: bool = False,
) -> tuple[Array, Array, Array, Array]:
    """The uint32 words of columns `4 * counter` to `4 * counter + 3`; arguments broadcast.

    `head` is sequence << 16 | head. The first rounds' products are of as few numbers as they hang
    on: a product of what all rows share is taken once.
    """
    c0, c1, c2, c3 = counter, row, head, offset
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = mulhilo(MULTIPLIERS[0], c0, low_products_only)
        high1, low1 = mulhilo(MULTIPLIERS[1], c2, low_products_only)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    return c0, c1, c2, c3
