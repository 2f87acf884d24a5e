"""Blocks are copied from HBM into a ring of buffers in VMEM before they are used.

A tile visits its blocks one after the other; `turn` is the number of a visit. Copies are started
`num_buffers - 1` blocks ahead of the computation, also those of the next tile and sequence, so that
no tile but a core's first one waits for an empty ring. A tile of queries visits all blocks of keys
between its first and last key, or those of a list.

A bias is read where it lies: `(1 or num_heads, total_q, keys)`, a DMA for a tile and a block.
Copies begin at whole tiles of memory, and a sequence's tokens anywhere: what is copied begins up to
a tile before them. What is computed on is in float32 and in base 2, once for each block; a bias of
one head is then read by all of them.

Scales by token come in pages of LANES keys, so that a DMA has those of a block and all heads.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.dtypes import LANES, divided, rows_of_tile, widen
from torch_paged_attn.backends.tpu.kernels.arguments import Options, Refs
from torch_paged_attn.backends.tpu.kernels.softmax import base_2


class Cursor(NamedTuple):
    """Which copy is started next, and which buffer is used next."""

    tile: Array  # of the next copy
    turn: Array  # of the next copy
    slot: Array  # the buffer that is computed on next


@dataclasses.dataclass(frozen=True)
class Ring:
    """The buffers of one kernel; a subclass says what a block is."""

    refs: Refs
    options: Options
    num_tiles: int

    @property
    def num_buffers(self) -> int:
        """Blocks that there is room for."""
        return int(self.refs.semaphores.shape[1])

    # of a subclass: how many blocks a tile visits, and which one at a turn
    turns: ClassVar[Callable[[Any, Array], Array]]
    block: ClassVar[Callable[[Any, Array, Array], Array]]
    # start the copies of a tile's block into a buffer, and wait for them
    _start: ClassVar[Callable[[Any, Array, Array, Array], None]]
    _wait: ClassVar[Callable[[Any, Array, Array, Array], None]]

    @property
    def next_nonempty(self) -> Any:
        """`(num_tiles + cores,)`: for each tile, that tile or else the core's next one that visits
        a block."""
        return self.refs.tiles.next_nonempty

    def run_tile(self, tile: Array, is_first: Array, use: Callable[[Array, Array], None]) -> None:
        """Call `use(block, slot)` for each block of the tile. The core's first tile (`is_first`)
        fills the ring; SMEM keeps the cursor from tile to tile.
        """
        saved = self.refs.cursor

        def save(cursor: Cursor) -> None:
            for i, value in enumerate(cursor):
                saved[i] = value

        @pl.when(is_first)
        def _() -> None:  # copies into all buffers but one
            cursor = Cursor(self.next_nonempty[tile], jnp.int32(0), jnp.int32(0))
            save(lax.fori_loop(0, self.num_buffers - 1, self._advance, cursor))

        def take(turn: Array, cursor: Cursor) -> Cursor:
            block, slot = self.block(tile, turn), cursor.slot
            free = lax.rem(slot + (self.num_buffers - 1), jnp.int32(self.num_buffers))
            cursor = self._advance(free, cursor)
            self._wait(tile, block, slot)
            use(block, slot)
            return cursor._replace(slot=lax.rem(slot + 1, jnp.int32(self.num_buffers)))

        cursor = Cursor(*(saved[i] for i in range(len(Cursor._fields))))
        save(lax.fori_loop(0, self.turns(tile), take, cursor))

    def _advance(self, slot: Array, cursor: Cursor) -> Cursor:
        """Start the copy of the cursor's block into buffer `slot`. Returns the cursor of the block
        after it."""
        tile = jnp.minimum(cursor.tile, self.num_tiles - 1)

        @pl.when(cursor.tile < self.num_tiles)
        def _() -> None:
            self._start(tile, self.block(tile, cursor.turn), slot)

        turn = cursor.turn + 1
        is_done = turn >= self.turns(tile)
        following = self.next_nonempty[tile + self.options.config.num_cores]
        return cursor._replace(
            tile=jnp.where(is_done, following, cursor.tile), turn=jnp.where(is_done, 0, turn)
        )


def rows_of_copy(tile_q: int, dtype: Any) -> int:
    """Rows that have a tile's tokens among them, wherever these begin."""
    unit = rows_of_tile(dtype)
    return unit if tile_q == 1 else -(-(tile_q + unit - 1) // unit) * unit


def readable(bias: Array, tile_q: int, block_k: int) -> Array:
    """The bias of a call, of a type that kernels read, with whole copies of rows and of keys."""
    if bias.dtype == jnp.bool_:
        bias = jnp.where(bias, 0.0, -jnp.inf).astype(jnp.bfloat16)
    elif bias.dtype != jnp.bfloat16:
        bias = bias.astype(jnp.float32)
    _, rows, keys = bias.shape
    least, unit = rows_of_copy(tile_q, bias.dtype), rows_of_tile(bias.dtype)
    more = max(least, -(-rows // unit) * unit) - rows
    return jnp.pad(bias, ((0, 0), (0, more), (0, -keys % block_k)))


@dataclasses.dataclass(frozen=True)
class TokenBias:
    """The bias of one tile's tokens on blocks of keys."""

    refs: Refs
    options: Options
    tile: Array

    def _rows(self) -> tuple[Array, Array]:
        """Where the copy begins, and the tile's first token in it."""
        refs, tiles = self.refs, self.refs.tiles
        first = refs.cu_seqlens[tiles.sequence[self.tile]] + tiles.first_query[self.tile]
        unit = rows_of_tile(refs.bias.dtype)
        last = refs.bias.shape[1] - refs.bias_buffers.shape[2]
        start = jnp.minimum(first & -unit, last)
        return pl.multiple_of(start, unit), first - start

    def copy(self, block: Array, slot: Array) -> Any:
        """Of a block's bias into its buffer."""
        refs, block_k = self.refs, self.options.block_k
        start, _ = self._rows()
        rows = pl.ds(start, refs.bias_buffers.shape[2])
        columns = pl.ds(pl.multiple_of(block * block_k, block_k), block_k)
        return pltpu.make_async_copy(
            refs.bias.at[:, rows, columns],
            refs.bias_buffers.at[slot],
            refs.semaphores.at[2, slot],
        )

    def arrange(self, slot: Array) -> None:
        """The tile's tokens of what has been copied, in float32 and in base 2."""
        refs, tile_q, count = self.refs, self.options.tile_q, self.refs.bias_buffers.shape[2]
        rows, size = refs.m_i.shape[1], self.options.group_size
        _, first = self._rows()

        def arrange_head(head: Any, _: None) -> None:
            copied = refs.bias_buffers[slot, head].astype(jnp.float32)
            # what is copied begins at whole tiles, and only those can be loaded
            own = pltpu.roll(copied, count - first, 0)[:tile_q]
            if tile_q == 1 and rows > size:  # whose registers have rows of no head
                kv_head, of_group = divided(head, size)
                head = kv_head * rows + of_group
            place = (0, pl.ds(head, 1)) if tile_q == 1 else (head,)
            refs.bias_rows[place] = base_2(own)

        lax.fori_loop(0, refs.bias.shape[0], arrange_head, None)

    def of(self, head: Any, place: Array, width: int) -> Array:
        """(rows, width) of one KV head, or of a stack: piece `place` of the block."""
        refs, size, rows = self.refs, self.options.group_size, self.refs.m_i.shape[1]
        columns = pl.ds(pl.multiple_of(place * width, width), width)
        if refs.bias.shape[0] == 1:
            x = refs.bias_rows[0, :, columns]
            return jnp.tile(x, (size, 1)) if len(x) > 1 else jnp.broadcast_to(x, (rows, width))
        if self.options.tile_q == 1:
            return refs.bias_rows[0, pl.ds(pl.multiple_of(head * rows, rows), rows), columns]
        heads = pl.ds(pl.multiple_of(head * size, size), size)
        return refs.bias_rows[heads, :, columns].reshape(-1, width)


# a block's pages are started in groups of at most so many, and groups that are not needed skipped
MOST_PAGES = 64


@dataclasses.dataclass(frozen=True)
class KvLoader(Ring):
    """The ring of buffers of one kernel.

    Each buffer has a semaphore for keys, one for values and one for the bias: the interpreter then
    sees a forgotten wait, which two copies on one semaphore would hide.
    """

    @property
    def pages(self) -> int:
        """Pages of a block."""
        return self.refs.k_buffers.shape[1]

    @property
    def page_size(self) -> int:
        return self.refs.k_buffers.shape[3] * self.options.fold

    @property
    def block_k(self) -> int:
        """Keys of a block."""
        return self.pages * self.page_size

    def turns(self, tile: Array) -> Array:
        """How many blocks the tile visits."""
        if (refs := self.refs).visits is not None:
            return refs.num_visits[tile]
        stop, _ = divided(self.refs.tiles.stop[tile] + (self.block_k - 1), self.block_k)
        return stop - self._first_block(tile)

    def block(self, tile: Array, turn: Array) -> Array:
        """The block that the tile visits at this turn."""
        if (visits := self.refs.visits) is not None:
            return visits[tile * (visits.shape[0] // self.num_tiles) + turn]
        return self._first_block(tile) + turn

    def _first_block(self, tile: Array) -> Array:
        if self.options.window.left < 0:
            return jnp.int32(0)
        return divided(self.refs.tiles.start[tile], self.block_k)[0]

    def _live_pages(self, tile: Array, block: Array) -> tuple[Array, Array]:
        """The first and the end of the block's pages that some token of the tile sees."""
        size, first = self.page_size, jnp.int32(0)
        if self.options.window.left >= 0:  # else no copy waits for a comparison with it
            first = divided(self.refs.tiles.start[tile], size)[0] - block * self.pages
            first = jnp.maximum(first, 0)
        stop, _ = divided(self.refs.tiles.stop[tile] + (size - 1), size)
        return first, jnp.minimum(stop - block * self.pages, self.pages)

    def piece_of(self, buffers: Any, slot: Array, place: Array, width: int, head: Any) -> Array:
        """Keys or values of one KV head, (width // fold, n): piece `place` of the block in this
        buffer.
        """
        rows = width // self.options.fold
        if width < self.page_size:  # the block is one page
            keys = pl.ds(pl.multiple_of(place * rows, rows), rows)
            stored = buffers[slot, 0, head, keys, :]
        else:
            num_pages = width // self.page_size
            stored = buffers[slot, pl.ds(place * num_pages, num_pages), head].reshape(rows, -1)
        return widen(stored, self.options.compute_dtype)

    def scales_of(self, slot: Array, head: Any, place: Array, width: int) -> tuple[Array, Array]:
        """Scales by token of one KV head's keys and values, (1, width) each: piece `place` of the
        block in this buffer."""
        refs = self.refs
        count = width // LANES

        def of(kind: int) -> Array:
            pages = (place * count + i for i in range(count))
            rows = [refs.scale_buffers[slot, n, kind, pl.ds(head, 1), :] for n in pages]
            return jnp.concatenate(rows, axis=1)

        return of(0), of(1)

    def _other_copies(self, tile: Array, block: Array, slot: Array) -> list[Any]:
        """Of what comes with the keys of a block: biases, scales by token."""
        refs, copies = self.refs, []
        if refs.bias_rows is not None:
            copies = [TokenBias(refs, self.options, tile).copy(block, slot)]
        elif refs.bias is not None:
            columns = pl.ds(pl.multiple_of(block * self.block_k, self.block_k), self.block_k)
            of_bias = refs.bias.at[tile, :, :, columns], refs.bias_buffers.at[slot]
            copies = [pltpu.make_async_copy(*of_bias, refs.semaphores.at[2, slot])]
        if refs.token_scales is not None:
            count = self.block_k // LANES
            pages = pl.ds(refs.scale_start[refs.tiles.sequence[tile]] + block * count, count)
            of_scales = refs.token_scales.at[pages], refs.scale_buffers.at[slot]
            copies.append(pltpu.make_async_copy(*of_scales, refs.semaphores.at[3, slot]))
        return copies

    def _copies(self, page: Array, slot: Array, i: Any) -> list[Any]:
        k_done, v_done = self.refs.semaphores.at[0, slot], self.refs.semaphores.at[1, slot]
        stored = [(self.refs.k_hbm, self.refs.k_buffers, k_done)]
        if self.refs.v_buffers is not None:
            stored.append((self.refs.v_hbm, self.refs.v_buffers, v_done))
        count = self.refs.k_buffers.shape[2]  # of the launch's heads
        heads = pl.ds(self.options.first_kv_head, count)
        return [
            pltpu.make_async_copy(hbm.at[page, heads], buffers.at[slot, i], done)
            for hbm, buffers, done in stored
        ]

    def _first_entry(self, sequence: Array) -> Array:
        """Where the sequence's pages start in the table."""
        if self.refs.table_start is None:
            return sequence * self.options.table_stride
        return self.refs.table_start[sequence]

    def _start(self, tile: Array, block: Array, slot: Array) -> None:
        first, stop = self._live_pages(tile, block)
        for copy in self._other_copies(tile, block, slot):
            copy.start()
        entry = self._first_entry(self.refs.tiles.sequence[tile]) + block * self.pages
        together = math.gcd(self.pages, MOST_PAGES) if self.pages > MOST_PAGES else self.pages

        def start_some(group: Any, _: None) -> None:
            for i in range(together):
                index = group * together + i
                # a load that hangs on a condition costs more than one that is not needed
                page = self.refs.table[entry + index]

                @pl.when((index >= first) & (index < stop))
                def _(index=index, page=page):
                    for copy in self._copies(page, slot, index):
                        copy.start()

        if together == self.pages:
            start_some(0, None)
        else:
            end, _ = divided(stop + (together - 1), together)
            lax.fori_loop(divided(first, together)[0], end, start_some, None)

    def _wait(self, tile: Array, block: Array, slot: Array) -> None:
        first, stop = self._live_pages(tile, block)
        for copy in self._other_copies(tile, block, slot):
            copy.wait()
        # the plain interpreter knows no size that is not a number
        if self.options.interpret is not True:
            # one wait for as many bytes as all the pages have
            for done, buffers in enumerate((self.refs.k_buffers, self.refs.v_buffers)):
                if buffers is None:
                    continue
                copied = buffers.at[slot, pl.ds(first, stop - first)]
                pltpu.make_async_copy(copied, copied, self.refs.semaphores.at[done, slot]).wait()
            return
        for i in range(self.pages):

            @pl.when((i >= first) & (i < stop))
            def _(i=i):
                for copy in self._copies(jnp.int32(0), slot, i):
                    copy.wait()
