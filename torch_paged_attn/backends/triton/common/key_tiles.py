"""The tiles of packed keys of a ragged batch in order of work, the longest first, for a backward.

The list is that of `hopper/schedule/tile_scheduler.py`: a header (tiles claimed: 0, number of
tiles), and for each tile its sequence, its first key, the sequence's first query and number of
queries, its first key and number of keys, and the key after the tile's last. All rows of keys are
in tiles, those past a sequence's last key without work. As there, nothing is sorted: a tile's place
is the number of tiles with more work, and that of equal ones before it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.seqlen_info import keys_of, query_span

# int32 words of a tile's entry, and of the header before the entries
ENTRY = tl.constexpr(8)

# tiles that a part places, sequences that it looks at at a time
PLACED = tl.constexpr(64)
LOOKED_AT = tl.constexpr(32)


class KeyTiles(NamedTuple):
    KEYS: int  # of a tile
    QUERIES: int  # of the tiles that it visits, in which its work is counted
    IS_CAUSAL: bool


def num_key_tiles(total_k: int, batch: int, keys: int) -> int:
    """How many tiles there can be, whatever the lengths are."""
    return total_k // keys + batch + 1


def num_parts(tiles: int) -> int:
    """In how many parts the list is made."""
    return -(-tiles // PLACED.value)


@triton.jit
def _tiles_from(cost, query_len, key_len, span, OPTIONS: tl.constexpr):
    """How many tiles of keys of a sequence visit at least `cost` tiles of queries: its first ones.
    All `span` rows of keys are in tiles, those past the last key without work."""
    # a tile must be seen by a query that many before the last
    before = (cost - 1) * OPTIONS.QUERIES
    keys = tl.maximum(key_len - before, 0) if OPTIONS.IS_CAUSAL else key_len
    tiles = tl.where(query_len > before, tl.cdiv(keys, OPTIONS.KEYS), 0)
    return tl.where(cost <= 0, tl.cdiv(span, OPTIONS.KEYS), tiles)


@triton.jit
def _spans(b, lengths, batch, total_q, total_k):
    """Of sequence b: first row and number of queries, first row and number of keys, and rows of
    keys that are its own, whether `seqused_k` counts them or not. The rows past the last key are
    one more sequence; what comes after that is empty."""
    bounds_ptr = lengths[0] if lengths[1] is None else lengths[1]
    q_start, q_stop = query_span(b, lengths[0], batch, total_q)
    q_start, q_stop = tl.maximum(q_start, 0), tl.minimum(q_stop, total_q)
    query_len = tl.where(b < batch, tl.maximum(q_stop - q_start, 0), 0)
    k_start, k_stop = query_span(b, bounds_ptr, batch, total_k)
    k_start, k_stop = tl.maximum(k_start, 0), tl.minimum(k_stop, total_k)
    span = tl.where(b <= batch, tl.maximum(k_stop - k_start, 0), 0)
    _, key_len = keys_of(b, lengths, batch, total_k, False)
    return q_start, query_len, k_start, tl.minimum(key_len, span), span


@triton.jit
def place_key_tiles(part, tile_list_ptr, lengths, batch, total_q, total_k, OPTIONS: tl.constexpr):
    """Write PLACED tiles to their places in the list. `lengths`: cu_seqlens_q, cu_seqlens_k,
    seqused_k, k_start. Tiles are numbered with gaps, as in `seqlen_info.py`."""
    KEYS: tl.constexpr = OPTIONS.KEYS
    QUERIES: tl.constexpr = OPTIONS.QUERIES
    bounds_ptr = lengths[0] if lengths[1] is None else lengths[1]
    number = part * PLACED + tl.arange(0, PLACED)
    b = tl.full([PLACED], -1, tl.int32)
    for b0 in tl.range(0, batch + 1, LOOKED_AT):
        other = b0 + tl.arange(0, LOOKED_AT)
        bound = tl.load(bounds_ptr + other, mask=other <= batch, other=0)
        started = (other <= batch)[None, :] & ((bound // KEYS + other)[None, :] <= number[:, None])
        b += tl.sum(started.to(tl.int32), 1)
    b = tl.maximum(b, 0)
    spans = _spans(b, lengths, batch, total_q, total_k)
    q_start, query_len, k_start, key_len, span = spans
    tile = number - k_start // KEYS - b
    first_key = tile * KEYS
    exists = (tile >= 0) & (first_key < span)
    first_query = 0
    if OPTIONS.IS_CAUSAL:
        first_query = tl.maximum(first_key - (key_len - query_len), 0)
    cost = tl.cdiv(tl.maximum(query_len - first_query, 0), QUERIES)
    cost = tl.where(first_key < key_len, cost, 0)

    place = tl.zeros([PLACED], tl.int32)
    tiles = tl.full([], 0, tl.int32)
    for b0 in tl.range(0, batch + 1, LOOKED_AT):
        other = b0 + tl.arange(0, LOOKED_AT)
        _, queries, _, keys, rows = _spans(other, lengths, batch, total_q, total_k)
        tiles += tl.sum(tl.cdiv(rows, KEYS), 0)
        lens = queries[None, :], keys[None, :], rows[None, :]
        more = _tiles_from(cost[:, None] + 1, *lens, OPTIONS)
        least = _tiles_from(cost[:, None], *lens, OPTIONS)
        equal_before = tl.where(other[None, :] < b[:, None], least - more, 0)
        own = tl.where(other[None, :] == b[:, None], tile[:, None] - more, 0)
        place += tl.sum(more + equal_before + own, 1)

    entry = tile_list_ptr + ENTRY + place * ENTRY
    tl.store(entry, b, mask=exists)
    tl.store(entry + 1, first_key, mask=exists)
    tl.store(entry + 2, q_start, mask=exists)
    tl.store(entry + 3, query_len, mask=exists)
    tl.store(entry + 4, k_start, mask=exists)
    tl.store(entry + 5, key_len, mask=exists)
    tl.store(entry + 6, tl.minimum(first_key + KEYS, span), mask=exists)
    if part == 0:
        tl.store(tile_list_ptr, 0)
        tl.store(tile_list_ptr + 1, tiles)
