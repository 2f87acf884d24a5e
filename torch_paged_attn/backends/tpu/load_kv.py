"""Keys and values are copied from HBM into a ring of buffers, ahead of where they are used.

A tile of queries visits all blocks between its first and last key, or those of a list.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.float16 import widen
from torch_paged_attn.backends.tpu.kernel_arguments import ForwardRefs, KvRefs
from torch_paged_attn.backends.tpu.ring import Ring
from torch_paged_attn.backends.tpu.token_bias import TokenBias

# a block's pages are started in groups of at most so many, and groups that are not needed skipped
MOST_PAGES = 64


@dataclasses.dataclass(frozen=True)
class KvLoader(Ring):
    """The ring of buffers of one kernel.

    Each buffer has a semaphore for keys, one for values and one for the bias: the interpreter then
    sees a forgotten wait, which two copies on one semaphore would hide.
    """

    refs: KvRefs

    @property
    def next_nonempty(self) -> Any:
        return self.refs.tiles.next_nonempty

    @property
    def num_buffers(self) -> int:
        return self.refs.k_buffers.shape[0]

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
        if self.refs.visits is not None:
            return self.refs.num_visits[tile]
        stop = lax.div(self.refs.tiles.stop[tile] + (self.block_k - 1), jnp.int32(self.block_k))
        return stop - self._first_block(tile)

    def block(self, tile: Array, turn: Array) -> Array:
        """The block that the tile visits at this turn."""
        if self.refs.visits is not None:
            return self.refs.visits[tile * (self.refs.visits.shape[0] // self.num_tiles) + turn]
        return self._first_block(tile) + turn

    def first_kv_head(self, tile: Array) -> Any:
        """Of a tile that may have some of the heads."""
        apart = self.options.head_splits
        if apart == 1:
            return 0
        part, num_kv_heads = lax.rem(tile, jnp.int32(apart)), self.refs.k_hbm.shape[1]
        if num_kv_heads >= apart:
            return part * (num_kv_heads // apart)
        return lax.div(part, jnp.int32(apart // num_kv_heads))

    def _first_block(self, tile: Array) -> Array:
        return lax.div(self.refs.tiles.start[tile], jnp.int32(self.block_k))

    def _live_pages(self, tile: Array, block: Array) -> tuple[Array, Array]:
        """The first and the end of the block's pages that some token of the tile sees."""
        size = jnp.int32(self.page_size)
        first = lax.div(self.refs.tiles.start[tile], size) - block * self.pages
        stop = lax.div(self.refs.tiles.stop[tile] + (self.page_size - 1), size)
        return jnp.maximum(first, 0), jnp.minimum(stop - block * self.pages, self.pages)

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

    def bias_of(self, slot: Array, head: Any, place: Array, width: int) -> Array:
        """The bias (rows, width) of keys of the block in this buffer."""
        head = head if self.refs.bias_buffers.shape[1] > 1 else 0
        return self.refs.bias_buffers[slot, head, :, pl.ds(place * width, width)]

    def _bias_copy(self, tile: Array, block: Array, slot: Array) -> Any:
        if isinstance(self.refs, ForwardRefs) and self.refs.bias_rows is not None:
            return TokenBias(self.refs, self.options, tile).copy(block, slot)
        columns = pl.ds(pl.multiple_of(block * self.block_k, self.block_k), self.block_k)
        count = self.refs.bias_buffers.shape[1]
        heads = pl.ds(0, count)
        if self.options.head_splits > 1 and self.refs.bias.shape[1] > 1:
            heads = pl.ds(lax.rem(tile, jnp.int32(self.options.head_splits)) * count, count)
        of_tokens = lax.div(tile, jnp.int32(self.options.head_splits))
        return pltpu.make_async_copy(
            self.refs.bias.at[of_tokens, heads, :, columns],
            self.refs.bias_buffers.at[slot],
            self.refs.semaphores.at[2, slot],
        )

    def _copies(self, tile: Array, page: Array, slot: Array, i: Any) -> list[Any]:
        k_done, v_done = self.refs.semaphores.at[0, slot], self.refs.semaphores.at[1, slot]
        stored = [(self.refs.k_hbm, self.refs.k_buffers, k_done)]
        if self.refs.v_buffers is not None:
            stored.append((self.refs.v_hbm, self.refs.v_buffers, v_done))
        heads: Any = slice(None)
        if self.options.head_splits > 1:
            heads = pl.ds(self.first_kv_head(tile), self.refs.k_buffers.shape[2])
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
        if self.refs.bias is not None:
            self._bias_copy(tile, block, slot).start()
        entry = self._first_entry(self.refs.tiles.sequence[tile]) + block * self.pages
        together = math.gcd(self.pages, MOST_PAGES) if self.pages > MOST_PAGES else self.pages

        def start_some(group: Any, _: None) -> None:
            for i in range(together):
                index = group * together + i
                # a load that hangs on a condition costs more than one that is not needed
                page = self.refs.table[entry + index]

                @pl.when((index >= first) & (index < stop))
                def _(index=index, page=page):
                    for copy in self._copies(tile, page, slot, index):
                        copy.start()

        if together == self.pages:
            start_some(0, None)
        else:
            end = lax.div(stop + (together - 1), jnp.int32(together))
            lax.fori_loop(lax.div(first, jnp.int32(together)), end, start_some, None)

    def _wait(self, tile: Array, block: Array, slot: Array) -> None:
        first, stop = self._live_pages(tile, block)
        if self.refs.bias is not None:
            self._bias_copy(tile, block, slot).wait()
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
                for copy in self._copies(tile, jnp.int32(0), slot, i):
                    copy.wait()
