"""Philox-4x32-10 (Salmon et al., SC 2011) on vectors: the dropout mask that every backend draws.

The counter's layout is that of `reference/philox.py`: four neighbouring columns take the four words
of one counter, `(column // 4, row, sequence << 16 | head, offset)`.

In the first two rounds, each product is of a number that depends on the column alone, or on row and
head alone. So these are computed once for many counters: `of_columns` and `of_rows` give what the
two rounds leave of each, before `draw` combines them.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.mulhi import mulhilo

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORDS = 4

Words = tuple[Array, Array, Array, Array]


class OfColumns(NamedTuple):
    """What the first two rounds leave, for each column // 4."""

    first: Array  # its part of word 0, the round's key included
    second: Array  # word 1
    third: Array  # its part of word 2


class OfRows(NamedTuple):
    """What the first two rounds leave, for each row and head."""

    first: Array  # its part of word 0, which depends on the head alone
    third: Array  # its part of word 2, the round's key included
    fourth: Array  # word 3


@dataclasses.dataclass(frozen=True)
class Philox:
    """Draws with one key, the seed's two words; all numbers are uint32. `low_products_only`: see
    `Config`."""

    key: tuple[Array, Array]
    offset: Array
    low_products_only: bool = False

    def of_columns(self, counter: Array) -> OfColumns:
        (_, k1), (k0, _) = self._key(0), self._key(1)
        high, third = mulhilo(MULTIPLIERS[0], counter, self.low_products_only)
        high, second = mulhilo(MULTIPLIERS[1], high ^ self.offset ^ k1, self.low_products_only)
        return OfColumns(high ^ k0, second, third)

    def of_rows(self, row: Array, head: Array) -> OfRows:
        """`head` is sequence << 16 | head."""
        (k0, _), (_, k1) = self._key(0), self._key(1)
        high, first = mulhilo(MULTIPLIERS[1], head, self.low_products_only)
        high, fourth = mulhilo(MULTIPLIERS[0], high ^ row ^ k0, self.low_products_only)
        return OfRows(first, high ^ k1, fourth)

    def draw(self, columns: OfColumns, rows: OfRows) -> Words:
        """The four words of each counter: of columns `4 * counter` to `4 * counter + 3`. Arguments
        broadcast."""
        c0, c1 = columns.first ^ rows.first, columns.second
        c2, c3 = rows.third ^ columns.third, rows.fourth
        for i in range(2, ROUNDS):
            k0, k1 = self._key(i)
            high0, low0 = mulhilo(MULTIPLIERS[0], c0, self.low_products_only)
            high1, low1 = mulhilo(MULTIPLIERS[1], c2, self.low_products_only)
            c0, c1, c2, c3 = high1 ^ (c1 ^ k0), low1, high0 ^ (c3 ^ k1), low0
        return c0, c1, c2, c3

    def _key(self, i: int) -> tuple[Array, Array]:
        k0, k1 = self.key
        return k0 + jnp.uint32(i * WEYL[0] % 2**32), k1 + jnp.uint32(i * WEYL[1] % 2**32)
