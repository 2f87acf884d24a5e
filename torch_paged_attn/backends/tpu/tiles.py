"""A batch is cut into tiles of query tokens, on the device: no program is compiled for a length.

A tile is `tile_q` consecutive tokens of one sequence. The kernel walks the tiles and, for each,
the keys that some token of it sees: cost follows what is visible, whatever the mix of prefill and
decode. Shapes are upper bounds; tiles behind the batch's last one see no key. The forward's kernel
cuts its tiles itself, in the same way (`q_out_dma.plan_tiles`), and picks rows out of the tokens;
for the backward XLA gathers and transposes tokens to rows and back (`Heads`).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from torch_paged_attn.backends.tpu.dtypes import SUBLANES
from torch_paged_attn.backends.tpu.kernels.softmax import base_2


@dataclasses.dataclass(frozen=True)
class Window:
    """Which keys a query at position p sees: `[p - left, p + right]`, -1 is unbounded."""

    left: int
    right: int

    def start(self, position: Array) -> Array:
        """The first key."""
        return jnp.zeros_like(position) if self.left < 0 else jnp.maximum(position - self.left, 0)

    def stop(self, position: Array, key_len: Array) -> Array:
        """The first key behind the last."""
        stop = key_len if self.right < 0 else jnp.minimum(key_len, position + self.right + 1)
        return jnp.maximum(stop, 0)


class Lengths(NamedTuple):
    """Where each sequence's tokens start, and its lengths."""

    first_query: Array  # (batch,) where its tokens start in q
    query: Array  # (batch,) Lq
    key: Array  # (batch,) Lk


class Tiles(NamedTuple):
    """`(num_tiles,)` int32 each, as the kernel reads them.

    Some token of the tile sees each key of `[start, stop)`; all of them see every key of
    `[full_start, full_stop)`.
    """

    sequence: Array
    first_query: Array  # of the tile within its sequence
    num_tokens: Array
    position: Array  # of the tile's first token among the keys
    start: Array
    full_start: Array
    full_stop: Array
    stop: Array
    next_nonempty: Array  # (num_tiles + cores,) this tile or the core's next one that sees a key


class KeyTiles(NamedTuple):
    """`(num_tiles,)` int32 each: tiles of consecutive keys, and the tiles of queries that see some
    key of theirs, which are neighbours.
    """

    sequence: Array
    first_key: Array  # of the tile within its sequence
    first_tile: Array  # of queries
    num_visits: Array
    next_nonempty: Array  # (num_tiles + cores,) as in `Tiles`


class Cut(NamedTuple):
    """Tiles of packed tokens, queries or keys, and where each token is in them."""

    tiles: Any  # Tiles or KeyTiles
    per_sequence: Array  # (batch,) how many tiles a sequence has
    token: Array  # (num_tiles, size) the row of each of a tile's tokens
    tile_of: Array  # (total,) tile of a token, and its place there
    place_of: Array  # (total,)
    is_token: Array  # (total,) False for rows of no sequence


def count_up(counts: Array, size: int) -> tuple[Array, Array]:
    """`[2, 3]` as which `[0, 0, 1, 1, 1]` and rank `[0, 1, 0, 1, 2]`; `size` entries, where those
    beyond the last have `which == len(counts)`.
    """
    ends = jnp.cumsum(counts)
    index = jnp.arange(size, dtype=jnp.int32)
    which = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    first = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
    return which, (index - first[which]).astype(jnp.int32)


def bounds_of(window: Window, first: Array, size: int, query_len: Array, key_len: Array) -> Any:
    """Of the tile of `size` queries from `first` on, what `Tiles` says of it besides its place."""
    num_tokens = jnp.minimum(size, query_len - first)
    position = key_len - query_len + first
    last = position + num_tokens - 1
    start, stop = window.start(position), window.stop(last, key_len)
    is_busy = start < stop
    return {
        "num_tokens": num_tokens,
        "position": position,
        "start": jnp.where(is_busy, start, 0),
        "full_start": window.start(last),
        "full_stop": window.stop(position, key_len),
        "stop": jnp.where(is_busy, stop, 0),
    }


def _cut(
    first_row: Array, lengths: Array, total: int, size: int, num_cores: int
) -> tuple[Array, Array, Array, Cut]:
    """Which tiles there are, of which sequence and token in it they begin at; and a cut without
    tiles. Sequence b's tokens are the rows from `first_row[b]` on.
    """
    batch = lengths.shape[0]
    per_sequence = lax.div(lengths + (size - 1), jnp.int32(size))
    bound = min(total, (total + batch * (size - 1)) // size)
    bound = max(1, -(-bound // num_cores)) * num_cores
    which, rank = count_up(per_sequence, bound)
    sequence, first = jnp.minimum(which, batch - 1), rank * size

    index = jnp.arange(total, dtype=jnp.int32)
    of_token = jnp.searchsorted(first_row[1:], index, side="right", method="compare_all")
    place = index - first_row[of_token]
    first_tile = jnp.cumsum(per_sequence) - per_sequence
    token = first_row[sequence][:, None] + first[:, None] + jnp.arange(size)
    cut = Cut(
        tiles=None,
        per_sequence=per_sequence,
        token=jnp.clip(token, 0, total - 1),
        tile_of=jnp.clip(first_tile[of_token] + place // size, 0, bound - 1),
        place_of=place % size,
        is_token=(place >= 0) & (place < lengths[of_token]),
    )
    return which < batch, sequence, first, cut


def cut_queries(
    lengths: Lengths, total_q: int, *, tile_q: int, window: Window, num_cores: int
) -> Cut:
    """Tiles of all sequences."""
    of_query = lengths.first_query, lengths.query
    is_tile, sequence, first, cut = _cut(*of_query, total_q, tile_q, num_cores)
    bounds = bounds_of(window, first, tile_q, lengths.query[sequence], lengths.key[sequence])
    for end in ("start", "stop"):
        bounds[end] = jnp.where(is_tile, bounds[end], 0)
    is_busy = bounds["start"] < bounds["stop"]
    tiles = Tiles(sequence, first, **bounds, next_nonempty=next_nonempty(is_busy, num_cores))
    return cut._replace(tiles=jax.tree.map(lambda x: x.astype(jnp.int32), tiles))


def cut_keys(
    lengths: Lengths,
    first_key: Array,
    total_k: int,
    *,
    tile_k: int,
    tile_q: int,
    window: Window,
    num_cores: int,
) -> Cut:
    """Tiles of packed keys, of which sequence b's start at row `first_key[b]`; `tile_q` is the
    size of `cut_queries`.
    """
    is_tile, sequence, first, cut = _cut(first_key, lengths.key, total_k, tile_k, num_cores)
    query_len, key_len = lengths.query[sequence], lengths.key[sequence]
    # token i, at position past + i, sees [position - left, position + right]
    past = key_len - query_len
    last = jnp.minimum(first + tile_k, key_len) - 1
    start = jnp.zeros_like(past) if window.right < 0 else first - window.right - past
    stop = query_len if window.left < 0 else last + window.left + 1 - past
    start, stop = (jnp.clip(x, 0, query_len) for x in (start, stop))
    is_busy = is_tile & (start < stop)
    per_query = lax.div(lengths.query + (tile_q - 1), jnp.int32(tile_q))
    before = (jnp.cumsum(per_query) - per_query)[sequence]
    start, stop = (lax.div(x, jnp.int32(tile_q)) for x in (start, stop + (tile_q - 1)))
    tiles = KeyTiles(
        sequence=sequence,
        first_key=first,
        first_tile=jnp.where(is_busy, before + start, 0),
        num_visits=jnp.where(is_busy, stop - start, 0),
        next_nonempty=next_nonempty(is_busy, num_cores),
    )
    return cut._replace(tiles=jax.tree.map(lambda x: x.astype(jnp.int32), tiles))


def next_nonempty(is_busy: Array, num_cores: int) -> Array:
    """This tile, or the next one of its core that sees a key, or their number if there is none."""
    num_tiles = is_busy.shape[0]
    index = jnp.where(is_busy, jnp.arange(num_tiles), num_tiles).reshape(-1, num_cores)
    index = lax.cummin(index, reverse=True).reshape(-1)
    return jnp.concatenate([index, jnp.full(num_cores, num_tiles)]).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Heads:
    """How a launch's rows are numbered: `row = g * tile_q + token` for query head `g` of a KV
    head's group. KV heads whose rows are stacked count as one here, and their groups as one group.
    """

    num_kv_heads: int
    group_size: int
    tile_q: int
    unit: int = SUBLANES  # rows are padded to multiples of it

    def pad(self, rows: Array, value: float = 0.0) -> Array:
        """(..., rows, n) with `rows` padded to a multiple of `unit`."""
        padding = ((0, 0), (0, 0), (0, -rows.shape[2] % self.unit), (0, 0))
        return jnp.pad(rows, padding, constant_values=value)

    def of_tokens(self, x: Array, cut: Cut, absent: float) -> Array:
        """(total_q, num_heads, n) as (num_tiles, num_kv_heads, rows, n); rows that are no tokens
        hold `absent`.
        """
        num_tiles, tile_q = cut.token.shape
        x = x[cut.token]
        is_there = jnp.arange(tile_q) < cut.tiles.num_tokens[:, None]
        x = jnp.where(is_there[:, :, None, None], x, jnp.asarray(absent, x.dtype))
        x = x.reshape(num_tiles, tile_q, self.num_kv_heads, self.group_size, -1)
        x = x.transpose(0, 2, 3, 1, 4).reshape(num_tiles, self.num_kv_heads, -1, x.shape[-1])
        return self.pad(x, absent)

    def to_tokens(self, x: Array, cut: Cut) -> Array:
        """(num_tiles, any KV heads, rows, n) as (total_q, query heads, n)."""
        num_tiles, num_kv_heads, _, width = x.shape
        x = x[:, :, : self.group_size * self.tile_q]
        x = x.reshape(num_tiles, num_kv_heads, self.group_size, self.tile_q, width)
        x = x.transpose(0, 3, 1, 2, 4).reshape(num_tiles * self.tile_q, -1, width)
        return x[cut.tile_of * self.tile_q + cut.place_of]

    def of_heads(self, values: Array, fold: int = 1) -> Array:
        """([batch,] num_heads) as (1 or batch, num_kv_heads, fold * rows, 1): a head's number in
        each of its rows, all rows `fold` times.
        """
        x = values.astype(jnp.float32).reshape(-1, self.num_kv_heads, self.group_size, 1)
        x = jnp.broadcast_to(x, (*x.shape[:3], self.tile_q))
        return jnp.tile(self.pad(x.reshape(*x.shape[:2], -1, 1)), (1, 1, fold, 1))

    def of_bias(self, bias: Array, cut: Cut, block_k: int) -> Array:
        """A bias (1 or num_heads, total_q, keys) as (num_tiles, 1 or num_kv_heads, rows, keys) in
        base 2, with keys padded to whole blocks of `block_k`.
        """
        if bias.dtype == jnp.bool_:
            bias = jnp.where(bias, 0.0, -jnp.inf)
        else:
            bias = base_2(bias.astype(jnp.float32))
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, -bias.shape[2] % block_k)))
        x = bias[:, cut.token].swapaxes(0, 1)  # (num_tiles, heads, tile_q, keys)
        num_tiles, heads, _, keys = x.shape
        if heads == 1:
            x = jnp.broadcast_to(x, (num_tiles, self.group_size, self.tile_q, keys))
        # padding rows see no key
        return self.pad(x.reshape(num_tiles, max(1, heads // self.group_size), -1, keys), -jnp.inf)


def folded(q: Array, fold: int) -> Array:
    """(tokens, heads, rows, n) as (tokens, heads, fold * rows, fold * n), for keys of which `fold`
    lie in a row. The i-th copy of the rows has its numbers where the i-th key of a row lies, and
    zeros elsewhere.
    """
    width = q.shape[-1]
    lanes = ((i * width, (fold - 1 - i) * width) for i in range(fold))
    axes = ((0, 0),) * (q.ndim - 1)
    return jnp.concatenate([jnp.pad(q, (*axes, both)) for both in lanes], axis=2)
