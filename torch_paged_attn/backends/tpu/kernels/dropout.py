"""The dropout mask that every backend draws: which probabilities of a tile's rows are kept.

Philox-4x32-10 (Salmon et al., SC 2011) has the counter's layout of `reference/philox.py`: four
neighbouring columns take the four words of one counter, `(column // 4, row, sequence << 16 | head,
offset)`. In its first two rounds, each product is of a number that depends on the column alone, or
on row and head alone. So these are computed once for many counters: `of_columns` and `of_rows` give
what the two rounds leave of each, before `draw` combines them.

Whether each of the four keys of a counter is kept becomes a bit of one number, and a product with a
matrix of zeros and ones copies this number to the four keys. Where queries stay, the counters of a
piece lie along lanes. If they do not fill the lanes of a register, other rows' lie beside them.
What depends on a row alone is computed with a row in each lane, and then transposed.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from torch_paged_attn.backends.tpu.dtypes import LANES, SUBLANES
from torch_paged_attn.backends.tpu.kernels.arguments import Options, Refs
from torch_paged_attn.backends.tpu.kernels.softmax import product

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


def kept(x: Array, keep: Array) -> Array:
    """`x`, or zeros where `keep` is 0 instead of -1."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & keep, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Draws for the rows of one tile, `row = g * tile_q + token` for query head g of a KV head's
    group, on a piece of keys."""

    refs: Refs
    options: Options
    tile: Array
    head: Any  # the KV head
    first_key: Array
    width: int  # keys

    def keep_of_columns(self, rows: int) -> Array:
        """-1 for what is kept, else 0: (keys, rows)."""
        row = lax.broadcasted_iota(jnp.int32, (1, rows), 1)
        columns = self._philox.of_columns(self._counter((self.width // WORDS, 1), 0))
        words = self._philox.draw(columns, self._of_rows(row))
        numbers = self._numbers(words)
        spread = self._spread((self.width, self.width // WORDS), 0)
        return self._bits_of(product(spread, numbers, 0), 0)

    def keep_of_rows(self, rows: int) -> Array:
        """The same as (rows, keys)."""
        counters = self.width // WORDS
        parts = max(1, LANES // counters)
        if rows % (parts * LANES) != 0:
            parts = 1
        height, lanes = rows // parts, parts * counters
        if height % LANES == 0:
            blocks = [self._draw_block(height, lanes, i) for i in range(0, height, LANES)]
            numbers = jnp.concatenate(blocks, axis=0)
        else:
            row = lax.broadcasted_iota(jnp.int32, (height, 1), 0)
            columns = self._philox.of_columns(self._counter((1, lanes), 1))
            numbers = self._numbers(self._philox.draw(columns, self._of_rows(row)))
        placed = [
            product(numbers, self._spread((lanes, self.width), part * counters), 0)
            for part in range(parts)
        ]
        return self._bits_of(jnp.concatenate(placed, axis=0), 1)

    def _draw_block(self, height: int, lanes: int, first_row: int) -> Array:
        """Numbers (LANES, lanes) for LANES rows from `first_row` on. Of `lanes`, the first ones are
        these rows' counters; the next ones those of the rows `height` further on, and so on.
        """
        counters = self.width // WORDS
        lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, lanes), 1)
        part = lax.div(lane, jnp.int32(counters))
        dense = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) + first_row
        turned = [
            self._turned(self._of_rows(dense + beside), lanes)
            for beside in range(0, height * lanes // counters, height)
        ]
        of_rows = turned[0]
        for j, others in enumerate(turned[1:], 1):
            of_rows = OfRows(
                *(jnp.where(part < j, x, y) for x, y in zip(of_rows, others, strict=True))
            )
        if self.options.tile_q % LANES == 0:  # rows of one head
            row = lax.broadcasted_iota(jnp.int32, (SUBLANES, lanes), 0) + first_row
            first = self._of_rows(row + part * height).first
            of_rows = of_rows._replace(first=first[None])
        columns = self._philox.of_columns(self._counter((1, 1, lanes), 2))
        numbers = self._numbers(self._philox.draw(columns, of_rows))
        return numbers.reshape(LANES, lanes)

    def _turned(self, of_rows: OfRows, lanes: int) -> OfRows:
        """Words of LANES rows, from one row in each lane to one row in each sublane, with the same
        word in all `lanes`."""

        def turn(x: Array) -> Array:
            x = lax.bitcast_convert_type(jnp.broadcast_to(x, (LANES, LANES)), jnp.int32).T
            x = lax.bitcast_convert_type(x, jnp.uint32)[:, :lanes]
            return x.reshape(LANES // SUBLANES, SUBLANES, lanes)

        return OfRows(*map(turn, of_rows))

    def _numbers(self, words: tuple[Array, ...]) -> Array:
        """Four words, one of each key, as one number between 2**4 and 2**5, with a bit for each key
        that is kept."""
        numbers: Any = 2.0 ** len(words)
        for bit, word in enumerate(words):
            is_kept = word >= jnp.uint32(int(self.options.dropout_p * 2.0**32))
            numbers += jnp.where(is_kept, 2.0**bit, 0.0)
        return numbers.astype(jnp.bfloat16)

    def _spread(self, shape: tuple[int, int], first: int) -> Array:
        """The matrix that copies numbers of counters to keys: 1 where `first + key // 4` is the
        counter, else 0. Keys lie along the axis that has `width`, counters along the other one."""
        counter, key = (lax.broadcasted_iota(jnp.int32, shape, i) for i in (0, 1))
        if shape[0] == self.width:
            counter, key = key, counter
        is_of = lax.shift_right_logical(key, 2) + first == counter
        return jnp.where(is_of, 1.0, 0.0).astype(jnp.bfloat16)

    def _bits_of(self, placed: Array, key_axis: int) -> Array:
        """-1 for keys that are kept, else 0, from the numbers that `_spread` copied to them."""
        key = lax.broadcasted_iota(jnp.int32, placed.shape, key_axis)
        # a float between 2**4 and 2**5 has bit `i` of it as its own bit 19 + i
        bits = lax.bitcast_convert_type(placed, jnp.int32)
        return (bits << (12 - (key & 3))) >> 31

    @property
    def _philox(self) -> Philox:
        low, high, offset = (self.refs.rng[i].astype(jnp.uint32) for i in range(3))
        return Philox((low, high), offset)

    def _counter(self, shape: tuple[int, ...], axis: int) -> Array:
        """The counters of the piece's keys along an axis, repeated if the axis is longer."""
        counter = lax.broadcasted_iota(jnp.int32, shape, axis)
        if shape[axis] > self.width // WORDS:
            counter = lax.rem(counter, jnp.int32(self.width // WORDS))
        counter += lax.shift_right_logical(self.first_key, 2)
        return counter.astype(jnp.uint32)

    def _of_rows(self, row: Array) -> OfRows:
        tile_q, tiles = self.options.tile_q, self.refs.tiles
        query = tiles.first_query[self.tile] + (row & (tile_q - 1))
        of_group = lax.shift_right_logical(row, tile_q.bit_length() - 1)
        head = self.options.first_head + self.head * self.options.group_size + of_group
        head = (tiles.sequence[self.tile] << 16) | head
        return self._philox.of_rows(query.astype(jnp.uint32), head.astype(jnp.uint32))
