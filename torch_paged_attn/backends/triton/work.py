"""Cutting the keys of a batch into pieces of equal work, on the device, without a prologue.

A unit of work is BLOCK_N keys of one tile of queries. The units of all sequences are numbered
through, tile after tile; a program takes the next `piece` of them, whichever tiles they belong to
(stream-K, arXiv 2301.03598). Every program computes the same numbers from the lengths.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.tile import key_span, query_span


@triton.jit
def count_units(
    b,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    batch,
    total_q,
    max_keys,
    left,
    fixed_units,
    IS_PAGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tiles of queries of sequences b (0 past the last), and units of each: at least one, and with
    `fixed_units` whole pieces.
    """
    q_start, q_stop = query_span(b, cu_seqlens_q_ptr, batch, total_q)
    _, key_len = key_span(
        b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, max_keys, IS_PAGED
    )
    query_len = tl.maximum(q_stop - q_start, 0)
    lead = ((key_len - query_len) & (TOKENS - 1)) if HAS_LAYOUT else 0
    tiles = tl.where(query_len > 0, tl.cdiv(query_len + lead, TOKENS), 0)
    reach = tl.minimum(key_len, left + query_len) if HAS_LEFT else key_len
    whole = tl.maximum(fixed_units, 1)
    units = tl.cdiv(tl.maximum(tl.cdiv(reach, BLOCK_N), 1), whole) * whole
    return tl.where(b <= batch, tiles, 0), units


@triton.jit
def find_work(
    program,
    programs,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    batch,
    total_q,
    max_keys,
    left,
    min_units,
    fixed_units,
    IS_PAGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_ONE_LOOK: tl.constexpr,
):
    """Units in a piece, the first and last but one of this program's, the sequence it begins in,
    and the first unit of that. WIDTH sequences are looked at at a time.
    """
    b = tl.arange(0, WIDTH)
    tiles, units = count_units(
        b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys, left,
        fixed_units, IS_PAGED, HAS_LEFT, TOKENS, HAS_LAYOUT, BLOCK_N,
    )  # fmt: skip
    total = tl.sum(tiles * units, 0)
    if not IS_ONE_LOOK:
        for b0 in tl.range(WIDTH, batch + 1, WIDTH):
            more, each = count_units(
                b0 + b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys,
                left, fixed_units, IS_PAGED, HAS_LEFT, TOKENS, HAS_LAYOUT, BLOCK_N,
            )  # fmt: skip
            total += tl.sum(more * each, 0)

    piece = tl.maximum(tl.cdiv(total, programs), tl.maximum(min_units, 1))
    piece = tl.where(fixed_units > 0, fixed_units, piece)
    begin = program * piece
    stop = tl.minimum(begin + piece, total)
    ended = tl.cumsum(tiles * units, 0) <= begin
    found = tl.sum(ended.to(tl.int32), 0)
    first = tl.sum(tl.where(ended, tiles * units, 0), 0)
    if not IS_ONE_LOOK:
        before = tl.sum(tiles * units, 0)
        for b0 in tl.range(WIDTH, batch + 1, WIDTH):
            more, each = count_units(
                b0 + b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys,
                left, fixed_units, IS_PAGED, HAS_LEFT, TOKENS, HAS_LAYOUT, BLOCK_N,
            )  # fmt: skip
            ended = before + tl.cumsum(more * each, 0) <= begin
            found += tl.sum(ended.to(tl.int32), 0)
            first += tl.sum(tl.where(ended, more * each, 0), 0)
            before += tl.sum(more * each, 0)
    return piece, begin, stop, found, first
