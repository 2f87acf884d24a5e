"""The attention kernel: flash attention over tiles of queries (FlashAttention-2, arXiv 2307.08691).

One grid step is one tile: a few tokens of one sequence, with all heads. The rows of a KV head are
its group's, `row = g * tile_q + token`, so that a decode step's heads share the keys they read.
Keys arrive in blocks and are computed on in steps, of which those that nobody sees are skipped.

Steps of which every row sees every key are not masked. In the others masked scores are replaced,
and values that nobody sees are zero: no NaN of a key that nobody sees is ever multiplied.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from torch_paged_attn.backends.tpu import philox
from torch_paged_attn.backends.tpu.float16 import widen
from torch_paged_attn.backends.tpu.key_stream import Cursor, KeyStream
from torch_paged_attn.backends.tpu.layout_mask import LayoutMask
from torch_paged_attn.backends.tpu.softmax import LANES, LOG2_E, MASKED, Softmax, product
from torch_paged_attn.backends.tpu.tiles import Tiles, Window

# rows from which a loop over heads is as fast as its unrolled code
LONG_TILE = 64


@dataclasses.dataclass(frozen=True)
class Statics:
    """What a kernel is compiled for, besides shapes."""

    tile_q: int
    group_size: int
    block_k: int
    step_k: int
    num_buffers: int
    num_cores: int
    vmem_bytes: int
    softmax_scale: float
    softcap: float
    window: Window
    dropout_p: float
    # with a layout: 1, or how many heads have a layout of their own and so tiles of their own
    heads_apart: int
    block_sizes: tuple[int, int]
    compute_dtype: Any
    out_dtype: Any
    interpret: Any


def attention_kernel(*refs: Any, names: tuple[str, ...], statics: Statics, num_tiles: int) -> None:
    """What Pallas runs for each tile; `names` are those of `refs` (see `launch.py`)."""
    ref = dict(zip(names, refs, strict=True))
    core, step = pl.program_id(0), pl.program_id(1)
    tile = step * statics.num_cores + core
    tiles = Tiles(*(ref[name] for name in Tiles._fields))
    stream = KeyStream.of(ref, tiles, num_tiles, statics)
    softmax = Softmax(ref["m_i"], ref["l_i"], ref["acc"])
    saved = ref["cursor"]

    attention = TileAttention(ref, stream, softmax, statics, tile)

    @pl.when(step == 0)
    def _() -> None:
        attention.for_heads(softmax.reset)
        for i, value in enumerate(stream.open(tile)):
            saved[i] = value

    cursor = lax.fori_loop(
        0,
        stream.turns(tile),
        attention.attend_turn,
        Cursor(*(saved[i] for i in range(len(Cursor._fields)))),
    )
    for i, value in enumerate(cursor):
        saved[i] = value

    def finish(head: Any) -> None:
        sink = ref["sinks"][0, head] if "sinks" in ref else None
        out, lse = softmax.finish(head, sink, statics.compute_dtype)
        if "out_factor" in ref:
            out = out * ref["out_factor"][tiles.sequence[tile], attention.kv_head(head)]
        ref["out"][0, head] = out.astype(ref["out"].dtype)
        ref["lse"][0, pl.ds(head, 1), :] = lse

    attention.for_heads(finish)


@dataclasses.dataclass(frozen=True)
class TileAttention:
    """One tile against the blocks of keys that it sees."""

    ref: dict[str, Any]
    stream: KeyStream
    softmax: Softmax
    statics: Statics
    tile: Array

    def for_heads(self, body: Callable[[Any], None]) -> None:
        """Unrolled where a head is little work: the next head's products then hide its latency."""
        heads, rows = self.softmax.m_i.shape[:2]
        if rows < LONG_TILE:
            for head in range(heads):
                body(head)
        else:
            lax.fori_loop(0, heads, lambda head, _: body(head), None)

    def kv_head(self, head: Any) -> Any:
        """Which of all KV heads this one of the tile is."""
        return head if self.statics.heads_apart == 1 else self.stream.kv_head(self.tile)

    def attend_turn(self, turn: Array, cursor: Cursor) -> Cursor:
        """Fold one block of keys into the softmax, and have another one fetched."""
        tiles, step_k, block_k = self.stream.tiles, self.statics.step_k, self.stream.block_k
        block = self.stream.block(self.tile, turn)
        slot, cursor = self.stream.next(cursor, self.tile, block)
        first = block * block_k
        if step_k == block_k:
            self.attend_step(first, slot, turn, jnp.int32(0))
            return cursor
        start = jnp.maximum(tiles.start[self.tile] - first, 0)
        stop = jnp.minimum(tiles.stop[self.tile] - first, block_k)
        lax.fori_loop(
            lax.div(start, jnp.int32(step_k)),
            lax.div(stop + (step_k - 1), jnp.int32(step_k)),
            lambda step, _: self.attend_step(first, slot, turn, step),
            None,
        )
        return cursor

    def attend_step(self, first: Array, slot: Array, turn: Array, step: Array) -> None:
        """Fold `step_k` keys of the block that starts at key `first` and lies in buffer `slot`."""
        tiles, step_k = self.stream.tiles, self.statics.step_k
        first_key = first + step * step_k
        is_full = (tiles.full_start[self.tile] <= first_key) & (
            first_key + step_k <= tiles.full_stop[self.tile]
        )
        attend = functools.partial(self._attend, first_key, slot, step)
        layout: LayoutMask | None = None
        is_listed: Any = True
        if "layout" in self.ref:
            layout = LayoutMask(self.ref["layout"], self.statics, tiles.position[self.tile], turn)
            is_listed, is_covered = layout.step_bits(step)
            is_full &= is_covered
        if "bias" in self.ref:
            is_full = jnp.bool_(False)
        pl.when(is_listed & ~is_full)(lambda: attend(layout, masked=True))
        if "bias" not in self.ref:
            pl.when(is_listed & is_full)(lambda: attend(None, masked=False))

    def _attend(
        self, first_key: Array, slot: Array, step: Array, layout: LayoutMask | None, *, masked: bool
    ) -> None:
        ref, stream, statics = self.ref, self.stream, self.statics
        tiles, tile_q, step_k = stream.tiles, statics.tile_q, statics.step_k
        dtype = statics.compute_dtype
        num_pages = step_k // stream.page_size
        pages = pl.ds(step * num_pages, num_pages)
        num_rows = self.softmax.m_i.shape[1]
        # computed for each head again: where it matters, the vector units wait for the products
        masks = functools.partial(self._masks, first_key, step, layout)

        def attend_head(head: Any) -> None:
            row, lane = (lax.broadcasted_iota(jnp.int32, (num_rows, step_k), i) for i in (0, 1))
            k = widen(stream.k_buffers[slot, pages, head].reshape(step_k, -1), dtype)
            v = widen(stream.v_buffers[slot, pages, head].reshape(step_k, -1), dtype)
            scale = statics.softmax_scale
            if "score_scale" in ref:
                scale = scale * ref["score_scale"][tiles.sequence[self.tile], self.kv_head(head)]
            scores = product(ref["q"][0, head], k, 1)
            if statics.softcap > 0.0:
                scores = jnp.tanh(scores * (scale / statics.softcap)) * (statics.softcap * LOG2_E)
            else:
                scores = scores * (scale * LOG2_E)
            if "slopes" in ref:
                position = tiles.position[self.tile] - first_key + (row & (tile_q - 1))
                distance = jnp.abs(lane - position).astype(jnp.float32)
                scores = scores - ref["slopes"][0, head] * distance
            bias = stream.bias_of(slot, head, step, step_k) if "bias" in ref else None
            if bias is not None:
                scores = scores + bias * LOG2_E
            if masked:
                visible, is_seen = masks(row, lane, bias)
                scores = jnp.where(visible, scores, MASKED)
                v = jnp.where(is_seen, v, jnp.zeros_like(v))
            keep = self._keep(head, first_key, row, lane) if statics.dropout_p > 0.0 else None
            self.softmax.fold(head, scores, v, dtype, keep)

        self.for_heads(attend_head)

    def _masks(
        self,
        first_key: Array,
        step: Array,
        layout: LayoutMask | None,
        row: Array,
        lane: Array,
        bias: Array | None,
    ) -> tuple[Array, Array]:
        """Which scores count, and of which keys the values do (step_k, 1)."""
        statics, tiles = self.statics, self.stream.tiles
        window, step_k, tile_q = statics.window, statics.step_k, statics.tile_q
        position = tiles.position[self.tile] - first_key
        start, stop = tiles.start[self.tile] - first_key, tiles.stop[self.tile] - first_key
        # how far a key lies behind its row's token, but for the position of the tile
        offset = lane if tile_q == 1 else lane - (row & (tile_q - 1))
        key = lax.broadcasted_iota(jnp.int32, (step_k, 1), 0)
        is_seen = (key >= start) & (key < stop)
        if tile_q > 1 and window.right == 0:
            visible = offset <= position  # no query stands behind the last key
        else:
            visible = lane < stop
            if tile_q > 1 and window.right > 0:
                visible &= offset <= position + window.right
        if window.left >= 0:
            visible &= offset >= position - window.left
        if layout is not None:
            visible &= layout.sees(row & (tile_q - 1), step * step_k + lane)
        if bias is not None:
            visible &= bias > -jnp.inf
        if layout is not None or bias is not None:
            visible &= (row & (tile_q - 1)) < tiles.num_tokens[self.tile]
            is_seen &= _as_column(jnp.any(visible, axis=0, keepdims=True))
        return visible, is_seen

    def _keep(self, head: Any, first_key: Array, row: Array, lane: Array) -> Array:
        """Which probabilities survive dropout."""
        tile_q, rng, tiles = self.statics.tile_q, self.ref["rng"], self.stream.tiles
        query = tiles.first_query[self.tile] + (row & (tile_q - 1))
        head = head * self.statics.group_size + lax.shift_right_logical(
            row, tile_q.bit_length() - 1
        )
        head = (tiles.sequence[self.tile] << 16) | head
        column, query, head = (x.astype(jnp.uint32) for x in (first_key + lane, query, head))
        seed_low, seed_high, offset = (rng[i].astype(jnp.uint32) for i in range(3))
        draws = philox.draw(column, query, head, (seed_low, seed_high), offset)
        return draws >= jnp.uint32(int(self.statics.dropout_p * 2.0**32))


def _as_column(row: Array) -> Array:
    """Bools (1, n) as (n, 1): a diagonal of each 128."""
    parts = []
    for first in range(0, row.shape[1], LANES):
        part = jnp.broadcast_to(row[:, first : first + LANES], (LANES, LANES))
        i, j = (lax.broadcasted_iota(jnp.int32, part.shape, axis) for axis in (0, 1))
        parts.append(jnp.sum(jnp.where(part & (i == j), 1.0, 0.0), axis=1, keepdims=True))
    return jnp.concatenate(parts, axis=0) > 0.0
