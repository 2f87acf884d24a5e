"""Cache writes by whole tiles: a prompt's tokens, which fill one tile after the other.

Where the next tokens fill whole tiles of the cache they are taken together, as a group: one DMA
brings the rows of all its tokens, straight-line code turns (tokens, heads) into (heads, tokens),
and each tile leaves by a DMA of its own. Nothing is read from the cache, and nothing hangs on a
condition but whether the next tokens are such a group again.

Two rows of 16 bits share a register's row. Loads with a stride bring two heads of every second
token, and two heads of the tokens between; their halves, exchanged, are the rows of each head.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.cache_tiles import CacheWriter, num_slots, places
from torch_paged_attn.backends.tpu.registers import LANES, UPPER_HALF, numbers_of_word

MOST_TILES = 4  # of a group
NUM_BUFFERS = 4  # groups on their way
AHEAD = NUM_BUFFERS - 1

# bytes of VMEM for new rows, and as many for tiles
MOST_BYTES = 2 << 20


def tiles_of_group(tile_bytes: int) -> int:
    """Tiles that are written together, if one takes `tile_bytes`; 0: there is no room for them."""
    return min(MOST_TILES, MOST_BYTES // (NUM_BUFFERS * tile_bytes))


class Place(NamedTuple):
    """Where the walk over groups stands."""

    group: Array
    fetched: Array  # groups that have been found, and whose rows are coming
    token: Array  # the first one that is in no group yet
    written: Array  # groups whose tiles have been waited for


class GroupWriter(CacheWriter):
    """What is done with a group; `rows` are (NUM_BUFFERS, tokens, ...), `tiles` (NUM_BUFFERS,
    tiles, ...).
    """

    def __init__(self, *shared: Any, **options: Any):
        super().__init__(*shared, **options)
        # of each buffer: its tiles, and whether one of them may still be on its way
        self.rows_done, self.write_done, self.ids, self.is_late = self.own

    @property
    def num_tiles(self) -> int:
        """Tiles of a group."""
        return int(self.tiles[0].shape[1])

    @property
    def num_tokens(self) -> int:
        """Tokens of a group."""
        return self.num_tiles * self.tile_slots

    def _firsts(self, token: Array) -> list[Array]:
        """The first slots of a group's tiles."""
        return [self.slots[token + i * self.tile_slots] for i in range(self.num_tiles)]

    def is_group(self, token: Array) -> Array:
        """Whether the tokens from this one on fill whole tiles, no tile twice."""
        most, end = self.tile_slots, num_slots(self.caches[0], self.fold)
        last = jnp.int32(self.slots.shape[0] - self.num_tokens)
        first = self.slots[jnp.clip(token, 0, self.slots.shape[0] - 1)]
        may_be = (token <= last) & (first >= 0) & (lax.rem(first, jnp.int32(most)) == 0)

        def check(_: Any, __: Array) -> Array:
            firsts = self._firsts(token)
            differences = [lax.rem(first, jnp.int32(most)) for first in firsts]
            for tile, first in enumerate(firsts):
                here = token + tile * most
                differences += [(self.slots[here + i] - i) ^ first for i in range(1, most)]
            is_whole = functools.reduce(jnp.bitwise_or, differences) == 0
            least, greatest = (functools.reduce(f, firsts) for f in (jnp.minimum, jnp.maximum))
            pairs = [(a, b) for i, a in enumerate(firsts) for b in firsts[:i]]
            is_twice = _any([a == b for a, b in pairs])
            return (is_whole & (least >= 0) & (greatest < end) & ~is_twice).astype(jnp.int32)

        # a loop, since what hangs on a condition would be computed whether it holds or not
        return lax.fori_loop(0, may_be.astype(jnp.int32), check, jnp.int32(0)) == 1

    def _new_rows(self, slot: Array, token: Array, do: str) -> None:
        for source, rows in zip(self.new_hbm, self.rows, strict=True):
            here = source.at[pl.ds(token, self.num_tokens)]
            getattr(pltpu.make_async_copy(here, rows.at[slot], self.rows_done.at[slot]), do)()

    def fetch(self, fetched: Array, token: Array) -> tuple[Array, Array]:
        """Start the copy of the next group's rows, if there is one."""
        slot = lax.rem(fetched, jnp.int32(NUM_BUFFERS))

        def start(_: Any, at: tuple[Array, Array]) -> tuple[Array, Array]:
            fetched, token = at
            self._new_rows(slot, token, "start")
            ids = [lax.div(first, jnp.int32(self.tile_slots)) for first in self._firsts(token)]
            others = [self.ids[i] for i in range(NUM_BUFFERS * self.num_tiles)]
            is_late = _any([mine == other for mine in ids for other in others])
            self.is_late[slot] = is_late.astype(jnp.int32)
            for i, tile in enumerate(ids):
                self.ids[slot * self.num_tiles + i] = tile
            return fetched + 1, token + self.num_tokens

        return lax.fori_loop(0, self.is_group(token).astype(jnp.int32), start, (fetched, token))

    def _wait_for_writes(self, written: Array, stop: Array) -> Array:
        """Wait for the tiles of the groups before `stop`, of which `written` have been."""

        def wait(group: Array, _: None) -> None:
            slot = lax.rem(group, jnp.int32(NUM_BUFFERS))
            for tiles in self.tiles:
                # for as many bytes as all its tiles have
                all_of_it = tiles.at[slot]
                pltpu.make_async_copy(all_of_it, all_of_it, self.write_done.at[slot]).wait()

        lax.fori_loop(written, stop, wait, None)
        return jnp.maximum(written, stop)

    def write(self, at: Place) -> Place:
        """Write one group, and start the copy of a later one's rows."""
        slot = lax.rem(at.group, jnp.int32(NUM_BUFFERS))
        is_late = self.is_late[slot] == 1
        behind = at.group + (1 - NUM_BUFFERS)
        written = self._wait_for_writes(at.written, jnp.where(is_late, at.group, behind))
        fetched, token = self.fetch(at.fetched, at.token)
        self._new_rows(slot, jnp.int32(0), "wait")
        for tile in range(self.num_tiles):
            self._arrange(slot, tile)
            for tiles, cache in zip(self.tiles, self.caches, strict=True):
                for planes, stored in places(
                    cache, self.ids[slot * self.num_tiles + tile], self.height
                ):
                    here = tiles.at[slot, tile, planes]
                    pltpu.make_async_copy(here, stored, self.write_done.at[slot]).start()
        return Place(at.group + 1, fetched, token, written)

    def walk(self, token: Array) -> Array:
        """Write the groups from this token on; the token behind them."""
        for i in range(NUM_BUFFERS * self.num_tiles):
            self.ids[i] = jnp.int32(-1)
        zero = jnp.int32(0)
        fetched, token = lax.fori_loop(0, AHEAD, lambda _, found: self.fetch(*found), (zero, token))
        start = Place(zero, fetched, token, zero)
        end = lax.while_loop(lambda at: at.group < at.fetched, self.write, start)
        self._wait_for_writes(end.written, end.group)
        return end.token

    def _arrange(self, slot: Array, tile: int) -> None:
        """Lay the rows of one tile out as it has them, head after head."""
        planes = [(tiles, i) for tiles in self.tiles for i in range(tiles.shape[2])]
        for (tiles, plane), rows in zip(planes, self.rows, strict=True):
            numbers, width = rows.shape[3], tiles.shape[5]
            each = max(1, width // numbers)
            for part, x in enumerate(self._parts(rows, slot, tile, tiles.dtype)):
                first = part % each * numbers
                lanes = slice(first, first + min(numbers, width))
                tiles[slot, tile, plane, part // each, :, lanes] = x

    def _parts(self, rows: Any, slot: Array, tile: int, dtype: Any) -> list[Array]:
        """(height, numbers) of each part of a head."""
        paired = 1 if rows.shape[3] % LANES else numbers_of_word(rows.dtype)
        found = []
        for part in range(rows.shape[2] // paired):
            loaded = [self._load(rows, slot, tile, part, i, paired) for i in range(paired)]
            found += _exchange(loaded, dtype) if paired == 2 else [loaded[0].astype(dtype)]
        return found

    def _load(self, rows: Any, slot: Array, tile: int, part: int, row: int, paired: int) -> Array:
        """The tile's rows from this one on, each second one where they are paired: of a part of a
        head, or of two in words of 32 bits.
        """
        _, num_tokens, per_token, numbers = rows.shape
        count, stride = self.height // paired, self.fold * paired
        first = tile * self.tile_slots + row * self.fold
        firsts = range(first, first + self.fold)
        # the interpreter knows no refs of another shape or type
        if not self.interpret and numbers == LANES:
            step = per_token // paired
            flat = rows.at[slot].bitcast(jnp.int32) if paired == 2 else rows.at[slot]
            flat = flat.reshape(num_tokens * step, LANES)
            these = [pl.ds(i * step + part, count, stride=stride * step) for i in firsts]
            return self._fold([flat[rows_of, :] for rows_of in these])
        these = [pl.ds(i, count, stride=stride) for i in firsts]
        if paired == 1:
            return self._fold([rows[slot, tokens, part] for tokens in these])
        pair = pl.ds(2 * part, 2)
        keys = [rows[slot, tokens, pair].swapaxes(1, 2) for tokens in these]
        return self._fold([lax.bitcast_convert_type(key, jnp.int32) for key in keys])

    def _fold(self, keys: list[Array]) -> Array:
        """Rows that hold several keys, of which each has been given as whole rows."""
        folded = keys[0]
        lane = lax.broadcasted_iota(jnp.int32, folded.shape, 1)
        part = lax.div(lane, jnp.int32(folded.shape[1] // self.fold))
        for i, key in enumerate(keys[1:], 1):
            folded = jnp.where(part == i, key, folded)
        return folded


def _any(conditions: list[Array]) -> Array:
    return functools.reduce(operator.or_, conditions, jnp.bool_(False))


def _exchange(words: list[Array], dtype: Any) -> list[Array]:
    """Words of two parts of heads, of every second row and of those between: rows of each part."""
    even, odd = words
    low = (even & jnp.int32(0xFFFF)) | (odd << 16)
    high = lax.shift_right_logical(even, jnp.int32(16)) | (odd & jnp.int32(UPPER_HALF))
    return [pltpu.bitcast(half, dtype) for half in (low, high)]
