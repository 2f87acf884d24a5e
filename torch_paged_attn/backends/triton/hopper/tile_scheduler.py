"""The tiles of queries of a ragged batch in order of work, the longest first.

A persistent kernel that deals tiles out in this order ends evenly (Graham's longest processing
time rule), whatever lengths are mixed. Nothing is sorted: a tile's place is the number of tiles
with more work, and that of equal ones before it, both counted from the lengths in closed form.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.runtime.launch import allocate, launch
from torch_paged_attn.backends.triton.seqlen_info import key_span, num_tiles, query_span

# int32 words of an entry, and of the header before the entries: tickets drawn, number of tiles
ENTRY = 8

# tiles that a program places, sequences that it looks at at a time
PLACED = 64
LOOKED_AT = 32


@triton.jit
def _lead(query_len, key_len, TOKENS: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """How many tokens the first tile lacks: aligned tiles begin at positions that are multiples of
    TOKENS."""
    past = key_len - query_len
    return past & (TOKENS - 1) if IS_ALIGNED else tl.zeros_like(past)


@triton.jit
def _tiles_from(
    cost,
    query_len,
    key_len,
    lead,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """How many tiles of a sequence visit at least `cost` tiles of keys: its last ones."""
    tiles = tl.where(query_len > 0, tl.cdiv(query_len + lead, TOKENS), 0)
    before = (cost - 1) * BLOCK_N  # a tile must see a key past these
    first = tl.zeros_like(tiles)
    if IS_CAUSAL:
        past = key_len - query_len - lead
        first = tl.minimum(tl.maximum(before - past, 0) // TOKENS, tiles)
    return tl.where(cost <= 0, tiles, tl.where(key_len > before, tiles - first, 0))


@triton.jit(do_not_specialize=("batch", "total_q", "max_keys"))
def _tile_order_kernel(
    order_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    batch,
    total_q,
    max_keys,
    IS_PAGED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    PLACED: tl.constexpr,
    LOOKED_AT: tl.constexpr,
):
    """Tiles are numbered with gaps, as in `seqlen_info.py`; a program places PLACED of them."""
    SLACK: tl.constexpr = 2 if IS_ALIGNED else 1
    number = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    b = tl.full([PLACED], -1, tl.int32)
    for b0 in tl.range(0, batch + 1, LOOKED_AT):
        other = b0 + tl.arange(0, LOOKED_AT)
        bound = tl.load(cu_seqlens_q_ptr + other, mask=other <= batch, other=0)
        started = (other <= batch)[None, :] & (
            (bound // TOKENS + SLACK * other)[None, :] <= number[:, None]
        )
        b += tl.sum(started.to(tl.int32), 1)
    b = tl.maximum(b, 0)
    q_start, q_stop = query_span(b, cu_seqlens_q_ptr, batch, total_q)
    # rows nobody checked must not lead outside the tensors
    q_start, q_stop = tl.maximum(q_start, 0), tl.minimum(q_stop, total_q)
    query_len = tl.maximum(q_stop - q_start, 0)
    k_start, key_len = key_span(
        b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, max_keys, IS_PAGED
    )
    lead = _lead(query_len, key_len, TOKENS, IS_ALIGNED)
    tile = number - q_start // TOKENS - SLACK * b
    first_token = tl.maximum(tile * TOKENS - lead, 0)
    stop_token = tl.minimum((tile + 1) * TOKENS - lead, query_len)
    exists = (tile >= 0) & (first_token < stop_token)
    stop = key_len
    if IS_CAUSAL:
        stop = tl.minimum(stop, key_len - query_len - lead + (tile + 1) * TOKENS)
    cost = tl.cdiv(tl.maximum(stop, 0), BLOCK_N)

    place = tl.zeros([PLACED], tl.int32)
    tiles = tl.full([], 0, tl.int32)
    for b0 in tl.range(0, batch + 1, LOOKED_AT):
        other = b0 + tl.arange(0, LOOKED_AT)
        first_row, last_row = query_span(other, cu_seqlens_q_ptr, batch, total_q)
        length = tl.minimum(last_row, total_q) - tl.maximum(first_row, 0)
        length = tl.where(other <= batch, tl.maximum(length, 0), 0)
        _, keys = key_span(
            other, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, max_keys, IS_PAGED
        )
        missing = _lead(length, keys, TOKENS, IS_ALIGNED)
        each = tl.where(length > 0, tl.cdiv(length + missing, TOKENS), 0)
        tiles += tl.sum(each, 0)
        spans = length[None, :], keys[None, :], missing[None, :]
        more = _tiles_from(cost[:, None] + 1, *spans, TOKENS, BLOCK_N, IS_CAUSAL)
        least = _tiles_from(cost[:, None], *spans, TOKENS, BLOCK_N, IS_CAUSAL)
        equal_before = tl.where(other[None, :] < b[:, None], least - more, 0)
        first_equal = each[None, :] - least
        own = tl.where(other[None, :] == b[:, None], tile[:, None] - first_equal, 0)
        place += tl.sum(more + equal_before + own, 1)

    entry = order_ptr + WORDS + place * WORDS
    tl.store(entry, b, mask=exists)
    tl.store(entry + 1, first_token, mask=exists)
    tl.store(entry + 2, q_start, mask=exists)
    tl.store(entry + 3, query_len, mask=exists)
    tl.store(entry + 4, k_start, mask=exists)
    tl.store(entry + 5, key_len, mask=exists)
    tl.store(entry + 6, stop_token, mask=exists)
    if tl.program_id(0) == 0:
        tl.store(order_ptr, 0)
        tl.store(order_ptr + 1, tiles)


def most_tiles(total_q: int, batch: int, tokens: int, is_aligned: bool) -> int:
    """How many tiles there can be, whatever the lengths are."""
    return num_tiles(total_q, batch, tokens, 2 if is_aligned else 1)


def order_tiles(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    total_q: int,
    max_keys: int,
    *,
    is_paged: bool,
    is_causal: bool,
    is_aligned: bool,
    tokens: int,
    block_n: int,
) -> Tensor:
    """A header (tickets drawn: 0, number of tiles) and, for each tile: its sequence, its first
    token, the sequence's first row and length, its first key and number of keys, and the token
    after the tile's last. Tiles that are aligned begin at positions that are multiples of `tokens`,
    a power of two.
    """
    batch = cu_seqlens_q.shape[0] - 1
    tiles = most_tiles(total_q, batch, tokens, is_aligned)
    order = allocate((tiles + 1, ENTRY), torch.int32, cu_seqlens_q.device)
    launch(
        _tile_order_kernel,
        (-(-tiles // PLACED),),
        order,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        batch,
        total_q,
        max_keys,
        IS_PAGED=is_paged,
        IS_CAUSAL=is_causal,
        IS_ALIGNED=is_aligned,
        TOKENS=tokens,
        BLOCK_N=block_n,
        WORDS=ENTRY,
        PLACED=PLACED,
        LOOKED_AT=LOOKED_AT,
        num_warps=4,
    )
    return order
