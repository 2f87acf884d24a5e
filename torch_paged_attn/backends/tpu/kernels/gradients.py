"""The kernels of the backward: one for the gradient of queries, one for those of keys and values.

In both a tile stays in VMEM and others pass by. Probabilities are computed anew for each piece of
keys, and `dx`, the gradient of `q . k`, times what passes is added to the sum of what stays: by one
program, in ascending order.

In the first a tile of queries stays, and blocks of keys pass by, as in the forward. The gradient of
a bias is written at the end of each block.

In the second a tile of keys of one sequence with all KV heads stays. The tiles of queries that see
some of these keys are neighbours in the forward's list. A piece (`scores.py`) is computed on as
(keys, rows): then both sums, `dv += p dout` and `dk += dx q`, are products that need no transpose,
and that add up the query heads of a group, since these are rows.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.dtypes import LANES
from torch_paged_attn.backends.tpu.kernels.arguments import Options, Refs
from torch_paged_attn.backends.tpu.kernels.kv_pipeline import KvLoader, Ring
from torch_paged_attn.backends.tpu.kernels.layout_mask import LayoutMask
from torch_paged_attn.backends.tpu.kernels.scores import Pieces, Scores, for_heads, score_gradients
from torch_paged_attn.backends.tpu.kernels.softmax import across, product


def query_gradient_kernel(refs: Refs, options: Options, num_tiles: int) -> None:
    """What Pallas runs for each tile of queries."""
    TileGradient(refs, options, KvLoader(refs, options, num_tiles), keys_stay=False).run()


def key_gradient_kernel(refs: Refs, options: Options, num_tiles: int) -> None:
    """What Pallas runs for each tile of keys."""
    TileGradient(refs, options, QueryLoader(refs, options, num_tiles), keys_stay=True).run()


@dataclasses.dataclass(frozen=True)
class TileGradient:
    """The grid step's tile against what passes by."""

    refs: Refs
    options: Options
    loader: Any
    keys_stay: bool  # else queries do

    @property
    def _tile(self) -> Array:
        return pl.program_id(1) * self.options.config.num_cores + pl.program_id(0)

    @property
    def _sums(self) -> list[tuple[Any, Any, float]]:
        """Each gradient's sum (num_kv_heads, rows, n), where it goes, and its factor."""
        refs, options = self.refs, self.options
        if not self.keys_stay:
            return [(refs.dq_acc, refs.dq, options.softmax_scale)]
        kept = 1.0 / (1.0 - options.dropout_p)
        return [(refs.dk_acc, refs.dk, options.softmax_scale), (refs.dv_acc, refs.dv, kept)]

    def run(self) -> None:
        """Compute the tile's gradients."""
        tile, sizes = self._tile, self._sums[0][0].shape[:2]
        for_heads(sizes, self._begin)
        attend = functools.partial(self._attend_block, tile)
        self.loader.run_tile(tile, pl.program_id(1) == 0, attend)
        for_heads(sizes, self._finish)

    def _begin(self, heads: list[Any]) -> None:
        """Set sums to zero; transpose the statistics of rows that stay from lanes to sublanes."""
        refs = self.refs
        for head in heads:
            for acc, _, _ in self._sums:
                acc[head] = jnp.zeros(acc.shape[1:], jnp.float32)
            if not self.keys_stay:
                for i in (head, refs.dq_acc.shape[0] + head):
                    refs.columns[i] = _as_column(refs.statistics[0, pl.ds(i, 1), :])

    def _finish(self, heads: list[Any]) -> None:
        for head in heads:
            for acc, gradient, factor in self._sums:
                gradient[0, head] = (acc[head] * factor).astype(gradient.dtype)

    def _attend_block(self, tile: Array, block: Array, slot: Array) -> None:
        """Add what the block of keys, or the tile of queries, in buffer `slot` gives."""
        refs, options, query_tile = self.refs, self.options, tile
        if self.keys_stay:
            first, query_tile = refs.key_tiles.first_key[tile], block
        else:
            first = block * options.block_k
        if refs.dbias is not None:
            refs.dbias_buffer[...] = jnp.zeros_like(refs.dbias_buffer)
        attend = functools.partial(self._attend, query_tile, first, slot)
        Pieces(refs, options, query_tile).walk(first, None, attend)
        if refs.dbias is not None:
            columns = pl.ds(pl.multiple_of(first, options.block_k), options.block_k)
            there = refs.dbias.at[tile, :, :, columns]
            copy = pltpu.make_async_copy(refs.dbias_buffer, there, refs.dbias_done)
            copy.start()
            copy.wait()

    def _attend(
        self, query_tile: Array, first: Array, slot: Array, place: Array, width: int,
        _layout: LayoutMask | None, masked: bool,
    ) -> None:  # fmt: skip
        """Add what queries and piece number `place` of a block of keys give, `width` keys. `first`:
        the block's first key; `masked`: whether some scores do not count."""
        refs, keys_stay = self.refs, self.keys_stay
        num_heads = self._sums[0][0].shape[0]
        rows = (refs.q_buffers if keys_stay else refs.q).shape[2]
        sizes = rows, width
        piece = Scores.of_piece(
            refs, self.options, query_tile, first + place * width, sizes, query_axis=int(keys_stay)
        )
        keys = pl.ds(pl.multiple_of(place * width, width), width)

        def bias_of(head: Any) -> Array | None:
            if refs.bias is None:
                return None
            head = head if refs.bias_buffers.shape[1] > 1 else 0
            return refs.bias_buffers[
                (slot, head, keys) if keys_stay else (slot, head, slice(None), keys)
            ]

        def attend_heads(heads: list[Any]) -> None:
            biases = [bias_of(head) for head in heads]
            if keys_stay:
                stays = [(refs.k[0, h, keys, :], refs.v[0, h, keys, :]) for h in heads]
                passes = [(refs.q_buffers[slot, h], refs.dout_buffers[slot, h]) for h in heads]
            else:
                stays = [(refs.q[0, h], refs.dout[0, h]) for h in heads]
                passes = [
                    tuple(
                        self.loader.piece_of(buffers, slot, place, width, head)
                        for buffers in (refs.k_buffers, refs.v_buffers)
                    )
                    for head in heads
                ]
            masks: list[Any] = [None] * len(heads)
            if masked:
                # without a bias, the masks of all heads are equal
                masks = [
                    piece.visible(head, place, width, None, bias)
                    for head, bias in zip(heads, biases, strict=True)
                ]
            if masked and not keys_stay:
                seen = [piece.is_seen(visible, refs.bias is not None) for visible in masks]
                passes = [
                    (jnp.where(x, k, jnp.zeros_like(k)), v)
                    for x, (k, v) in zip(seen, passes, strict=True)
                ]
            products, dp = (
                [product(x[i], y[i], 1) for x, y in zip(stays, passes, strict=True)] for i in (0, 1)
            )
            for i, head in enumerate(heads):
                statistics = self._statistics(slot, head, width)
                given = products[i], dp[i], *statistics, biases[i], masks[i]
                found = score_gradients(piece, head, *given)
                if refs.dbias is not None:
                    of_bias = head if refs.dbias_buffer.shape[0] > 1 else 0
                    refs.dbias_buffer[of_bias, :, keys] += found.ds
                own = keys if keys_stay else slice(None)
                weights = found.dx, found.weights  # of k or q, and of dout
                for (acc, _, _), x, y in zip(self._sums, weights, passes[i], strict=False):
                    acc[head, own, :] += product(x.astype(self.options.compute_dtype), y, 0)

        for_heads((num_heads, max(rows, width) if keys_stay else rows), attend_heads)

    def _statistics(self, slot: Array, head: Any, width: int) -> tuple[Array, ...]:
        """Base-2 lse and delta of a KV head's rows, as they broadcast to scores."""
        refs = self.refs
        both = head, self._sums[0][0].shape[0] + head
        if self.keys_stay:
            return tuple(refs.statistics_buffers[slot, pl.ds(row, 1), :] for row in both)
        return tuple(across(refs.columns[i], width) for i in both)


def _as_column(row: Array) -> Array:
    """(1, n), n a multiple of LANES, as (n, LANES) with the same number in all lanes."""
    parts = [row[:, first : first + LANES] for first in range(0, row.shape[1], LANES)]
    squares = [jnp.broadcast_to(part, (LANES, LANES)).T for part in parts]
    return squares[0] if len(squares) == 1 else jnp.concatenate(squares, axis=0)


@dataclasses.dataclass(frozen=True)
class QueryLoader(Ring):
    """Tiles of queries, of their dout and statistics, on their way through a ring of buffers."""

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
