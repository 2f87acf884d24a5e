"""Queries are read, and results written, where they lie: `(total_q, num_heads, n)`, a DMA a tile.

The kernel works out its tiles by itself, on the scalar core, so that XLA has nothing to do before
it. A DMA brings a tile's tokens, all heads of each; what a KV head computes on is picked out of
them by loads with strides. Two heads of 16 bits share a register's row: where numbers have 16 bits,
the rows of a KV head are `(pair of heads, token, head of the pair)`, else `(head, token)`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.kernel_arguments import Options, Refs


def plan_tiles(refs: Refs, options: Options, num_tiles: int) -> None:
    """Write `refs.tiles`, and how many there are, of the sequences that the launch is for."""
    tiles, window, tile_q = refs.tiles, options.window, options.tile_q
    num_cores = options.config.num_cores

    def cut(b: Array, count: Array) -> Array:
        length = refs.cu_seqlens[b + 1] - refs.cu_seqlens[b]
        key_len = refs.key_lens[b]
        past = key_len - length
        is_chosen = (length >= options.least_queries) & (length <= options.most_queries)

        def write(rank: Array, count: Array) -> Array:
            first = rank * tile_q
            position = past + first
            last = past + jnp.minimum(first + tile_q, length) - 1
            start, stop = window.start(position), window.stop(last, key_len)
            is_busy = start < stop
            tiles.sequence[count] = b
            tiles.first_query[count] = first
            tiles.num_tokens[count] = jnp.minimum(tile_q, length - first)
            tiles.position[count] = position
            tiles.start[count] = jnp.where(is_busy, start, 0)
            tiles.full_start[count] = window.start(last)
            tiles.full_stop[count] = window.stop(position, key_len)
            tiles.stop[count] = jnp.where(is_busy, stop, 0)
            return count + 1

        of_sequence = lax.div(length + (tile_q - 1), jnp.int32(tile_q))
        return lax.fori_loop(0, jnp.where(is_chosen, of_sequence, 0), write, count)

    batch = refs.cu_seqlens.shape[0] - 1
    count = lax.fori_loop(0, batch, cut, jnp.int32(0))
    refs.num_tiles[0] = count

    # a loader that is done asks for what is behind the last tile that there may be
    def end(i: Array, _: None) -> None:
        tiles.busy_from[i] = jnp.int32(num_tiles)

    lax.fori_loop(count, num_tiles + num_cores, end, None)

    def find_busy(i: Array, _: None) -> None:
        tile = count - 1 - i
        is_busy = tiles.start[tile] < tiles.stop[tile]
        tiles.busy_from[tile] = jnp.where(is_busy, tile, tiles.busy_from[tile + num_cores])

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
        refs = self.refs
        here, there = pl.ds(first, count), pl.ds(at, count)
        if kind == "queries":
            pair = refs.q_hbm.at[there], refs.q_tokens.at[here]
            return [pltpu.make_async_copy(*pair, refs.token_semaphores.at[0])]
        results = (refs.out_tokens, refs.out_hbm), (refs.lse_tokens, refs.lse_hbm)
        return [
            pltpu.make_async_copy(x.at[here], hbm.at[there], refs.token_semaphores.at[1 + i])
            for i, (x, hbm) in enumerate(results)
        ]

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
            width = refs.q_tokens.shape[-1]
            if width < refs.q.shape[-1]:
                refs.q[0] = jnp.zeros_like(refs.q[0])
            refs.q[0, :, :, :width] = refs.q_tokens[0]
            return

        for head, i in self._runs(refs.q_tokens):
            refs.q[0, head, self._part(i)] = self._load(refs.q_tokens, head, i)

    def _per_head(self, tokens: Any) -> int:
        """Query heads, or pairs of them, that these tokens have for a KV head."""
        return tokens.shape[1] // self.refs.q.shape[1] // self.options.paired

    def _runs(self, tokens: Any) -> list[tuple[int, int]]:
        """KV heads, and the query heads or the pairs of each: strides want to begin at numbers."""
        per_head = range(self._per_head(tokens))
        return [(head, i) for head in range(self.refs.q.shape[1]) for i in per_head]

    def _part(self, i: int) -> slice:
        """Rows of the i-th query head of a group, or of its i-th pair."""
        size = self.options.tile_q * self.options.paired
        return slice(i * size, (i + 1) * size)

    def _strided(self, tokens: Any, head: int, i: int) -> tuple[Any, Any]:
        """Tokens as rows of 32 bits, and those of one head, or of a pair."""
        options, (tile_q, num_heads, width) = self.options, tokens.shape
        per_token = num_heads // options.paired
        first = head * self._per_head(tokens) + i
        if options.paired > 1:
            tokens = tokens.bitcast(jnp.int32)
        return tokens.reshape(tile_q * per_token, width), pl.ds(first, tile_q, stride=per_token)

    def _load(self, tokens: Any, head: int, i: int) -> Array:
        options = self.options
        if options.interpret:  # which knows no refs of another shape or type
            first = (head * self._per_head(tokens) + i) * options.paired
            return tokens[:, pl.ds(first, options.paired)].reshape(-1, tokens.shape[2])
        rows, which = self._strided(tokens, head, i)
        x = rows[which, :]
        return pltpu.bitcast(x, tokens.dtype) if options.paired > 1 else x

    def _store(self, tokens: Any, head: int, i: int, x: Array) -> None:
        options = self.options
        if options.interpret:
            first = (head * self._per_head(tokens) + i) * options.paired
            x = x.reshape(options.tile_q, options.paired, -1)
            tokens[:, pl.ds(first, options.paired)] = x
            return
        rows, which = self._strided(tokens, head, i)
        rows[which, :] = pltpu.bitcast(x, jnp.int32) if options.paired > 1 else x

    def begin_results(self, has_earlier: Array) -> None:
        """Wait for the results of the core's tile before this one, whose memory is needed."""

        @pl.when(has_earlier)
        def _() -> None:
            before = dataclasses.replace(self, tile=self.tile - self.options.config.num_cores)
            before.wait_for_results()

        self.refs.lse_m[...] = jnp.zeros_like(self.refs.lse_m)
        self.refs.lse_l[...] = jnp.zeros_like(self.refs.lse_l)

    def put(self, head: Any, out: Array, m: Array, total: Array) -> None:
        """Results of one KV head: `out` (rows, n), maxima and sums (rows, LANES), lanes alike."""
        refs, options = self.refs, self.options
        lane, row = self._lane_and_row()
        if options.tile_q == 1:
            refs.out_tokens[0, head, :, : out.shape[1]] = out.astype(refs.out_tokens.dtype)
            parts = [(slice(None), head * out.shape[0])]
        else:
            # the queries are not needed any more
            refs.q[0, head, : out.shape[0], : out.shape[1]] = out.astype(refs.q.dtype)
            firsts = range(0, options.group_size, options.paired)
            first = head * options.group_size
            parts = [(self._part(i), first + at) for i, at in enumerate(firsts)]
        # a query head's statistics go to its lane
        whole_m, whole_l = refs.lse_m[...], refs.lse_l[...]
        for part, first_head in parts:
            is_own = lane == row + first_head
            whole_m = jnp.where(is_own, m[part], whole_m)
            whole_l = jnp.where(is_own, total[part], whole_l)
        refs.lse_m[...], refs.lse_l[...] = whole_m, whole_l

    def _lane_and_row(self) -> tuple[Array, Array]:
        """Lanes of the statistics, and which of the heads that take turns a row belongs to."""
        shape = self.refs.lse_m.shape
        lane, row = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 0))
        return lane, row if self.options.tile_q == 1 else row & (self.options.paired - 1)

    def write_results(self, is_last: Array) -> None:
        """Start the copies of the tile's results; the core's last tile waits for them."""
        refs, options = self.refs, self.options
        if options.tile_q > 1:
            width = refs.out_tokens.shape[2]
            for head, i in self._runs(refs.out_tokens):
                self._store(refs.out_tokens, head, i, refs.q[0, head, self._part(i), :width])
        total = refs.lse_l[...]
        lse = refs.lse_m[...] + jnp.log2(jnp.where(total == 0.0, 1.0, total))  # NaN stay
        if options.tile_q == 1:
            refs.lse_tokens[0] = jnp.sum(lse, axis=0, keepdims=True)
        elif options.paired == 1:
            refs.lse_tokens[:, 0, :] = lse
        else:
            refs.lse_m[...] = lse
            one, other = (refs.lse_m[pl.ds(i, options.tile_q, stride=2), :] for i in range(2))
            refs.lse_tokens[:, 0, :] = one + other
        self._move("results", "start")
        pl.when(is_last)(self.wait_for_results)

    def wait_for_results(self) -> None:
        self._move("results", "wait")


def clear_padding(refs: Refs, options: Options, absent: float) -> None:
    """Tokens behind the last sequence: zeros, and `absent` for lse."""
    total_q, size = refs.out_hbm.shape[0], refs.out_tokens.shape[0]
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
