"""Blocks of keys on their way from HBM: a ring of buffers, filled ahead of where they are used.

A tile visits blocks by their turn: all of those between its first and last key, or those of a list.
The issue cursor (tile, turn) runs `num_buffers - 1` blocks ahead of the computation, across the
ends of tiles and sequences, so that no tile starts with an empty pipeline.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.tiles import Tiles


class Cursor(NamedTuple):
    """The next block to fetch, and the buffer that the computation stands at."""

    tile: Array
    turn: Array
    slot: Array


@dataclasses.dataclass(frozen=True)
class KeyStream:
    """Refs of one kernel, and the sizes of its blocks.

    Each buffer has a semaphore for keys and one for values: a forgotten wait is then seen by the
    interpreter, which two copies on one semaphore would hide.
    """

    tiles: Tiles  # of SMEM refs
    table: Any  # with so many entries behind the last one as a block has pages
    table_start: Any
    visits: Any  # (num_tiles * n,) the blocks of each tile, or None for all of them
    num_visits: Any  # (num_tiles,)
    k_hbm: Any  # (num_pages, num_kv_heads, page_size, head_dim)
    v_hbm: Any
    k_buffers: Any  # (num_buffers, pages, num_kv_heads, page_size, head_dim)
    v_buffers: Any
    bias_hbm: Any  # (num_tiles, 1 or num_kv_heads, rows, keys), or None
    bias_buffers: Any  # (num_buffers, 1 or num_kv_heads, rows, block_k)
    semaphores: Any  # (3, num_buffers)
    num_tiles: int
    num_cores: int
    heads_apart: int  # 1, or how many tiles share their tokens, one for each of so many heads
    static_waits: bool

    @classmethod
    def of(cls, ref: dict[str, Any], tiles: Tiles, num_tiles: int, statics: Any) -> "KeyStream":
        """From the kernel's refs by name."""
        k_hbm = ref["k_hbm"]
        is_joined = "v_hbm" not in ref
        return cls(
            tiles=tiles,
            table=ref["table"],
            table_start=ref["table_start"],
            visits=ref.get("visits"),
            num_visits=ref.get("num_visits"),
            k_hbm=k_hbm.at[0] if is_joined else k_hbm,
            v_hbm=k_hbm.at[1] if is_joined else ref["v_hbm"],
            k_buffers=ref["k_buffers"],
            v_buffers=ref["v_buffers"],
            bias_hbm=ref.get("bias"),
            bias_buffers=ref.get("bias_buffers"),
            semaphores=ref["semaphores"],
            num_tiles=num_tiles,
            num_cores=statics.num_cores,
            heads_apart=statics.heads_apart,
            static_waits=statics.interpret is True,
        )

    @property
    def num_buffers(self) -> int:
        return self.k_buffers.shape[0]

    @property
    def pages(self) -> int:
        """Pages of a block."""
        return self.k_buffers.shape[1]

    @property
    def page_size(self) -> int:
        return self.k_buffers.shape[3]

    @property
    def block_k(self) -> int:
        """Keys of a block."""
        return self.pages * self.page_size

    def turns(self, tile: Array) -> Array:
        """How many blocks the tile visits."""
        if self.visits is not None:
            return self.num_visits[tile]
        stop = lax.div(self.tiles.stop[tile] + (self.block_k - 1), jnp.int32(self.block_k))
        return stop - self._first_block(tile)

    def block(self, tile: Array, turn: Array) -> Array:
        """The block that the tile visits then."""
        if self.visits is not None:
            return self.visits[tile * (self.visits.shape[0] // self.num_tiles) + turn]
        return self._first_block(tile) + turn

    def kv_head(self, tile: Array) -> Array:
        """The KV head of a tile that has one of its own."""
        group_size = self.heads_apart // self.k_hbm.shape[1]
        return lax.div(lax.rem(tile, jnp.int32(self.heads_apart)), jnp.int32(group_size))

    def open(self, tile: Array) -> Cursor:
        """Start at the core's first tile: fill all buffers but one."""
        cursor = Cursor(self.tiles.busy_from[tile], jnp.int32(0), jnp.int32(0))

        def fill(slot: Array, cursor: Cursor) -> Cursor:
            return self._advance(cursor, slot)

        return lax.fori_loop(0, self.num_buffers - 1, fill, cursor)

    def next(self, cursor: Cursor, tile: Array, block: Array) -> tuple[Array, Cursor]:
        """Ask for one block more, wait for this one: its buffer, and the cursor moved on."""
        slot = cursor.slot
        free = lax.rem(slot + (self.num_buffers - 1), jnp.int32(self.num_buffers))
        cursor = self._advance(cursor, free)
        self._wait(tile, block, slot)
        return slot, cursor._replace(slot=lax.rem(slot + 1, jnp.int32(self.num_buffers)))

    def _first_block(self, tile: Array) -> Array:
        return lax.div(self.tiles.start[tile], jnp.int32(self.block_k))

    def _advance(self, cursor: Cursor, slot: Array) -> Cursor:
        tile = jnp.minimum(cursor.tile, self.num_tiles - 1)

        @pl.when(cursor.tile < self.num_tiles)
        def _():
            self._start(tile, self.block(tile, cursor.turn), slot)

        turn = cursor.turn + 1
        is_done = turn >= self.turns(tile)
        following = self.tiles.busy_from[tile + self.num_cores]
        return cursor._replace(
            tile=jnp.where(is_done, following, cursor.tile), turn=jnp.where(is_done, 0, turn)
        )

    def _live_pages(self, tile: Array, block: Array) -> tuple[Array, Array]:
        """The pages of the block that some token of the tile looks at."""
        size = jnp.int32(self.page_size)
        first = lax.div(self.tiles.start[tile], size) - block * self.pages
        stop = lax.div(self.tiles.stop[tile] + (self.page_size - 1), size)
        return jnp.maximum(first, 0), jnp.minimum(stop - block * self.pages, self.pages)

    def bias_of(self, slot: Array, head: Any, place: Array, width: int) -> Array:
        """The bias (rows, width) of keys of the block in this buffer."""
        head = head if self.bias_buffers.shape[1] > 1 else 0
        return self.bias_buffers[slot, head, :, pl.ds(place * width, width)]

    def _bias_copy(self, tile: Array, block: Array, slot: Array) -> Any:
        columns = pl.ds(pl.multiple_of(block * self.block_k, self.block_k), self.block_k)
        heads = pl.ds(0, self.bias_hbm.shape[1])
        if self.heads_apart > 1:
            head = lax.rem(tile, jnp.int32(self.heads_apart))
            heads = pl.ds(head if self.bias_hbm.shape[1] > 1 else 0, 1)
        of_tokens = lax.div(tile, jnp.int32(self.heads_apart))
        return pltpu.make_async_copy(
            self.bias_hbm.at[of_tokens, heads, :, columns],
            self.bias_buffers.at[slot],
            self.semaphores.at[2, slot],
        )

    def _copies(self, tile: Array, page: Array, slot: Array, i: int) -> tuple[Any, Any]:
        k_done, v_done = self.semaphores.at[0, slot], self.semaphores.at[1, slot]
        k_page, v_page = self.k_hbm.at[page], self.v_hbm.at[page]
        if self.heads_apart > 1:
            head = pl.ds(self.kv_head(tile), 1)
            k_page, v_page = k_page.at[head], v_page.at[head]
        return (
            pltpu.make_async_copy(k_page, self.k_buffers.at[slot, i], k_done),
            pltpu.make_async_copy(v_page, self.v_buffers.at[slot, i], v_done),
        )

    def _start(self, tile: Array, block: Array, slot: Array) -> None:
        first, stop = self._live_pages(tile, block)
        if self.bias_hbm is not None:
            self._bias_copy(tile, block, slot).start()
        entry = self.table_start[self.tiles.sequence[tile]] + block * self.pages
        for i in range(self.pages):
            # a load that hangs on a condition costs more than one that nobody needs
            page = self.table[entry + i]

            @pl.when((i >= first) & (i < stop))
            def _(i=i, page=page):
                for copy in self._copies(tile, page, slot, i):
                    copy.start()

    def _wait(self, tile: Array, block: Array, slot: Array) -> None:
        first, stop = self._live_pages(tile, block)
        if self.bias_hbm is not None:
            self._bias_copy(tile, block, slot).wait()
        if not self.static_waits:
            # one wait for as many bytes as all the pages have
            for buffers, done in ((self.k_buffers, 0), (self.v_buffers, 1)):
                copied = buffers.at[slot, pl.ds(first, stop - first)]
                pltpu.make_async_copy(copied, copied, self.semaphores.at[done, slot]).wait()
            return
        for i in range(self.pages):

            @pl.when((i >= first) & (i < stop))
            def _(i=i):
                for copy in self._copies(tile, jnp.int32(0), slot, i):
                    copy.wait()
