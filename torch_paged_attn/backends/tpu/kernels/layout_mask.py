"""A block-sparse layout as the kernel reads it: which blocks of keys a tile visits, and their bits.

The kernel fetches and multiplies blocks of keys that are wider than the layout's. For a row of the
layout, one 32-bit word says which of its blocks within a wide one are listed. The words are
computed on the device, and take a bit of memory for each block of the layout.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from torch_paged_attn.backends.tpu.dtypes import LANES, SUBLANES
from torch_paged_attn.backends.tpu.kernels.arguments import MOST_WORDS, Options, Refs
from torch_paged_attn.backends.tpu.kernels.softmax import across
from torch_paged_attn.backends.tpu.tiles import Tiles

WORD = 32
MOST_LAUNCHES = 16  # for the rows of a layout
ROUNDED = 1 << 12  # numbers by which tables are rounded up, and small ones


class Layout(NamedTuple):
    """The op's layout of one call."""

    crow: Array  # ([batch,] heads, rows + 1)
    col: Array  # ([batch,] heads, nnz)
    q_block_size: int
    k_block_size: int
    max_keys: int  # of a sequence


def num_rows(tile_q: int, q_block_size: int) -> int:
    """Rows of the layout that a tile of consecutive positions may touch."""
    return (tile_q + q_block_size - 2) // q_block_size + 1


def layout_words(layout: Layout, block_k: int) -> Array:
    """A layout as (sequences or 1, rows + 1, blocks, heads), a word for each block of keys; the
    last row is empty. It depends on no tile, so that XLA computes it once for all layers.
    """
    rows, nnz, heads = layout.crow.shape[-1] - 1, layout.col.shape[-1], layout.crow.shape[-2]
    crow, col = layout.crow.reshape(-1, rows + 1), layout.col.reshape(-1, nnz)
    # of each entry of CSR, (layouts, nnz): its row, the block that it has a bit in, and the bit
    entry, blocks_per_word = jnp.arange(nnz), block_k // layout.k_block_size
    row = jnp.sum(entry[None, :, None] >= crow[:, None, 1:], axis=-1)
    is_entry = (row < rows) & (entry >= crow[:, :1]) & (col >= 0)
    bit = (col % blocks_per_word).astype(jnp.uint32)
    bits = jnp.where(is_entry, jnp.uint32(1) << bit, jnp.uint32(0))
    which = jnp.arange(row.shape[0])[:, None]
    num_blocks = max(1, -(-layout.max_keys // block_k))
    words = jnp.zeros((row.shape[0] // heads, rows + 1, num_blocks, heads), jnp.uint32)
    # columns of a row are unique: a sum of their bits is their union
    place = which // heads, row, col // blocks_per_word, which % heads
    words = words.at[place].add(bits, mode="drop")
    return lax.bitcast_convert_type(words, jnp.int32)


def split_words(
    layout: Layout, options: Options, total_q: int, batch: int, entries: int
) -> list[tuple[tuple[int | None, int | None], Array]]:
    """For each launch of a call, the rows of the layout in which its tiles begin, and the words of
    the rows that they touch. It is one launch if all words fit the scalar core's memory beside the
    blocks of each tile and a table of `entries`.
    """
    words = layout_words(layout, options.block_k)
    layouts, bounds, num_blocks, heads = words.shape
    rows, beyond = bounds - 1, num_rows(options.tile_q, layout.q_block_size) - 1
    of_tiles = options.most_tiles(total_q, batch) * (num_blocks + len(Tiles._fields) + 1)
    room = MOST_WORDS - ROUNDED - entries - of_tiles
    each = room // (layouts * num_blocks * (heads + (heads > 1))) - beyond - 1
    if each + beyond >= rows or each * MOST_LAUNCHES < rows:
        return [((None, None), words)]
    parts = []
    for first in range(0, rows, each):
        end = min(first + each + beyond, rows)
        own = jnp.concatenate([words[:, first:end], words[:, rows:]], axis=1)
        stop = first + each if first + each < rows else None
        parts.append(((first or None, stop), own))
    return parts


def union_of_heads(words: Array) -> Array:
    """What some head lists, of `layout_words`."""
    return lax.reduce(words, jnp.int32(0), lax.bitwise_or, (3,))


def _place_of(refs: Refs, options: Options, tile: Array, block: Array, i: int) -> Array:
    """The place in `union_of_heads` of the word of a block and of the i-th row of the layout that
    the tile may touch.
    """
    tiles, (num_rows, num_blocks, num_heads) = refs.tiles, options.layout_shape
    position, shift = tiles.position[tile], options.block_sizes[0].bit_length() - 1
    row = (position >> shift) + i
    # rows behind the tile's last position are not its own
    is_row = row <= (position + (options.tile_q - 1)) >> shift
    row -= options.layout_rows[0] or 0
    is_row &= (row >= 0) & (row < num_rows)
    row = jnp.where(is_row, row, num_rows)  # the empty one
    if refs.layout_words.shape[0] > (num_rows + 1) * num_blocks * num_heads:
        row += tiles.sequence[tile] * (num_rows + 1)
    return row * num_blocks + block


def list_blocks(refs: Refs, options: Options, tile: Array) -> Array:
    """Write `refs.visits` of the tile, the blocks of keys that some head of it sees; how many."""
    tiles, num_blocks = refs.tiles, options.layout_shape[1]
    words_of = refs.layout_words if refs.layout_union is None else refs.layout_union
    rows = range(num_rows(options.tile_q, options.block_sizes[0]))
    block_k = jnp.int32(options.block_k)

    def look(block: Array, count: Array) -> Array:
        words = [words_of[_place_of(refs, options, tile, block, i)] for i in rows]
        is_visited = functools.reduce(operator.or_, words) != 0
        # written over by the next one that is visited
        refs.visits[tile * num_blocks + count] = block
        return count + jnp.where(is_visited, 1, 0)

    first = lax.div(tiles.start[tile], block_k)
    stop = lax.div(tiles.stop[tile] + (block_k - 1), block_k)
    count = lax.fori_loop(first, stop, look, jnp.int32(0))
    refs.num_visits[tile] = count
    return count


@dataclasses.dataclass(frozen=True)
class LayoutMask:
    """The layout's bits for a tile, some of its heads, and a block that it visits.

    A head of the kernel, a KV head or several that are stacked, may have the same layout as all
    others, or as many of its own as `layouts_of_head` says, one for each part of its rows.
    """

    ref: Any  # `layout_words`
    options: Options
    position: Array
    places: list[Array]  # of each row of the layout that the tile may touch, its first word in ref
    some: Array  # what some, and what all rows and heads list
    every: Array

    @classmethod
    def of_block(
        cls, refs: Refs, options: Options, tile: Array, block: Array, heads: list[Any]
    ) -> "LayoutMask":
        """Of a block of keys."""
        touched = range(num_rows(options.tile_q, options.block_sizes[0]))
        num_heads, position = options.layout_shape[2], refs.tiles.position[tile]
        places = [_place_of(refs, options, tile, block, i) * num_heads for i in touched]
        mask = cls(refs.layout_words, options, position, places, jnp.int32(0), jnp.int32(-1))
        inside, size = position & (options.block_sizes[0] - 1), options.block_sizes[0]
        some, every = mask.some, mask.every
        for i in touched:
            # a row behind the tile's last one
            is_beyond = i * size >= inside + options.tile_q
            for head in heads if options.layouts_of_head else [0]:
                for part in range(mask.parts):
                    word = mask.word(i, head, part)
                    some |= word
                    every &= jnp.where(is_beyond, -1, word) if i > 0 else word
        return dataclasses.replace(mask, some=some, every=every)

    @property
    def parts(self) -> int:
        """Layouts of a head's rows."""
        return max(1, self.options.layouts_of_head)

    def word(self, i: int, head: Any, part: int) -> Array:
        """The i-th row's word, of a part of a head's rows."""
        place = self.places[i]
        if self.options.layouts_of_head:
            place += head * self.options.layouts_of_head + part
        word: Array = self.ref[place]
        return word

    def bits(self, place: Array, width: int) -> tuple[Array, Array]:
        """Whether some, and whether all blocks of the keys from `place * width` on, `width` of
        them, are listed, for the tile's rows and the heads.
        """
        count = width // self.options.block_sizes[1]
        ones = jnp.int32(-1 if count == WORD else (1 << count) - 1)
        some, every = (
            lax.shift_right_logical(x, place * count) & ones for x in (self.some, self.every)
        )
        return some != 0, every == ones

    def sees(self, head: Any, rows: int, first: Array, width: int) -> Array:
        """True where the layout lists the block of a row's token and of a key: (rows, width), keys
        from the block's `first` on.
        """
        q_block_size, k_block_size = self.options.block_sizes
        each = self.options.group_size * self.options.tile_q // self.parts
        height, lanes = each if each % SUBLANES == 0 else rows, min(width, LANES)
        row = lax.broadcasted_iota(jnp.int32, (height, lanes), 0)
        inside = (self.position & (q_block_size - 1)) + (row & (self.options.tile_q - 1))
        row_of_layout = lax.shift_right_logical(inside, q_block_size.bit_length() - 1)
        columns = []
        for part in range(self.parts):
            column = jnp.full((height, lanes), self.word(0, head, part), jnp.int32)
            for i in range(1, len(self.places)):
                column = jnp.where(row_of_layout == i, self.word(i, head, part), column)
            columns.append(column)
        if height < rows:
            words = jnp.concatenate(columns, axis=0)
        else:
            words = columns[0]
            for part, column in enumerate(columns[1:], 1):
                words = jnp.where(row < part * each, words, column)
        key = lax.broadcasted_iota(jnp.int32, (1, width), 1) + first
        bit = jnp.int32(1) << lax.shift_right_logical(key, k_block_size.bit_length() - 1)
        return (across(words, width) & bit) != 0
