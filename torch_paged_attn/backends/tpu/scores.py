"""Scores of a tile's rows on a piece of keys: what is added to `q . k`, and which scores count.

The same formulas serve scores (rows, keys), where queries stay and keys pass by, and (keys, rows),
where keys stay: `query_axis` is 0 or 1.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from torch_paged_attn.backends.tpu.dropout import Dropout
from torch_paged_attn.backends.tpu.kernel_arguments import Options, Refs
from torch_paged_attn.backends.tpu.layout_mask import LayoutMask
from torch_paged_attn.backends.tpu.registers import LANES
from torch_paged_attn.backends.tpu.softmax import LOG2_E


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of one tile's rows, `row = g * tile_q + token` for query head g of a group, on the
    keys from `first_key` on."""

    refs: Refs
    options: Options
    tile: Array
    first_key: Array
    row: Array  # the index of each score's row, and of its key in the piece
    key: Array
    key_axis: int

    @classmethod
    def of_piece(
        cls,
        refs: Refs,
        options: Options,
        tile: Array,
        first_key: Array,
        sizes: tuple[int, int],
        query_axis: int = 0,
    ) -> "Scores":
        """`sizes` are the number of rows, and the number of keys or, if a row of memory holds
        `options.fold` keys, of such rows. Then the rows of queries are repeated `fold` times, once
        for each key of such a row.
        """
        shape = sizes if query_axis == 0 else sizes[::-1]
        row, key = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        row, key = (row, key) if query_axis == 0 else (key, row)
        if options.fold > 1:
            key = key * options.fold + lax.div(row, jnp.int32(sizes[0] // options.fold))
        return cls(refs, options, tile, first_key, row, key, 1 - query_axis)

    @property
    def token(self) -> Array:
        """The row's token within the tile."""
        return self.row & (self.options.tile_q - 1)

    def of(
        self, head: Any, products: Array, scale: Any, bias: Array | None
    ) -> tuple[Array, Array | None]:
        """Scores in base 2 from `products`, q . k of KV head `head`; and with a softcap the tanh of
        it, else None. `scale`: softmax_scale."""
        options, refs, tanh = self.options, self.refs, None
        if options.softcap > 0.0:
            tanh = jnp.tanh(products * (scale / options.softcap))
            scores = tanh * (options.softcap * LOG2_E)
        else:
            scores = products * (scale * LOG2_E)
        if refs.slopes is not None:
            position = refs.tiles.position[self.tile] - self.first_key + self.token
            distance = jnp.abs(self.key - position).astype(jnp.float32)
            scores = scores - refs.slopes[0, head] * distance
        return (scores if bias is None else scores + bias), tanh

    def visible(
        self, head: Any, place: Array, width: int, layout: LayoutMask | None, bias: Array | None
    ) -> Array:
        """True for scores that count. The piece is number `place` of its block's pieces, which have
        `width` keys each."""
        options, tiles = self.options, self.refs.tiles
        window, tile_q = options.window, options.tile_q
        stop = tiles.stop[self.tile] - self.first_key
        position = tiles.position[self.tile] - self.first_key
        if tile_q > 1:
            position += self.token
        if tile_q > 1 and window.right == 0:
            visible = self.key <= position  # no query has a position after the last key
        else:
            visible = self.key < stop
            if tile_q > 1 and window.right > 0:
                visible &= self.key <= position + window.right
        if window.left >= 0:
            visible &= self.key >= position - window.left
        if layout is not None:
            visible &= layout.sees(head, self.row.shape[0], place * width, width)
        if bias is not None:
            visible &= bias != -jnp.inf
        if layout is not None or bias is not None:
            visible &= self.token < tiles.num_tokens[self.tile]
        return visible

    def is_seen(self, visible: Array, is_sparse: bool) -> Array:
        """True for keys that some row of the tile sees: (width, 1) or, if a row of memory holds
        several keys, for their numbers, (rows of memory, LANES). The first axis of `visible` are
        the tile's rows. Unless `is_sparse`, which keys are seen follows from the tile's bounds.
        """
        tiles, fold = self.refs.tiles, self.options.fold
        shape = (visible.shape[1], LANES if fold > 1 else 1)
        key = lax.broadcasted_iota(jnp.int32, shape, 0)
        if fold > 1:
            lane = lax.broadcasted_iota(jnp.int32, shape, 1)
            key = key * fold + lax.div(lane, jnp.int32(LANES // fold))
        start, stop = (x[self.tile] - self.first_key for x in (tiles.start, tiles.stop))
        is_seen = (key >= start) & (key < stop)
        if is_sparse:
            is_seen &= _as_column(jnp.any(visible, axis=0, keepdims=True))
        return is_seen

    def keep(self, head: Any) -> Array:
        """-1 for the probabilities that dropout keeps, else 0 (`dropout.kept`)."""
        width, rows = self.key.shape[self.key_axis], self.key.shape[1 - self.key_axis]
        draws = Dropout(self.refs, self.options, self.tile, head, self.first_key, width)
        return draws.keep(rows, self.key_axis)


def _as_column(row: Array) -> Array:
    """Bools (1, n) as (n, 1), LANES of them at a time: sums of rows of which only the diagonal is
    kept."""
    parts = []
    for first in range(0, row.shape[1], LANES):
        part = jnp.broadcast_to(row[:, first : first + LANES], (LANES, LANES))
        i, j = (lax.broadcasted_iota(jnp.int32, part.shape, axis) for axis in (0, 1))
        parts.append(jnp.sum(jnp.where(part & (i == j), 1.0, 0.0), axis=1, keepdims=True))
    return jnp.concatenate(parts, axis=0) > 0.0
