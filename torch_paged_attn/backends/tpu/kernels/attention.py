"""The attention kernel: flash attention over tiles of queries (FlashAttention-2, arXiv 2307.08691).

One grid step is one tile: a few tokens of one sequence, with all heads of the launch. The rows of a
KV head are its group's, `row = g * tile_q + token`, so that a decode step's heads share the keys
they read. Where these rows fill less than a register, several KV heads are stacked in one: their
products stay apart, the softmax is shared. Keys are loaded in blocks and computed on in steps;
those that no token of the tile sees are skipped.

A step is latency: a product, a maximum over lanes, a power, a product. Several heads pass through
these phases together, so that each works while the others wait.

Steps of which every row sees every key are not masked. In the others masked scores are replaced,
and values that no row sees are set to zero, so that their NaN are not multiplied.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from torch_paged_attn.backends.tpu.dtypes import numbers_of_word
from torch_paged_attn.backends.tpu.kernels.arguments import Options, Refs
from torch_paged_attn.backends.tpu.kernels.dropout import kept
from torch_paged_attn.backends.tpu.kernels.kv_pipeline import KvLoader, TokenBias
from torch_paged_attn.backends.tpu.kernels.layout_mask import LayoutMask
from torch_paged_attn.backends.tpu.kernels.q_out_dma import TokenRows, clear_padding, plan_tiles
from torch_paged_attn.backends.tpu.kernels.scores import Pieces, Scores, for_heads
from torch_paged_attn.backends.tpu.kernels.softmax import FLOOR, MASKED, Softmax, across, product


def attention_kernel(refs: Refs, options: Options, num_tiles: int) -> None:
    """What Pallas runs for each tile, of which the kernel cuts `num_tiles` at most."""
    core, step = pl.program_id(0), pl.program_id(1)
    num_cores = options.config.num_cores
    tile = step * num_cores + core
    loader = KvLoader(refs, options, num_tiles)
    softmax = Softmax(refs.m_i, refs.l_i, refs.acc)
    rows = TokenRows(refs, options, tile)
    attention = TileAttention(refs, loader, softmax, options, tile, rows)

    @pl.when(step == 0)
    def _() -> None:
        plan_tiles(refs, options, num_tiles)
        if options.clears_padding:
            pl.when(core == 0)(lambda: clear_padding(refs, options, FLOOR))
        attention.for_heads(softmax.reset)
        attention.hide_filling_rows()
        pl.when(tile < refs.num_tiles[0])(rows.fetch)

    @pl.when(tile < refs.num_tiles[0])
    def _() -> None:
        rows.arrange()
        following = dataclasses.replace(rows, tile=tile + num_cores)
        has_following = following.tile < refs.num_tiles[0]
        pl.when(has_following)(following.fetch)
        attention.spread_slopes()
        loader.run_tile(tile, step == 0, attention.attend_block)
        rows.begin_results(step > 0)
        if options.tile_q == 1:
            attention.for_heads(attention.finish)
        else:  # stores with strides are of whole words, at places that are known
            words = numbers_of_word(options.out_dtype)
            attention.for_heads(attention.finish, words // math.gcd(words, options.group_size))
        rows.write_results(~has_following)


@dataclasses.dataclass(frozen=True)
class TileAttention:
    """One tile against the blocks of keys that it sees."""

    refs: Refs
    loader: KvLoader
    softmax: Softmax
    options: Options
    tile: Array
    rows: TokenRows

    def for_heads(self, body: Any, unit: int = 0) -> None:
        """`body(heads)` for all heads, as many at a time as are computed on together; with a
        `unit`, of which that many is a multiple, heads are no numbers of a loop.
        """
        for_heads(self.softmax.m_i.shape[:2], body, unit)

    def hide_filling_rows(self) -> None:
        """Rows that fill up a register see no key: their bias is -inf."""
        refs = self.refs
        if refs.bias_rows is not None and self.softmax.m_i.shape[1] > self.options.group_size:
            refs.bias_rows[...] = jnp.full(refs.bias_rows.shape, -jnp.inf, jnp.float32)

    def spread_slopes(self) -> None:
        """Slopes of the tile's sequence, if it has its own, to the rows of their heads."""
        refs, options = self.refs, self.options
        if (table := refs.slope_table) is None:
            return
        num_heads, rows = self.softmax.m_i.shape[:2]
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        of_group = lax.div(lax.rem(row, jnp.int32(rows // options.fold)), jnp.int32(options.tile_q))
        first = refs.tiles.sequence[self.tile] * (num_heads * options.group_size)
        for head in range(num_heads):
            column = jnp.zeros((rows, 1), jnp.float32)
            for i in range(options.group_size):
                slope = table[first + head * options.group_size + i]
                column = jnp.where(of_group == i, slope, column)
            refs.slopes[0, head] = column

    def finish(self, heads: list[Any]) -> None:
        """Write the results of some heads, of which every key has been folded in."""
        refs, options, results = self.refs, self.options, []
        for head in heads:
            sink = None if refs.sinks is None else refs.sinks[0, head]
            out, lse = self.softmax.finish(head, sink, options.compute_dtype, options.fold)
            if refs.out_factor is not None:
                factor = self.factor(refs.out_factor, head)[: out.shape[0]]
                out = out * across(factor, out.shape[1])
            results.append((out, lse))
        outs, of_rows = zip(*results, strict=True)
        self.rows.put(heads, outs)
        self.rows.put_lse(heads, of_rows)

    def of_own_head(self, parts: Sequence[Array]) -> Array:
        """(rows, n) of as many arrays (rows, n) as KV heads are stacked: a row comes from its own
        head's array.
        """
        rows_each = self.options.group_size // self.options.stack * self.options.tile_q
        whole = parts[0]
        row = lax.broadcasted_iota(jnp.int32, whole.shape, 0)
        for i, part in enumerate(parts[1:], 1):
            whole = jnp.where(row < i * rows_each, whole, part)
        return whole

    def factor(self, factors: Any, head: Any) -> Array:
        """The KV heads' factors (rows, LANES), all lanes alike, of the tile's sequence."""
        first_head = self.options.first_kv_head + head * self.options.stack
        heads = [first_head + i for i in range(self.options.stack)]
        shape = self.softmax.m_i.shape[1:]
        num_kv_heads = self.refs.k_hbm.shape[1]
        first = self.refs.tiles.sequence[self.tile] * num_kv_heads
        values = (factors[first + head] for head in heads)
        return self.of_own_head([jnp.full(shape, value) for value in values])

    def attend_block(self, block: Array, slot: Array) -> None:
        """Fold the block of keys in buffer `slot` into the softmax."""
        refs, first = self.refs, block * self.loader.block_k
        if refs.bias_rows is not None:
            TokenBias(refs, self.options, self.tile).arrange(slot)

        def attend_heads(heads: list[Any] | None) -> None:
            """All of them, or some that have layouts of their own."""

            def attend(place: Array, width: int, layout: LayoutMask | None, masked: bool) -> None:
                self._attend(first, slot, place, width, layout, masked, heads)

            layout = None
            if refs.layout_words is not None:
                layout = LayoutMask.of_block(refs, self.options, self.tile, block, heads or [])
            Pieces(self.refs, self.options, self.tile).walk(first, layout, attend)

        if self.options.layouts_of_head:
            self.for_heads(attend_heads)
        else:
            attend_heads(None)

    def _attend(
        self,
        first: Array,
        slot: Array,
        place: Array,
        width: int,
        layout: LayoutMask | None,
        masked: bool,
        heads: list[Any] | None,
    ) -> None:
        """Fold piece `place` of a block, `width` keys, into the softmax of some or all heads."""
        refs, loader, options = self.refs, self.loader, self.options
        rows, dtype = self.softmax.m_i.shape[1], options.compute_dtype
        first_key, columns = first + place * width, width // options.fold
        piece = Scores.of_piece(refs, options, self.tile, first_key, (rows, columns))

        def stored(buffers: Any, head: Any) -> list[Array]:
            heads = (head * options.stack + i for i in range(options.stack))
            return [loader.piece_of(buffers, slot, place, width, i) for i in heads]

        def token_scales(head: Any) -> tuple[Array, Array]:
            """Of the keys and of the values of a head, or of a stack."""
            first_head = options.first_kv_head + head * options.stack
            stacked = range(options.stack)
            scales = [loader.scales_of(slot, first_head + i, place, width) for i in stacked]
            if options.stack == 1:
                return scales[0]
            spread = [[jnp.broadcast_to(x, (rows, width)) for x in of] for of in scales]
            k, v = (self.of_own_head(of) for of in zip(*spread, strict=True))
            return k, v

        def score(head: Any, keys: list[Array], bias: Array | None) -> Array:
            scale: Any = options.softmax_scale
            if refs.score_scale is not None:
                scale = across(self.factor(refs.score_scale, head) * scale, columns)
            if refs.token_scales is not None:
                scale = token_scales(head)[0] * scale
            products = self.of_own_head([product(refs.q[0, head], k, 1) for k in keys])
            return piece.of(head, products, scale, bias)[0]

        def without_unseen(stacks: list[list[Array]], seen: list[Array]) -> list[list[Array]]:
            return [
                [jnp.where(is_seen, x, jnp.zeros_like(x)) for x in stack]
                for stack, is_seen in zip(stacks, seen, strict=True)
            ]

        def attend_heads(heads: list[Any]) -> None:
            biases: list[Array | None] = [None] * len(heads)
            if refs.bias_rows is not None:
                biases = [TokenBias(refs, options, self.tile).of(x, place, width) for x in heads]
            keys = [stored(refs.k_buffers, head) for head in heads]
            if refs.v_buffers is None:
                width_v = self.softmax.acc.shape[2]
                values = [[x[:, :width_v] for x in stack] for stack in keys]
            else:
                values = [stored(refs.v_buffers, head) for head in heads]
            if masked:
                # without a bias all heads see the same
                is_sparse = layout is not None or refs.bias is not None
                masks = [
                    piece.visible(head, place, columns, layout, bias)
                    for head, bias in zip(heads, biases, strict=True)
                ]
                seen = [piece.is_seen(visible, is_sparse) for visible in masks]
                values = without_unseen(values, seen)
                if options.fold > 1:
                    # a row's zeros meet the other keys that lie beside its own
                    keys = without_unseen(keys, seen)
            scores = [score(*of_head) for of_head in zip(heads, keys, biases, strict=True)]
            if masked:
                scores = [
                    jnp.where(visible, x, MASKED) for x, visible in zip(scores, masks, strict=True)
                ]

            def weigh(i: int, p: Array) -> Array:
                if options.dropout_p > 0.0:
                    p = kept(p, piece.keep(heads[i]))
                if refs.token_scales is not None:
                    p = p * token_scales(heads[i])[1]
                    # the scale of what is not seen may be anything
                    p = jnp.where(masks[i], p, 0.0) if masked else p
                return self.of_own_head([product(p.astype(dtype), v, 0) for v in values[i]])

            self.softmax.fold(heads, scores, weigh)

        if heads is None:
            self.for_heads(attend_heads)
        else:
            attend_heads(heads)
