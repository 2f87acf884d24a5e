"""Cutting the keys of a batch into pieces of equal work, on the device, without a prologue.

A unit of work is BLOCK_N keys of one tile of queries. The units of all sequences are numbered
through, tile after tile; a program takes the next `piece` of them, whichever tiles they belong to
(stream-K, arXiv 2301.03598). Every program computes the same numbers from the lengths.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.seqlen_info import key_span, query_span


@triton.jit
def sequence_of(
    b,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    batch,
    total_q,
    max_keys,
    left,
    FIXED_UNITS: tl.constexpr,
    IS_PAGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of sequences b: first row and number of queries, first row and number of keys; tiles of
    queries, and units of each: at least one, and with FIXED_UNITS whole pieces.
    """
    q_start, q_stop = query_span(b, cu_seqlens_q_ptr, batch, total_q)
    k_start, key_len = key_span(
        b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, max_keys, IS_PAGED
    )
    query_len = tl.maximum(q_stop - q_start, 0)
    lead = ((key_len - query_len) & (TOKENS - 1)) if HAS_LAYOUT else 0
    tiles = tl.where(query_len > 0, tl.cdiv(query_len + lead, TOKENS), 0)
    reach = tl.minimum(key_len, left + query_len) if HAS_LEFT else key_len
    units = tl.maximum(tl.cdiv(reach, BLOCK_N), 1)
    if FIXED_UNITS > 0:
        units = tl.cdiv(units, FIXED_UNITS) * FIXED_UNITS
    return q_start, query_len, k_start, key_len, tiles, units


@triton.jit
def _work_of(
    b,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    batch,
    total_q,
    max_keys,
    left,
    FIXED_UNITS: tl.constexpr,
    IS_PAGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Units of all tiles of sequences b: 0 past the last."""
    _, _, _, _, tiles, units = sequence_of(
        b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys, left,
        FIXED_UNITS, IS_PAGED, HAS_LEFT, TOKENS, HAS_LAYOUT, BLOCK_N,
    )  # fmt: skip
    return tl.where(b < batch, tiles * units, 0)


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
    FIXED_UNITS: tl.constexpr,
    IS_PAGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_ONE_LOOK: tl.constexpr,
):
    """Units in a piece, the first and last but one of this program's, the sequence it begins in,
    and the first unit of that. WIDTH sequences are looked at at a time, and rows of padding, which
    come last, on their own.
    """
    b = tl.arange(0, WIDTH)
    work = _work_of(
        b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys, left,
        FIXED_UNITS, IS_PAGED, HAS_LEFT, TOKENS, HAS_LAYOUT, BLOCK_N,
    )  # fmt: skip
    _, _, _, _, tiles, units = sequence_of(
        batch, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys, left,
        FIXED_UNITS, IS_PAGED, HAS_LEFT, TOKENS, HAS_LAYOUT, BLOCK_N,
    )  # fmt: skip
    total = tl.sum(work, 0) + tiles * units
    if not IS_ONE_LOOK:
        for b0 in tl.range(WIDTH, batch, WIDTH):
            more = _work_of(
                b0 + b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys,
                left, FIXED_UNITS, IS_PAGED, HAS_LEFT, TOKENS, HAS_LAYOUT, BLOCK_N,
            )  # fmt: skip
            total += tl.sum(more, 0)

    piece = tl.full([], FIXED_UNITS, tl.int32)
    if FIXED_UNITS == 0:
        piece = tl.maximum(tl.cdiv(total, programs), tl.maximum(min_units, 1))
    begin = program * piece
    stop = tl.minimum(begin + piece, total)
    ended = tl.cumsum(work, 0) <= begin
    found = tl.sum(ended.to(tl.int32), 0)
    first = tl.sum(tl.where(ended, work, 0), 0)
    if not IS_ONE_LOOK:
        before = tl.sum(work, 0)
        for b0 in tl.range(WIDTH, batch, WIDTH):
            more = _work_of(
                b0 + b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys,
                left, FIXED_UNITS, IS_PAGED, HAS_LEFT, TOKENS, HAS_LAYOUT, BLOCK_N,
            )  # fmt: skip
            ended = before + tl.cumsum(more, 0) <= begin
            found += tl.sum(ended.to(tl.int32), 0)
            first += tl.sum(tl.where(ended, more, 0), 0)
            before += tl.sum(more, 0)
    return piece, begin, stop, tl.minimum(found, batch), first
