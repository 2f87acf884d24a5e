"""Cutting the keys of a ragged batch into pieces of equal work, on the device, without a prologue.

Every program computes the same plan from the lengths: the tiles of queries times tiles of keys of
all sequences, over the programs there are, is a piece; a sequence gets as many splits as it has
pieces, rounded. Splits are numbered through, and a program finds its own by a running sum.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.tile import key_span, query_span


@triton.jit
def piece_size(total, programs, min_tiles):
    """Tiles of keys in a piece; in float32, which every program rounds alike."""
    return tl.maximum(
        tl.ceil(total / tl.maximum(programs, 1)).to(tl.int32), tl.maximum(min_tiles, 1)
    )


@triton.jit
def count_splits(key_len, piece, fixed_tiles, BLOCK_N: tl.constexpr):
    """How many programs share the keys of each tile of a sequence."""
    key_tiles = tl.cdiv(key_len, BLOCK_N)
    fixed = tl.cdiv(key_tiles, tl.maximum(fixed_tiles, 1))
    return tl.maximum(tl.where(fixed_tiles > 0, fixed, (key_tiles + piece // 2) // piece), 1)


@triton.jit
def _sizes(
    b,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    batch,
    total_q,
    max_keys,
    IS_PAGED: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LAYOUT: tl.constexpr,
):
    """Tiles of queries and number of keys of sequences b; (0, 0) past the last."""
    q_start, q_stop = query_span(b, cu_seqlens_q_ptr, batch, total_q)
    _, key_len = key_span(
        b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, max_keys, IS_PAGED
    )
    query_len = tl.maximum(q_stop - q_start, 0)
    lead = ((key_len - query_len) & (TOKENS - 1)) if HAS_LAYOUT else 0
    tiles = tl.where(query_len > 0, tl.cdiv(query_len + lead, TOKENS), 0)
    return tl.where(b <= batch, tiles, 0), key_len


@triton.jit
def find_work(
    number,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    batch,
    total_q,
    max_keys,
    programs,
    min_tiles,
    fixed_tiles,
    IS_PAGED: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_ONE_LOOK: tl.constexpr,
):
    """Sequence of split `number` (past the batch: nothing to do), its number within the sequence,
    and the tiles of keys in a piece. WIDTH sequences are looked at at a time.
    """
    if IS_ONE_LOOK:
        b = tl.arange(0, WIDTH)
        tiles, key_len = _sizes(
            b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys,
            IS_PAGED, TOKENS, HAS_LAYOUT,
        )  # fmt: skip
        total = tl.sum(tiles.to(tl.float32) * tl.cdiv(key_len, BLOCK_N), 0)
        piece = piece_size(total, programs, min_tiles)
        counts = tiles * count_splits(key_len, piece, fixed_tiles, BLOCK_N)
        ended = tl.cumsum(counts, 0) <= number
        found = tl.sum(ended.to(tl.int32), 0)
        first = tl.sum(tl.where(ended, counts, 0), 0)
        return found, number - first, piece

    total = tl.full([], 0.0, tl.float32)
    for b0 in tl.range(0, batch + 1, WIDTH):
        b = b0 + tl.arange(0, WIDTH)
        tiles, key_len = _sizes(
            b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys,
            IS_PAGED, TOKENS, HAS_LAYOUT,
        )  # fmt: skip
        total += tl.sum(tiles.to(tl.float32) * tl.cdiv(key_len, BLOCK_N), 0)
    piece = piece_size(total, programs, min_tiles)

    before = tl.full([], 0, tl.int32)
    found = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    for b0 in tl.range(0, batch + 1, WIDTH):
        b = b0 + tl.arange(0, WIDTH)
        tiles, key_len = _sizes(
            b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys,
            IS_PAGED, TOKENS, HAS_LAYOUT,
        )  # fmt: skip
        counts = tiles * count_splits(key_len, piece, fixed_tiles, BLOCK_N)
        ended = before + tl.cumsum(counts, 0) <= number
        found += tl.sum(ended.to(tl.int32), 0)
        first += tl.sum(tl.where(ended, counts, 0), 0)
        before += tl.sum(counts, 0)
    return found, number - first, piece
