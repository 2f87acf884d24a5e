"""Cache writes by runs: neighbouring tokens whose slots are neighbours in one tile of a page.

A DMA cannot write one row of 16 or 8 bits, which is half or a quarter of a register's row. So what
is moved is a tile: as many slots as a register has rows, of all heads of a page.

The kernel walks the tokens in their order. One DMA brings a run's rows, another one the tile that
they belong to, unless they fill it; loads with strides pick a head's rows. Of two tokens for one
slot the later one is kept, since a tile that is still being written is waited for.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.dtypes import LANES, divided, halves_of_words

# bytes from one part of a DMA to the next: an int32 in libtpu
FARTHEST = 2**31

MOST_BUFFERS = 16
LEAST_BUFFERS = 2

# slots of a tile that are compared at once
MOST_AT_ONCE = 32

# bytes of VMEM for new rows and tiles
MOST_BYTES = 10 << 20


def num_buffers(run_bytes: int) -> int:
    """Runs on their way, a power of two, if the rows and the tile of one take so many bytes."""
    fitting = max(LEAST_BUFFERS, min(MOST_BUFFERS, MOST_BYTES // run_bytes))
    return 1 << (fitting.bit_length() - 1)


def _while_it_holds(condition: Callable[[Any], Array], step: Callable[[Any], Any], at: Any) -> Any:
    """`lax.while_loop`, whose condition may read memory: it is part of the loop's state, since
    Pallas' plain interpreter of JAX 0.7, on which torch_xla runs, lets no other condition read.
    """

    def advance(state: tuple[Any, Array]) -> tuple[Any, Array]:
        following = step(state[0])
        return following, condition(following).astype(jnp.int32)

    state = at, condition(at).astype(jnp.int32)
    return lax.while_loop(lambda state: state[1] != 0, advance, state)[0]


class Runs(NamedTuple):
    """Tokens whose slots are neighbours in one tile of the cache; int32 of each buffer, in SMEM."""

    tile: Any
    token: Any  # the first one
    place: Any  # its slot in the tile
    size: Any  # 0 where there is no run any more
    is_late: Any  # whether the tile may still be written when its buffer is free


class Place(NamedTuple):
    """Where the walk stands."""

    run: Array
    token: Array  # the first one that is in no run yet
    written: Array  # runs whose write-back has been waited for


class RunWriter:
    """What is done with the runs of one launch.

    A row of the cache holds `fold` keys, and a new row its numbers as often. `new_hbm` and `rows`
    are those of keys and of values: (num_tokens, parts of heads, LANES) where heads are of whole
    lanes, `rows` (buffers, slots of a tile, ...). `tiles` (buffers, planes, heads, rows of a tile,
    numbers of a row) has a part for each cache.
    """

    def __init__(self, *refs: Any, num_caches: int, fold: int, interpret: Any) -> None:
        """`refs`: slots, new rows, the caches twice (they are written in place), and scratch."""
        self.slots, *self.new_hbm = refs[:3]
        refs = refs[3 + num_caches :]
        self.caches, self.tiles = refs[:num_caches], refs[num_caches : 2 * num_caches]
        refs = refs[2 * num_caches :]
        self.rows, (self.read_done, self.write_done, self.rows_done) = refs[:2], refs[2:5]
        self.runs, self.fold, self.interpret = Runs(*refs[5:]), fold, interpret

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return int(self.tiles[0].shape[-2])

    @property
    def tile_slots(self) -> int:
        return self.height * self.fold

    @property
    def num_buffers(self) -> int:
        return int(self.tiles[0].shape[0])

    @property
    def ahead(self) -> int:
        """Runs that are being read ahead; a write-back has as many runs of time to end."""
        return self.num_buffers // 2

    def _buffer(self, run: Array) -> Array:
        return divided(run, self.num_buffers)[1]

    def _tiles(self, slot: Array) -> list[tuple[Any, Any]]:
        """The tiles in this buffer, and where they lie in the caches (planes, pages, heads, rows,
        numbers): keys and values of one together, unless they are too far apart for one DMA.
        """
        found, height = [], self.height
        for tiles, cache in zip(self.tiles, self.caches, strict=True):
            page, of_page = divided(self.runs.tile[slot], cache.shape[3] // height)
            rows = pl.ds(pl.multiple_of(of_page * height, height), height)
            is_near = math.prod(cache.shape[1:]) * cache.dtype.itemsize < FARTHEST
            each = [slice(i, i + 1) for i in range(cache.shape[0])]
            for planes in [slice(None)] if is_near else each:
                found.append((tiles.at[slot, planes], cache.at[planes, page, :, rows]))
        return found

    def _reads(self, slot: Array, do: str) -> None:
        for tile, stored in self._tiles(slot):
            getattr(pltpu.make_async_copy(stored, tile, self.read_done.at[slot]), do)()

    def _writes(self, slot: Array, do: str) -> None:
        for tile, stored in self._tiles(slot):
            getattr(pltpu.make_async_copy(tile, stored, self.write_done.at[slot]), do)()

    def _new_rows(self, slot: Array, do: str) -> None:
        """New rows go to their places."""
        token, place = self.runs.token[slot], self.runs.place[slot]

        def move(first: Any, count: Any) -> None:
            for source, rows in zip(self.new_hbm, self.rows, strict=True):
                there = rows.at[slot, pl.ds(place + first, count)]
                here = source.at[pl.ds(token + first, count)]
                copy = pltpu.make_async_copy(here, there, self.rows_done.at[slot])
                getattr(copy, do)()

        if self.interpret is True:  # which knows no size that is not a number
            lax.fori_loop(0, self.runs.size[slot], lambda i, _: move(i, 1), None)
        else:
            move(0, self.runs.size[slot])

    def _next_run(self, token: Array) -> tuple[Array, Array]:
        """The first token from `token` on that is kept, and how many there are in its run."""
        total, (_, pages, _, rows, _) = jnp.int32(self.slots.shape[0]), self.caches[0].shape
        end = pages * rows * self.fold

        def slot_of(token: Array) -> Array:
            return self.slots[jnp.minimum(token, total - 1)]

        def is_skipped(token: Array) -> Array:
            slot = slot_of(token)
            return (token < total) & ((slot < 0) | (slot >= end))

        token = _while_it_holds(is_skipped, lambda token: token + 1, token)
        slot = slot_of(token)
        room = jnp.minimum(self.tile_slots - divided(slot, self.tile_slots)[1], total - token)

        def is_neighbour(size: Array) -> Array:
            return (size < room) & (slot_of(token + size) == slot + size)

        known = jnp.int32(1)
        if self.tile_slots <= min(MOST_AT_ONCE, self.slots.shape[0]):
            # straight-line code for a tile that a prompt fills, instead of a loop over its slots
            first = jnp.minimum(token, total - self.tile_slots)
            others = [(self.slots[first + i] - i) ^ slot for i in range(1, self.tile_slots)]
            differs = functools.reduce(jnp.bitwise_or, others)
            known = jnp.where((room == self.tile_slots) & (differs == 0), room, 1)
        size = _while_it_holds(is_neighbour, lambda size: size + 1, known)
        return token, jnp.where(token < total, size, 0)

    def fetch(self, run: Array, token: Array) -> Array:
        """Find a run, and start the copies of its tile and its rows; the token behind it."""
        slot = self._buffer(run)
        token, size = self._next_run(token)
        self.runs.size[slot] = size

        @pl.when(size > 0)
        def _() -> None:
            first = self.slots[token]
            tile, place = divided(first, self.tile_slots)
            others = [self.runs.tile[i] == tile for i in range(self.num_buffers)]
            is_late = functools.reduce(jnp.logical_or, others)
            self.runs.tile[slot] = tile
            self.runs.token[slot] = token
            self.runs.place[slot] = place
            self.runs.is_late[slot] = is_late.astype(jnp.int32)
            self._new_rows(slot, "start")
            pl.when(~is_late & (size < self.tile_slots))(lambda: self._reads(slot, "start"))

        return token + size

    def wait_for_writes(self, written: Array, stop: Array) -> Array:
        """Wait for the write-back of the runs before `stop`, of which `written` have been."""

        def wait(run: Array, _: None) -> None:
            self._writes(self._buffer(run), "wait")

        lax.fori_loop(written, stop, wait, None)
        return jnp.maximum(written, stop)

    def change(self, at: Place) -> Place:
        """Write the run, and start the copies of a later one."""
        slot = self._buffer(at.run)
        is_late = self.runs.is_late[slot] == 1
        behind = at.run + (self.ahead + 1 - self.num_buffers)
        written = self.wait_for_writes(at.written, jnp.where(is_late, at.run, behind))
        token = self.fetch(at.run + self.ahead, at.token)
        is_whole = self.runs.size[slot] == self.tile_slots
        pl.when(is_late & ~is_whole)(lambda: self._reads(slot, "start"))
        pl.when(~is_whole)(lambda: self._reads(slot, "wait"))
        self._new_rows(slot, "wait")
        self._put(slot)
        self._writes(slot, "start")
        return Place(at.run + 1, token, written)

    def _put(self, slot: Array) -> None:
        """Change the tiles in this buffer."""
        place, size = self.runs.place[slot], self.runs.size[slot]
        planes = [(tiles, i) for tiles in self.tiles for i in range(tiles.shape[1])]
        for (tiles, plane), rows in zip(planes, self.rows, strict=True):
            heads, height, width = tiles.shape[2:]
            index, lane = (
                lax.broadcasted_iota(jnp.int32, (height, width), axis) for axis in range(2)
            )
            part = lax.div(lane, jnp.int32(width // self.fold))
            index = index * self.fold + part
            is_new = (index >= place) & (index < place + size)
            parts = [self._heads_of(rows, slot, i, width) for i in range(self.fold)]
            for head in range(heads):
                new = parts[0][head]
                for i in range(1, self.fold):
                    new = jnp.where(part == i, parts[i][head], new)
                new = jnp.where(is_new, new, tiles[slot, plane, head].astype(jnp.float32))
                tiles[slot, plane, head] = new.astype(tiles.dtype)

    def _heads_of(self, rows: Any, slot: Array, first: int, width: int) -> list[Array]:
        """New rows from the first one of a run's buffer on, each `fold`-th: (height, width) of each
        head, in float32.
        """
        _, most, per_token, numbers = rows.shape
        paired = 2 if rows.dtype == jnp.bfloat16 else 1
        if self.interpret or numbers != LANES:  # which knows no refs of another shape or type
            these = slice(first, first + self.height * self.fold, self.fold)
            found = [rows[slot, :, i][these].astype(jnp.float32) for i in range(per_token)]
        else:
            flat = rows.at[slot]
            if paired > 1:
                flat = flat.bitcast(jnp.int32)
            step = per_token // paired
            flat = flat.reshape(most * step, LANES)
            found = []
            for i in range(step):
                x = flat[pl.ds(first * step + i, self.height, stride=self.fold * step), :]
                found += [*halves_of_words(x)] if paired > 1 else [x.astype(jnp.float32)]
        each = max(1, width // numbers)
        groups = [found[i : i + each] for i in range(0, len(found), each)]
        return [x[0] if each == 1 else jnp.concatenate(x, axis=1) for x in groups]

    def walk(self) -> None:
        """Write all runs."""
        for i in range(self.num_buffers):
            self.runs.tile[i] = jnp.int32(-1)
        token = lax.fori_loop(0, self.ahead, self.fetch, jnp.int32(0))

        def is_run(at: Place) -> Array:
            return self.runs.size[self._buffer(at.run)] > 0

        end = _while_it_holds(is_run, self.change, Place(jnp.int32(0), token, jnp.int32(0)))
        self.wait_for_writes(end.written, end.run)
