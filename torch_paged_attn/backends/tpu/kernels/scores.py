"""Scores of a tile's rows on a piece of keys, and their gradients: which pieces of a block are
computed on, what is added to `q . k`, and which scores count.

The same formulas serve scores (rows, keys), where queries stay and keys pass by, and (keys, rows),
where keys stay: `query_axis` is 0 or 1. Pieces that no row of a tile sees are skipped, those that
every row sees are not masked.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from torch_paged_attn.backends.tpu.dtypes import LANES
from torch_paged_attn.backends.tpu.kernels.arguments import MOST_HEADS, MOST_ROWS, Options, Refs
from torch_paged_attn.backends.tpu.kernels.dropout import Dropout, kept
from torch_paged_attn.backends.tpu.kernels.layout_mask import LayoutMask
from torch_paged_attn.backends.tpu.kernels.softmax import LOG2_E


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
        return draws.keep_of_rows(rows) if self.key_axis else draws.keep_of_columns(rows)


def _as_column(row: Array) -> Array:
    """Bools (1, n) as (n, 1), LANES of them at a time: sums of rows of which only the diagonal is
    kept."""
    parts = []
    for first in range(0, row.shape[1], LANES):
        part = jnp.broadcast_to(row[:, first : first + LANES], (LANES, LANES))
        i, j = (lax.broadcasted_iota(jnp.int32, part.shape, axis) for axis in (0, 1))
        parts.append(jnp.sum(jnp.where(part & (i == j), 1.0, 0.0), axis=1, keepdims=True))
    return jnp.concatenate(parts, axis=0) > 0.0


class ScoreGradients(NamedTuple):
    """Of one head, in float32."""

    weights: Array  # probabilities after dropout: what values are weighed with, but for 1 / (1 - p)
    ds: Array  # of what the softmax is given: of a bias too
    dx: Array  # of softmax_scale * q . k


def score_gradients(
    piece: Scores,
    head: Any,
    products: Array,
    dp: Array,
    lse: Array,
    delta: Array,
    bias: Array | None,
    visible: Array | None,
) -> ScoreGradients:
    """From `q . k` and `dout . v`; `visible` None counts every score.

    A row whose lse is +inf has no gradients. What is not visible has none, NaN or not.
    """
    options = piece.options
    scores, tanh = piece.of(head, products, options.softmax_scale, bias)
    p = jnp.exp2(scores - lse)
    if visible is not None:
        p = jnp.where(visible, p, 0.0)
    weights = p
    if options.dropout_p > 0.0:
        keep = piece.keep(head)
        weights = kept(p, keep)
        dp = kept(dp * (1.0 / (1.0 - options.dropout_p)), keep)
    ds = p * (dp - delta)
    if visible is not None:
        ds = jnp.where(visible, ds, 0.0)
    dx = ds
    if tanh is not None:
        dx = ds * (1.0 - tanh * tanh)
        dx = dx if visible is None else jnp.where(visible, dx, 0.0)
    return ScoreGradients(weights, ds, dx)


# (place, width, layout, masked): piece `place` of a block, counted in pieces of `width` keys
Attend = Callable[[Array, int, LayoutMask | None, bool], None]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of blocks of keys that one tile sees."""

    refs: Refs
    options: Options
    tile: Array

    def walk(self, first: Array, layout: LayoutMask | None, attend: Attend) -> None:
        """`attend` for the pieces of the block from key `first` on; `layout` is that block's."""
        options = self.options

        def walk_step(step: Array, _: None) -> None:
            self._walk_piece(first, layout, attend, step, options.step_k)

        if options.step_k == options.block_k:
            walk_step(jnp.int32(0), None)
        else:
            steps = self._places(first, options.block_k, options.step_k)
            lax.fori_loop(*steps, walk_step, None)

    def _places(self, first: Array, keys: int, width: int) -> tuple[Array, Array]:
        """Pieces of `width` keys, counted from key `first` on: the first one that some token sees,
        and the one behind the last.
        """
        tiles = self.refs.tiles
        start = jnp.maximum(tiles.start[self.tile] - first, 0)
        stop = jnp.minimum(tiles.stop[self.tile] - first, keys)
        return lax.div(start, jnp.int32(width)), lax.div(stop + (width - 1), jnp.int32(width))

    def _walk_piece(
        self, first: Array, layout: LayoutMask | None, attend: Attend, place: Array, width: int
    ) -> None:
        """A piece of which every row sees every key is attended to at once; of others the halves
        are looked at in the same way, and at last those of `masked_step_k` keys are masked. A bias,
        which may hide any key, masks every piece.
        """
        tiles, masked_step_k = self.refs.tiles, self.options.masked_step_k
        first_key = first + place * width
        is_full: Any = (tiles.full_start[self.tile] <= first_key) & (
            first_key + width <= tiles.full_stop[self.tile]
        )
        if layout is not None:
            is_full &= layout.bits(place, width)[1]

        def attend_edge(place: Array, _: None) -> None:
            if layout is None:
                attend(place, masked_step_k, layout, True)
            else:
                pl.when(layout.bits(place, masked_step_k)[0])(
                    lambda: attend(place, masked_step_k, layout, True)
                )

        def walk_half(place: Array, _: None) -> None:
            self._walk_piece(first, layout, attend, place, width // 2)

        def walk_parts() -> None:
            is_large = width > 2 * masked_step_k
            part = width // 2 if is_large else masked_step_k
            start, stop = self._places(first_key, width, part)
            before = place * (width // part)
            body = walk_half if is_large else attend_edge
            lax.fori_loop(before + start, before + stop, body, None)

        reads_bias = self.refs.bias_rows is not None
        if self.refs.bias is not None and not reads_bias:
            walk_parts()
        else:
            pl.when(is_full)(lambda: attend(place, width, None, reads_bias))
            pl.when(~is_full)(walk_parts)


def for_heads(sizes: Sequence[int], body: Callable[[list[Any]], None], unit: int = 0) -> None:
    """`body(heads)` for all heads, as many at a time as are computed on together; `sizes` are the
    numbers of heads and of a head's rows. With a `unit`, of which that many is a multiple, there is
    no loop.
    """
    num_heads, rows = sizes
    step = max(unit, 1)
    most = min(MOST_HEADS, max(step, MOST_ROWS // rows))
    together = max(n for n in range(step, most + 1, step) if num_heads % n == 0)

    def attend_some(i: Any, _: None) -> None:
        body([i * together + j for j in range(together)])

    if unit or num_heads == together:
        for i in range(num_heads // together):
            attend_some(i, None)
    else:
        lax.fori_loop(0, num_heads // together, attend_some, None)
