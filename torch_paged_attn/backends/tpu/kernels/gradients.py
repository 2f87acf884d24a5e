"""The kernels of the backward: one for the gradient of queries, one for those of keys and values.

In the first a tile of queries stays in VMEM, and blocks of keys pass by, as in the forward. For
each piece of keys that it sees, probabilities are computed anew, and `dq += dx k`: a query's sum is
added up over its keys in ascending order. The gradient of a bias is written at the end of each
block.

In the second a tile of keys of one sequence with all KV heads stays. The tiles of queries that see
some of these keys are neighbours in the forward's list, and arrive one after the other, in
ascending order. A piece of the tile (`scores.py`) is computed on as (keys, rows): then both sums,
`dv += p dout` and `dk += dx q`, are products that need no transpose, and that add up the query
heads of a group, since these are rows.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.dtypes import LANES
from torch_paged_attn.backends.tpu.kernels.arguments import (
    KeyGradientRefs,
    Options,
    QueryGradientRefs,
)
from torch_paged_attn.backends.tpu.kernels.kv_pipeline import KvLoader, Ring
from torch_paged_attn.backends.tpu.kernels.layout_mask import LayoutMask
from torch_paged_attn.backends.tpu.kernels.scores import Pieces, Scores, for_heads, score_gradients
from torch_paged_attn.backends.tpu.kernels.softmax import across, product


def query_gradient_kernel(
    *refs: Any, names: tuple[str, ...], options: Options, num_tiles: int
) -> None:
    """The body that Pallas runs for each tile; `names` are those of `refs` (see
    `attention_gradients.py`)."""
    named = QueryGradientRefs.named(names, refs)
    core, step = pl.program_id(0), pl.program_id(1)
    tile = step * options.config.num_cores + core
    loader = KvLoader(named, options, num_tiles)
    gradient = QueryGradient(named, loader, options, tile)
    sizes = named.dq_acc.shape[:2]
    for_heads(sizes, gradient.begin)
    loader.run_tile(named.cursor, tile, step == 0, gradient.attend_block)
    for_heads(sizes, gradient.finish)


@dataclasses.dataclass(frozen=True)
class QueryGradient:
    """One tile of queries against the blocks of keys that it sees."""

    refs: QueryGradientRefs
    loader: KvLoader
    options: Options
    tile: Array

    def begin(self, heads: list[Any]) -> None:
        """Set sums to zero, and transpose the rows' statistics from lanes to sublanes."""
        refs = self.refs
        num_heads = refs.dq_acc.shape[0]
        for head in heads:
            refs.dq_acc[head] = jnp.zeros(refs.dq_acc.shape[1:], jnp.float32)
            for i in (head, num_heads + head):
                refs.columns[i] = _as_column(refs.statistics[0, pl.ds(i, 1), :])

    def finish(self, heads: list[Any]) -> None:
        """Write the gradients of some heads."""
        refs = self.refs
        for head in heads:
            dq = refs.dq_acc[head] * self.options.softmax_scale
            refs.dq[0, head] = dq.astype(refs.dq.dtype)

    def attend_block(self, block: Array, slot: Array, turn: Array) -> None:
        """Add what the block of keys in buffer `slot` gives; it is number `turn` of those that the
        tile visits."""
        first = block * self.loader.block_k

        def attend(place: Array, width: int, _layout: LayoutMask | None, masked: bool) -> None:
            self._attend(first, slot, place, width, masked)

        walk = functools.partial(Pieces(self.refs, self.options, self.tile).walk, first, None)
        refs = self.refs
        if refs.dbias is None:
            walk(attend)
            return
        refs.dbias_buffer[...] = jnp.zeros_like(refs.dbias_buffer)
        walk(attend)
        columns = pl.ds(pl.multiple_of(first, self.options.block_k), self.options.block_k)
        copy = pltpu.make_async_copy(
            refs.dbias_buffer, refs.dbias.at[self.tile, :, :, columns], refs.dbias_done
        )
        copy.start()
        copy.wait()

    def _attend(self, first: Array, slot: Array, place: Array, width: int, masked: bool) -> None:
        """Add what piece number `place` of a block gives, of `width` keys. `first`: the block's
        first key; `masked`: whether some scores do not count."""
        refs, loader, options = self.refs, self.loader, self.options
        num_heads, rows = refs.dq_acc.shape[:2]
        piece = Scores.of_piece(refs, options, self.tile, first + place * width, (rows, width))

        def attend_heads(heads: list[Any]) -> None:
            biases = [
                loader.bias_of(slot, head, place, width) if refs.bias is not None else None
                for head in heads
            ]
            keys, values = (
                [loader.piece_of(buffers, slot, place, width, head) for head in heads]
                for buffers in (refs.k_buffers, refs.v_buffers)
            )
            masks: list[Any] = [None] * len(heads)
            if masked:
                # without a bias, the masks of all heads are equal
                masks = [
                    piece.visible(head, place, width, None, bias)
                    for head, bias in zip(heads, biases, strict=True)
                ]
                seen = [piece.is_seen(visible, refs.bias is not None) for visible in masks]
                keys = [jnp.where(x, k, jnp.zeros_like(k)) for x, k in zip(seen, keys, strict=True)]
            products = [product(refs.q[0, h], k, 1) for h, k in zip(heads, keys, strict=True)]
            dp = [product(refs.dout[0, h], v, 1) for h, v in zip(heads, values, strict=True)]
            for i, head in enumerate(heads):
                lse = across(refs.columns[head], width)
                delta = across(refs.columns[num_heads + head], width)
                found = score_gradients(
                    piece, head, products[i], dp[i], lse, delta, biases[i], masks[i]
                )
                if refs.dbias is not None:
                    of_bias = head if refs.dbias_buffer.shape[0] > 1 else 0
                    columns = pl.ds(pl.multiple_of(place * width, width), width)
                    refs.dbias_buffer[of_bias, :, columns] += found.ds
                dx = found.dx.astype(options.compute_dtype)
                refs.dq_acc[head] += product(dx, keys[i], 0)

        for_heads((num_heads, rows), attend_heads)


def _as_column(row: Array) -> Array:
    """(1, n), n a multiple of LANES, as (n, LANES) with the same number in all lanes."""
    parts = [row[:, first : first + LANES] for first in range(0, row.shape[1], LANES)]
    squares = [jnp.broadcast_to(part, (LANES, LANES)).T for part in parts]
    return squares[0] if len(squares) == 1 else jnp.concatenate(squares, axis=0)


def key_gradient_kernel(
    *refs: Any, names: tuple[str, ...], options: Options, num_tiles: int
) -> None:
    """The body that Pallas runs for each tile of keys; `names` are those of `refs` (see
    `attention_gradients.py`)."""
    named = KeyGradientRefs.named(names, refs)
    core, step = pl.program_id(0), pl.program_id(1)
    tile = step * options.config.num_cores + core
    loader = QueryLoader(named, options, num_tiles)
    gradient = KeyGradient(named, loader, options, tile)
    sizes = named.dk_acc.shape[:2]
    for_heads(sizes, gradient.begin)
    loader.run_tile(named.cursor, tile, step == 0, gradient.attend_tile)
    for_heads(sizes, gradient.finish)


@dataclasses.dataclass(frozen=True)
class QueryLoader(Ring):
    """Tiles of queries, of their dout and statistics, on their way through a ring of buffers."""

    refs: KeyGradientRefs

    @property
    def next_nonempty(self) -> Any:
        return self.refs.key_tiles.next_nonempty

    def turns(self, tile: Array) -> Array:
        """How many tiles of queries see some key of the tile."""
        return self.refs.key_tiles.num_visits[tile]

    def block(self, tile: Array, turn: Array) -> Array:
        """The tile of queries at this turn."""
        return self.refs.key_tiles.first_tile[tile] + turn

    def _copies(self, tile: Array, block: Array, slot: Array) -> list[Any]:
        refs = self.refs
        pairs = [
            (refs.q_hbm.at[block], refs.q_buffers),
            (refs.dout_hbm.at[block], refs.dout_buffers),
            (refs.statistics_hbm.at[block], refs.statistics_buffers),
        ]
        if refs.bias is not None:
            block_k = self.options.block_k
            first = pl.multiple_of(refs.key_tiles.first_key[tile], block_k)
            heads = pl.ds(0, refs.bias.shape[1])
            pairs.append((refs.bias.at[block, heads, pl.ds(first, block_k), :], refs.bias_buffers))
        return [
            pltpu.make_async_copy(source, buffers.at[slot], refs.semaphores.at[i, slot])
            for i, (source, buffers) in enumerate(pairs)
        ]

    def _start(self, tile: Array, block: Array, slot: Array) -> None:
        for copy in self._copies(tile, block, slot):
            copy.start()

    def _wait(self, tile: Array, block: Array, slot: Array) -> None:
        for copy in self._copies(tile, block, slot):
            copy.wait()


@dataclasses.dataclass(frozen=True)
class KeyGradient:
    """One tile of keys against the tiles of queries that see it."""

    refs: KeyGradientRefs
    loader: QueryLoader
    options: Options
    tile: Array

    def begin(self, heads: list[Any]) -> None:
        """Set sums to zero."""
        for head in heads:
            for acc in (self.refs.dk_acc, self.refs.dv_acc):
                acc[head] = jnp.zeros(acc.shape[1:], jnp.float32)

    def finish(self, heads: list[Any]) -> None:
        """Write the gradients of some heads."""
        refs, options = self.refs, self.options
        for head in heads:
            dk, dv = refs.dk_acc[head] * options.softmax_scale, refs.dv_acc[head]
            if options.dropout_p > 0.0:
                dv = dv * (1.0 / (1.0 - options.dropout_p))
            refs.dk[0, head], refs.dv[0, head] = dk.astype(refs.dk.dtype), dv.astype(refs.dv.dtype)

    def attend_tile(self, query_tile: Array, slot: Array, turn: Array) -> None:
        """Add what the tile of queries in buffer `slot` gives; it is number `turn` of those that
        the tile of keys visits."""
        first = self.refs.key_tiles.first_key[self.tile]

        def attend(place: Array, width: int, _layout: LayoutMask | None, masked: bool) -> None:
            self._attend(query_tile, slot, first, place, width, masked)

        Pieces(self.refs, self.options, query_tile).walk(first, None, attend)

    def _attend(
        self,
        query_tile: Array,
        slot: Array,
        first: Array,
        place: Array,
        width: int,
        masked: bool,
    ) -> None:
        """Add what the tile of queries gives to piece number `place` of the tile of keys, of
        `width` keys. `first`: the tile's first key; `masked`: whether some scores do not count."""
        refs, options = self.refs, self.options
        num_heads, rows = refs.dk_acc.shape[0], refs.q_buffers.shape[2]
        piece = Scores.of_piece(
            refs, options, query_tile, first + place * width, (rows, width), query_axis=1
        )
        keys = pl.ds(pl.multiple_of(place * width, width), width)

        def bias_of(head: Any) -> Array | None:
            if refs.bias is None:
                return None
            return refs.bias_buffers[slot, head if refs.bias_buffers.shape[1] > 1 else 0, keys, :]

        def attend_heads(heads: list[Any]) -> None:
            biases = [bias_of(head) for head in heads]
            masks: list[Any] = [None] * len(heads)
            if masked:
                # without a bias, the masks of all heads are equal
                masks = [
                    piece.visible(head, place, width, None, bias)
                    for head, bias in zip(heads, biases, strict=True)
                ]
            q, dout = (
                [x[slot, head] for head in heads] for x in (refs.q_buffers, refs.dout_buffers)
            )
            products = [product(refs.k[0, h, keys, :], x, 1) for h, x in zip(heads, q, strict=True)]
            dp = [product(refs.v[0, h, keys, :], x, 1) for h, x in zip(heads, dout, strict=True)]
            for i, head in enumerate(heads):
                lse, delta = (
                    refs.statistics_buffers[slot, pl.ds(row, 1), :]
                    for row in (head, num_heads + head)
                )
                found = score_gradients(
                    piece, head, products[i], dp[i], lse, delta, biases[i], masks[i]
                )
                weights, dx = (x.astype(options.compute_dtype) for x in (found.weights, found.dx))
                refs.dv_acc[head, keys, :] += product(weights, dout[i], 0)
                refs.dk_acc[head, keys, :] += product(dx, q[i], 0)

        for_heads((num_heads, max(rows, width)), attend_heads)
