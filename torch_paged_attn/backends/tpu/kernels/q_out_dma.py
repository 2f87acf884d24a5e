"""Queries are read, and results written, where they lie: `(total_q, num_heads, n)`, a DMA a tile.

The kernel works out its tiles by itself, on the scalar core, so that XLA has nothing to do before
it. A DMA brings a tile's tokens, all heads of each; what a KV head computes on is picked out of
them by loads with strides. These want rows of 128 numbers: wider heads arrive in parts. They load
words of 32 bits: of numbers of 16 bits, two heads at a time, which are taken apart.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.dtypes import LANES, SUBLANES, halves_of_words, numbers_of_word
from torch_paged_attn.backends.tpu.kernels.arguments import Options, Refs
from torch_paged_attn.backends.tpu.kernels.layout_mask import list_blocks
from torch_paged_attn.backends.tpu.tiles import bounds_of


def _lanes(parts: int) -> list[tuple[int, Any]]:
    """Parts of 128 numbers, as loads with strides take them."""
    return [(i, pl.ds(i * LANES, LANES)) for i in range(parts)]


def _filled(x: Array) -> Array:
    """A head's numbers (rows, n), and zeros in the lanes that they do not fill."""
    if (left := LANES - x.shape[1]) == 0:
        return x
    return jnp.concatenate([x, jnp.zeros((x.shape[0], left), x.dtype)], axis=1)


def plan_tiles(refs: Refs, options: Options, num_tiles: int) -> None:
    """Write `refs.tiles`, and how many there are, of the sequences that the launch is for."""
    tiles, tile_q, num_cores = refs.tiles, options.tile_q, options.config.num_cores

    def cut(b: Array, count: Array) -> Array:
        length = refs.cu_seqlens[b + 1] - refs.cu_seqlens[b]
        key_len = refs.key_lens[b]
        past = key_len - length
        is_chosen = (length >= options.least_queries) & (length <= options.most_queries)

        def write(rank: Array, count: Array) -> Array:
            first = rank * tile_q
            own = bounds_of(options.window, first, tile_q, length, key_len)
            for name, x in (own | {"sequence": b, "first_query": first}).items():
                getattr(tiles, name)[count] = x
            if refs.layout_words is not None:
                list_blocks(refs, options, count)
            return count + 1

        of_sequence = lax.div(length + (tile_q - 1), jnp.int32(tile_q))
        of_sequence = jnp.where(is_chosen, of_sequence, 0)
        if refs.layout_words is not None:

            def first_tile(row: int | None, otherwise: Any) -> Any:
                """The first tile that begins in this row of the layout, or behind it."""
                if row is None:
                    return otherwise
                tokens = row * options.block_sizes[0] - past + (tile_q - 1)
                return jnp.clip(tokens >> (tile_q.bit_length() - 1), 0, of_sequence)

            begin, end = map(first_tile, options.layout_rows, (0, of_sequence))
            return lax.fori_loop(begin, end, write, count)
        # the first one without a branch: the next tile is written over what is none
        write(jnp.int32(0), count)
        return lax.fori_loop(1, of_sequence, write, count + jnp.minimum(of_sequence, 1))

    batch = refs.cu_seqlens.shape[0] - 1
    count = lax.fori_loop(0, batch, cut, jnp.int32(0))
    refs.num_tiles[0] = count

    # a loader that is done asks for what is behind the last tile that there may be
    def end(i: Array, _: None) -> None:
        tiles.next_nonempty[i] = jnp.int32(num_tiles)

    lax.fori_loop(count, num_tiles + num_cores, end, None)

    def find_busy(i: Array, _: None) -> None:
        tile = count - 1 - i
        is_busy = tiles.start[tile] < tiles.stop[tile]
        if refs.layout_words is not None:
            is_busy = refs.num_visits[tile] > 0
        tiles.next_nonempty[tile] = jnp.where(is_busy, tile, tiles.next_nonempty[tile + num_cores])

    lax.fori_loop(0, count, find_busy, None)


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """The tokens of one launch's tiles on their way between HBM and the rows of KV heads."""

    refs: Refs
    options: Options
    tile: Array

    @property
    def _first_token(self) -> Array:
        tiles = self.refs.tiles
        return self.refs.cu_seqlens[tiles.sequence[self.tile]] + tiles.first_query[self.tile]

    def _copies(self, kind: str, first: Any, at: Array, count: Any) -> list[Any]:
        """Copies between tokens here from `first` on and `count` tokens from `at` on in HBM: of
        queries, or of results.
        """
        refs, is_query = self.refs, kind == "queries"
        here, there = pl.ds(first, count), pl.ds(at, count)
        tokens, hbm = (refs.q_tokens, refs.q_hbm) if is_query else (refs.out_tokens, refs.out_hbm)
        parts = [(tokens.at[here], hbm.at[there])]
        if self.options.tile_q > 1:  # 128 numbers of each head at a time
            lanes = _lanes(tokens.shape[0])
            parts = [(tokens.at[i, here], hbm.at[there, :, lane]) for i, lane in lanes]
        done, out_done, lse_done = (refs.token_semaphores.at[i] for i in range(3))
        if is_query:
            return [pltpu.make_async_copy(hbm, x, done) for x, hbm in parts]
        copies = [pltpu.make_async_copy(x, hbm, out_done) for x, hbm in parts]
        lse = refs.lse_tokens.at[here], refs.lse_hbm.at[there]
        return [*copies, pltpu.make_async_copy(*lse, lse_done)]

    def _move(self, kind: str, do: str) -> None:
        """Start this tile's copies, or wait for them."""
        self.move(kind, self._first_token, self.refs.tiles.num_tokens[self.tile], do)

    def move(self, kind: str, at: Array, count: Array, do: str) -> None:
        """Start copies of `count` tokens from `at` on, or wait for them."""

        def move_some(first: Any, count: Any) -> None:
            for copy in self._copies(kind, first, at + first, count):
                getattr(copy, do)()

        if self.options.interpret is True:  # which knows no size that is not a number
            lax.fori_loop(0, count, lambda i, _: move_some(i, 1), None)
        else:
            move_some(0, count)

    def fetch(self) -> None:
        """Start the copy of the tile's queries."""
        self._move("queries", "start")

    def arrange(self) -> None:
        """Wait for the tile's queries, and lay them out as rows of KV heads."""
        self._move("queries", "wait")
        refs, options = self.refs, self.options
        if options.tile_q == 1:
            _, _, count, width = refs.q_tokens.shape
            each = refs.q.shape[2] // options.fold
            if (count, width) != refs.q.shape[2:]:
                refs.q[0] = jnp.zeros_like(refs.q[0])
            size = options.group_size if each > options.group_size else count
            for i in range(count // size):  # copies of the queries begin at whole registers
                tokens = refs.q_tokens[0, :, i * size : (i + 1) * size]
                refs.q[0, :, i * each : i * each + size, :width] = tokens.astype(refs.q.dtype)
            return

        for part, lanes in _lanes(refs.q_tokens.shape[0]):
            tokens = refs.q_tokens.at[part]
            for word in self._words(tokens):
                for i, x in enumerate(self._load(tokens, word)):
                    head, rows = self._rows_of(tokens, word, i)
                    refs.q[0, head, rows, lanes] = x.astype(refs.q.dtype)

    def _words(self, tokens: Any) -> range:
        """The words of a token: query heads, or pairs of them. Strides want to begin at numbers."""
        return range(tokens.shape[1] // numbers_of_word(tokens.dtype))

    def _rows_of(self, tokens: Any, word: int, i: int) -> tuple[int, slice]:
        """The KV head of a word's i-th query head, and this one's rows there."""
        per_head = tokens.shape[1] // self.refs.q.shape[1]
        head, of_group = divmod(word * numbers_of_word(tokens.dtype) + i, per_head)
        tile_q = self.options.tile_q
        return head, slice(of_group * tile_q, (of_group + 1) * tile_q)

    def _strided(self, tokens: Any, word: int) -> tuple[Any, Any]:
        """Tokens as rows of words of 32 bits, and the index of one word's rows."""
        tile_q, num_heads, width = tokens.shape
        num_words = num_heads // numbers_of_word(tokens.dtype)
        if num_words < num_heads:
            tokens = tokens.bitcast(jnp.int32)
        if num_words % SUBLANES and num_words not in (1, 2, 4):  # a token's end fills no register
            return tokens, (slice(None), word)
        rows = pl.ds(word, tile_q, stride=num_words), slice(None)
        return tokens.reshape(tile_q * num_words, width), rows

    def _load(self, tokens: Any, word: int) -> list[Array]:
        """The rows (tile_q, n) of a word's heads."""
        count = numbers_of_word(tokens.dtype)
        if self.options.interpret:  # which knows no refs of another shape or type
            return [tokens[:, word * count + i] for i in range(count)]
        rows, which = self._strided(tokens, word)
        x = rows[which]
        if count == 1:
            return [x]
        return [half.astype(tokens.dtype) for half in halves_of_words(x)]

    def _store(self, tokens: Any, word: int, heads: list[Array]) -> None:
        """Write what `_load` reads."""
        count = numbers_of_word(tokens.dtype)
        if self.options.interpret:
            for i, x in enumerate(heads):
                tokens[:, word * count + i] = x
            return
        rows, which = self._strided(tokens, word)
        if count == 1:
            [rows[which]] = heads
            return
        lower, upper = (lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) for x in heads)
        rows[which] = lax.shift_right_logical(lower, 16) | upper

    def begin_results(self, has_earlier: Array) -> None:
        """Wait for the results of the core's tile before this one, whose memory is needed."""

        @pl.when(has_earlier)
        def _() -> None:
            before = dataclasses.replace(self, tile=self.tile - self.options.config.num_cores)
            before.wait_for_results()

        if self.options.tile_q == 1:  # whose rows are summed up
            self.refs.lse_rows[...] = jnp.zeros_like(self.refs.lse_rows)

    def put(self, heads: list[Any], outs: Sequence[Array]) -> None:
        """The outputs (rows, n) of neighbouring KV heads, which have whole words of a token."""
        tokens, options = self.refs.out_tokens, self.options
        tile_q, group_size = options.tile_q, options.group_size
        outs = [out.astype(tokens.dtype) for out in outs]
        if tile_q == 1:
            for head, out in zip(heads, outs, strict=True):
                tokens[0, head, :, : out.shape[1]] = out[:group_size]
            return
        count = numbers_of_word(tokens.dtype)
        of_heads = [x[i * tile_q : (i + 1) * tile_q] for x in outs for i in range(group_size)]
        first = heads[0] * group_size // count
        for part in range(tokens.shape[0]):
            own = [_filled(x[:, part * LANES : (part + 1) * LANES]) for x in of_heads]
            for i in range(0, len(own), count):
                self._store(tokens.at[part], first + i // count, own[i : i + count])

    @property
    def _lse(self) -> Any:
        """Base-2 lse of the tile's rows (rows, LANES), where each query head has a lane."""
        if self.options.tile_q == 1 or self.options.interpret:
            return self.refs.lse_rows
        return self.refs.lse_tokens.reshape(self.options.tile_q, LANES)

    def put_lse(self, heads: list[Any], lse: Sequence[Array]) -> None:
        """Base-2 lse of some KV heads, (rows, LANES) with lanes alike, to the heads' lanes."""
        tile_q, group_size, rows = self.options.tile_q, self.options.group_size, self._lse
        lane, row = (lax.broadcasted_iota(jnp.int32, rows.shape, i) for i in (1, 0))
        whole = rows[...]
        for head, own in zip(heads, lse, strict=True):
            if tile_q == 1:  # rows behind the queries' have no lane
                is_own = (lane == row + head * group_size) & (row < group_size)
                whole = jnp.where(is_own, own, whole)
                continue
            for i in range(group_size):
                part = own[i * tile_q : (i + 1) * tile_q]
                whole = jnp.where(lane == head * group_size + i, part, whole)
        rows[...] = whole

    def write_results(self, is_last: Array) -> None:
        """Start the copies of the tile's results; the core's last tile waits for them."""
        refs, options = self.refs, self.options
        if options.tile_q == 1:
            refs.lse_tokens[0] = jnp.sum(refs.lse_rows[...], axis=0, keepdims=True)
        elif options.interpret:  # else it is there
            refs.lse_tokens[:, 0, :] = refs.lse_rows[...]
        self._move("results", "start")
        pl.when(is_last)(self.wait_for_results)

    def wait_for_results(self) -> None:
        self._move("results", "wait")


def clear_padding(refs: Refs, options: Options, absent: float) -> None:
    """Tokens behind the last sequence: zeros, and `absent` for lse."""
    total_q, size = refs.out_hbm.shape[0], options.tile_q
    first = refs.cu_seqlens[refs.cu_seqlens.shape[0] - 1]

    @pl.when(first < total_q)
    def _() -> None:
        refs.out_tokens[...] = jnp.zeros_like(refs.out_tokens)
        refs.lse_tokens[...] = jnp.full(refs.lse_tokens.shape, absent, jnp.float32)
        rows = TokenRows(refs, options, jnp.int32(0))

        def clear(i: Array, _: None) -> None:
            at = first + i * size
            for do in ("start", "wait"):
                rows.move("results", at, jnp.minimum(size, total_q - at), do)

        lax.fori_loop(0, lax.div(total_q - first + (size - 1), jnp.int32(size)), clear, None)
