"""The attention kernel: flash attention over tiles of queries (FlashAttention-2, arXiv 2307.08691).

One grid step is one tile: a few tokens of one sequence, with all heads. The rows of a KV head are
its group's, `row = g * tile_q + token`, so that a decode step's heads share the keys they read.
Where these rows fill less than a register, several KV heads are stacked in one: their products stay
apart, the softmax is shared. Keys are loaded in blocks and computed on in steps; those that no
token of the tile sees are skipped.

A step is latency: a product, a maximum over lanes, a power, a product. Several heads pass through
these phases together, so that each works while the others wait.

Steps of which every row sees every key are not masked. In the others masked scores are replaced,
and values that no row sees are set to zero, so that their NaN are not multiplied.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from torch_paged_attn.backends.tpu import philox
from torch_paged_attn.backends.tpu.config import LANES, MOST_HEADS, MOST_ROWS
from torch_paged_attn.backends.tpu.float16 import widen
from torch_paged_attn.backends.tpu.kernel_arguments import Options, Refs
from torch_paged_attn.backends.tpu.layout_mask import LayoutMask
from torch_paged_attn.backends.tpu.load_kv import Cursor, KvLoader
from torch_paged_attn.backends.tpu.softmax import LOG2_E, MASKED, Softmax, across, product


def attention_kernel(*refs: Any, names: tuple[str, ...], options: Options, num_tiles: int) -> None:
    """What Pallas runs for each tile; `names` are those of `refs` (see `launch.py`)."""
    named = Refs.named(names, refs)
    core, step = pl.program_id(0), pl.program_id(1)
    tile = step * options.config.num_cores + core
    loader = KvLoader(named, options, num_tiles)
    softmax = Softmax(named.m_i, named.l_i, named.acc)
    attention = TileAttention(named, loader, softmax, options, tile)
    saved = named.cursor

    @pl.when(step == 0)
    def _() -> None:
        attention.for_heads(softmax.reset)
        for i, value in enumerate(loader.fill(tile)):
            saved[i] = value

    cursor = lax.fori_loop(
        0,
        loader.turns(tile),
        attention.attend_turn,
        Cursor(*(saved[i] for i in range(len(Cursor._fields)))),
    )
    for i, value in enumerate(cursor):
        saved[i] = value
    attention.for_heads(attention.finish)


@dataclasses.dataclass(frozen=True)
class TileAttention:
    """One tile against the blocks of keys that it sees."""

    refs: Refs
    loader: KvLoader
    softmax: Softmax
    options: Options
    tile: Array

    def for_heads(self, body: Callable[[list[Any]], None]) -> None:
        """`body(heads)` for all heads, as many at a time as are computed on together."""
        num_heads, rows = self.softmax.m_i.shape[:2]
        most = min(MOST_HEADS, max(1, MOST_ROWS // rows))
        if self.options.dropout_p > 0.0:
            most = 1  # drawing numbers takes longer than any latency
        together = max(n for n in range(1, most + 1) if num_heads % n == 0)

        def attend_some(i: Any, _: None) -> None:
            body([i * together + j for j in range(together)])

        if num_heads == together:
            attend_some(0, None)
        else:
            lax.fori_loop(0, num_heads // together, attend_some, None)

    def finish(self, heads: list[Any]) -> None:
        """Write the results of some heads, of which every key has been folded in."""
        refs = self.refs
        for head in heads:
            sink = None if refs.sinks is None else refs.sinks[0, head]
            out, lse = self.softmax.finish(head, sink, self.options.compute_dtype)
            if refs.out_factor is not None:
                out = out * across(self.factor(refs.out_factor, head), out.shape[1])
            refs.out[0, head] = out.astype(refs.out.dtype)
            refs.lse[0, pl.ds(head, 1), :] = lse

    def of_own_head(self, parts: Sequence[Array]) -> Array:
        """One array (rows, n) of several, one for each stacked KV head: a row is its own head's."""
        rows_each = self.options.group_size // self.options.stack * self.options.tile_q
        whole = parts[0]
        row = lax.broadcasted_iota(jnp.int32, whole.shape, 0)
        for i, part in enumerate(parts[1:], 1):
            whole = jnp.where(row < i * rows_each, whole, part)
        return whole

    def factor(self, factors: Any, head: Any) -> Array:
        """The KV heads' factors (rows, LANES), all lanes alike, of the tile's sequence."""
        heads = [head * self.options.stack + i for i in range(self.options.stack)]
        if self.options.heads_apart > 1:
            heads = [self.loader.kv_head(self.tile)]
        shape = self.softmax.m_i.shape[1:]
        values = (factors[self.refs.tiles.sequence[self.tile], head] for head in heads)
        return self.of_own_head([jnp.full(shape, value) for value in values])

    def attend_turn(self, turn: Array, cursor: Cursor) -> Cursor:
        """Fold one block of keys into the softmax while others are loaded."""
        block = self.loader.block(self.tile, turn)
        slot, cursor = self.loader.load_next(cursor, self.tile, block)
        first = block * self.loader.block_k
        attend_step = functools.partial(self._attend_step, first, slot, turn)
        if self.options.step_k == self.loader.block_k:
            attend_step(jnp.int32(0))
        else:
            lax.fori_loop(
                *self._places(first, self.loader.block_k, self.options.step_k),
                lambda step, _: attend_step(step),
                None,
            )
        return cursor

    def _places(self, first: Array, keys: int, width: int) -> tuple[Array, Array]:
        """Pieces of `width` keys, counted from key `first` on: the first one that some token sees,
        and the one behind the last.
        """
        tiles = self.refs.tiles
        start = jnp.maximum(tiles.start[self.tile] - first, 0)
        stop = jnp.minimum(tiles.stop[self.tile] - first, keys)
        return lax.div(start, jnp.int32(width)), lax.div(stop + (width - 1), jnp.int32(width))

    def _attend_step(self, first: Array, slot: Array, turn: Array, step: Array) -> None:
        """Fold a step of the block that starts at key `first` and lies in buffer `slot`.

        A step of which every row sees every key is folded as a whole, others piece by piece.
        """
        tiles, options = self.refs.tiles, self.options
        step_k, edge_k = options.step_k, options.edge_k
        first_key = first + step * step_k
        is_full: Any = (tiles.full_start[self.tile] <= first_key) & (
            first_key + step_k <= tiles.full_stop[self.tile]
        )
        layout: LayoutMask | None = None
        if self.refs.layout is not None:
            layout = LayoutMask(self.refs.layout, options, tiles.position[self.tile], turn)
            is_full &= layout.bits(step, step_k)[1]

        def attend_edge(place: Array, _: None) -> None:
            attend = functools.partial(self._attend, first, slot, place, edge_k, layout)
            if layout is None:
                attend(masked=True)
            else:
                pl.when(layout.bits(place, edge_k)[0])(lambda: attend(masked=True))

        def attend_edges() -> None:
            start, stop = self._places(first_key, step_k, edge_k)
            before = step * (step_k // edge_k)
            lax.fori_loop(before + start, before + stop, attend_edge, None)

        if self.refs.bias is not None:
            attend_edges()
        else:
            attend = functools.partial(self._attend, first, slot, step, step_k, None)
            pl.when(is_full)(lambda: attend(masked=False))
            pl.when(~is_full)(attend_edges)

    def _attend(
        self,
        first: Array,
        slot: Array,
        place: Array,
        width: int,
        layout: LayoutMask | None,
        *,
        masked: bool,
    ) -> None:
        """Fold piece `place` of a block, `width` keys, into the softmax."""
        refs, loader, options = self.refs, self.loader, self.options
        tiles, tile_q, dtype = refs.tiles, options.tile_q, options.compute_dtype
        first_key = first + place * width
        num_pages = width // loader.page_size
        pages = pl.ds(place * num_pages, num_pages)
        shape = self.softmax.m_i.shape[1], width
        row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))

        def stored(buffers: Any, head: Any) -> list[Array]:
            heads = (head * options.stack + i for i in range(options.stack))
            return [widen(buffers[slot, pages, i].reshape(width, -1), dtype) for i in heads]

        def score(head: Any, bias: Array | None) -> Array:
            keys = stored(refs.k_buffers, head)
            scores = self.of_own_head([product(refs.q[0, head], k, 1) for k in keys])
            scale: Any = options.softmax_scale
            if refs.score_scale is not None:
                scale = across(self.factor(refs.score_scale, head) * scale, width)
            if options.softcap > 0.0:
                scores = jnp.tanh(scores * (scale / options.softcap)) * (options.softcap * LOG2_E)
            else:
                scores = scores * (scale * LOG2_E)
            if refs.slopes is not None:
                position = tiles.position[self.tile] - first_key + (row & (tile_q - 1))
                distance = jnp.abs(lane - position).astype(jnp.float32)
                scores = scores - refs.slopes[0, head] * distance
            return scores if bias is None else scores + bias

        def attend_heads(heads: list[Any]) -> None:
            biases = [
                loader.bias_of(slot, head, place, width) if refs.bias is not None else None
                for head in heads
            ]
            scores = [score(head, bias) for head, bias in zip(heads, biases, strict=True)]
            values = [stored(refs.v_buffers, head) for head in heads]
            if masked:
                # without a bias all heads see the same
                masks = [self._masks(first_key, place, layout, row, lane, bias) for bias in biases]
                scores = [
                    jnp.where(visible, x, MASKED)
                    for x, (visible, _) in zip(scores, masks, strict=True)
                ]
                values = [
                    [jnp.where(is_seen, v, jnp.zeros_like(v)) for v in stack]
                    for stack, (_, is_seen) in zip(values, masks, strict=True)
                ]

            def weigh(i: int, p: Array) -> Array:
                if options.dropout_p > 0.0:
                    p = jnp.where(self._keep(heads[i], first_key, row, lane), p, 0.0)
                return self.of_own_head([product(p.astype(dtype), v, 0) for v in values[i]])

            self.softmax.fold(heads, scores, weigh)

        self.for_heads(attend_heads)

    def _masks(
        self,
        first_key: Array,
        place: Array,
        layout: LayoutMask | None,
        row: Array,
        lane: Array,
        bias: Array | None,
    ) -> tuple[Array, Array]:
        """True for scores that count, and for keys (width, 1) that some row of the tile sees."""
        options, tiles = self.options, self.refs.tiles
        window, width, tile_q = options.window, lane.shape[1], options.tile_q
        start, stop = tiles.start[self.tile] - first_key, tiles.stop[self.tile] - first_key
        position = tiles.position[self.tile] - first_key
        if tile_q > 1:
            position += row & (tile_q - 1)
        key = lax.broadcasted_iota(jnp.int32, (width, 1), 0)
        is_seen = (key >= start) & (key < stop)
        if tile_q > 1 and window.right == 0:
            visible = lane <= position  # no query stands behind the last key
        else:
            visible = lane < stop
            if tile_q > 1 and window.right > 0:
                visible &= lane <= position + window.right
        if window.left >= 0:
            visible &= lane >= position - window.left
        if layout is not None:
            visible &= layout.sees(row & (tile_q - 1), place * width + lane)
        if bias is not None:
            visible &= bias != -jnp.inf
        if layout is not None or bias is not None:
            visible &= (row & (tile_q - 1)) < tiles.num_tokens[self.tile]
            is_seen &= _as_column(jnp.any(visible, axis=0, keepdims=True))
        return visible, is_seen

    def _keep(self, head: Any, first_key: Array, row: Array, lane: Array) -> Array:
        """True for the probabilities that dropout keeps."""
        tile_q, rng, tiles = self.options.tile_q, self.refs.rng, self.refs.tiles
        query = tiles.first_query[self.tile] + (row & (tile_q - 1))
        head = head * self.options.group_size + lax.shift_right_logical(
            row, tile_q.bit_length() - 1
        )
        head = (tiles.sequence[self.tile] << 16) | head
        column, query, head = (x.astype(jnp.uint32) for x in (first_key + lane, query, head))
        seed_low, seed_high, offset = (rng[i].astype(jnp.uint32) for i in range(3))
        draws = philox.draw(column, query, head, (seed_low, seed_high), offset)
        return draws >= jnp.uint32(int(self.options.dropout_p * 2.0**32))


def _as_column(row: Array) -> Array:
    """Bools (1, n) as (n, 1): a diagonal of each 128."""
    parts = []
    for first in range(0, row.shape[1], LANES):
        part = jnp.broadcast_to(row[:, first : first + LANES], (LANES, LANES))
        i, j = (lax.broadcasted_iota(jnp.int32, part.shape, axis) for axis in (0, 1))
        parts.append(jnp.sum(jnp.where(part & (i == j), 1.0, 0.0), axis=1, keepdims=True))
    return jnp.concatenate(parts, axis=0) > 0.0
