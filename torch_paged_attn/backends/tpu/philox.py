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

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORDS = 4

Words = tuple[Array, Array, Array, Array]


def mulhilo(a: int, b: Array) -> tuple[Array, Array]:
    """High and low halves of the products of a number and each uint32 of `b`.

    Pallas has no instruction for the high half on TPUs: it takes 9 or 10 others.
    """
    low = jnp.uint32(a) * b
    return _high_of_low(a, b, low), low


def _high_of_low(a: int, b: Array, low: Array) -> Array:
    """The high halves from products modulo 2**32; `low` is `a * b`.

    Let `a = a_high * 2**16 + a_low`, `b` alike, `s = a_low * b_high + floor(a * b_low / 2**16)`:
    high is `a_high * b_high + floor(s / 2**16)`, and the last 16 bits of `s` are the first ones of
    `low`. So an estimate that is less than 2**16 above `s` will do: without those bits of `low` it
    has the same multiple of 2**16 in it. `(a_high + 1) * b_low` is one of `a * b_low / 2**16`.

    Where the estimate would not fit 32 bits, `-a` takes the place of `a`: `a_high + 1` stands for
    `a_high`, and what that is too much is estimated. `b_low` is `b - b_high * 2**16`, so that `b`
    itself is multiplied.
    """
    high, rest = a >> 16, a & 0xFFFF
    b_high, carried = b >> jnp.uint32(16), low >> jnp.uint32(16)
    if high + rest <= 2**16:
        estimate = _sum_of_products(high + 1, b, rest, b_high)
        return jnp.uint32(high) * b_high + ((estimate - carried) >> jnp.uint32(16))
    estimate = _sum_of_products(2**16 - high, b, 2**16 - rest, b_high)
    too_much = (estimate + carried) >> jnp.uint32(16)
    # (high + 1) * b_high + b_low
    return b + _word(high + 1 - 2**16) * b_high - too_much


def _sum_of_products(of_low: int, b: Array, of_high: int, b_high: Array) -> Array:
    """`of_low * b_low + of_high * b_high`."""
    return _word(of_low) * b + _word(of_high - (of_low << 16)) * b_high


def _word(number: int) -> Array:
    return jnp.uint32(number % 2**32)


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
    """Draws with one key, the seed's two words; all numbers are uint32."""

    key: tuple[Array, Array]
    offset: Array

    def of_columns(self, counter: Array) -> OfColumns:
        (_, k1), (k0, _) = self._key(0), self._key(1)
        high, third = mulhilo(MULTIPLIERS[0], counter)
        high, second = mulhilo(MULTIPLIERS[1], high ^ self.offset ^ k1)
        return OfColumns(high ^ k0, second, third)

    def of_rows(self, row: Array, head: Array) -> OfRows:
        """`head` is sequence << 16 | head."""
        (k0, _), (_, k1) = self._key(0), self._key(1)
        high, first = mulhilo(MULTIPLIERS[1], head)
        high, fourth = mulhilo(MULTIPLIERS[0], high ^ row ^ k0)
        return OfRows(first, high ^ k1, fourth)

    def draw(self, columns: OfColumns, rows: OfRows) -> Words:
        """The four words of each counter: of columns `4 * counter` to `4 * counter + 3`. Arguments
        broadcast."""
        c0, c1 = columns.first ^ rows.first, columns.second
        c2, c3 = rows.third ^ columns.third, rows.fourth
        for i in range(2, ROUNDS):
            k0, k1 = self._key(i)
            high0, low0 = mulhilo(MULTIPLIERS[0], c0)
            high1, low1 = mulhilo(MULTIPLIERS[1], c2)
            c0, c1, c2, c3 = high1 ^ (c1 ^ k0), low1, high0 ^ (c3 ^ k1), low0
        return c0, c1, c2, c3

    def _key(self, i: int) -> tuple[Array, Array]:
        k0, k1 = self.key
        return k0 + jnp.uint32(i * WEYL[0] % 2**32), k1 + jnp.uint32(i * WEYL[1] % 2**32)
