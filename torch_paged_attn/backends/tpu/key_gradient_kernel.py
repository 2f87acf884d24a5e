"""The kernel for the gradients of keys and values: a tile of keys stays in VMEM, and tiles of
queries pass by.

A grid step is a tile of keys of one sequence with all KV heads. The tiles of queries that see some
of these keys are neighbours in the forward's list, and arrive one after the other, in ascending
order. A piece of the tile (`masked_subblocks.py`) is computed on as (keys, rows): then both sums,
`dv += p dout` and `dk += dx q`, are products that need no transpose, and that add up the query
heads of a group, since these are rows.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.kernel_arguments import KeyGradientRefs, Options
from torch_paged_attn.backends.tpu.layout_mask import LayoutMask
from torch_paged_attn.backends.tpu.masked_subblocks import Pieces, for_heads
from torch_paged_attn.backends.tpu.ring import Ring
from torch_paged_attn.backends.tpu.score_gradients import score_gradients
from torch_paged_attn.backends.tpu.scores import Scores
from torch_paged_attn.backends.tpu.softmax import product


def key_gradient_kernel(
    *refs: Any, names: tuple[str, ...], options: Options, num_tiles: int
) -> None:
    """The body that Pallas runs for each tile of keys; `names` are those of `refs` (see
    `launch_gradients.py`)."""
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

    @property
    def num_buffers(self) -> int:
        return self.refs.q_buffers.shape[0]

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
