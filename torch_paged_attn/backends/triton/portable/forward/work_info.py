"""Dividing the keys of a batch into pieces of equal work, on the device (stream-K, arXiv
2301.03598).

A unit of work is BLOCK_N keys of one tile of queries. The units of all tiles of all sequences are
numbered consecutively, and each program gets `piece` consecutive units, which may belong to several
tiles. Every program computes this division itself from the lengths; no kernel has to run before.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.seqlen_info import (
    key_span,
    position_of_first,
    query_span,
    without_left_out,
)
from torch_paged_attn.backends.triton.portable.common.key_positions import keys_before
from torch_paged_attn.backends.triton.portable.common.named import named


@triton.jit
def sequence_at(b, lengths, sizes, OPTIONS: tl.constexpr, SKIPS: tl.constexpr = False):
    """Of sequences b: the first row and the number of queries, the position of the first query
    (`past`), and the first row and the number of keys. `lengths` holds the pointers to read. With
    SKIPS, sequences that are left out have no queries.
    """
    q_start, q_stop = query_span(b, lengths.cu_seqlens_q, sizes.batch, sizes.total_q)
    k_start, key_len = key_span(
        b, lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_k, sizes.batch,
        sizes.max_keys, OPTIONS.IS_PAGED, lengths.k_start,
    )  # fmt: skip
    query_len = tl.maximum(q_stop - q_start, 0)
    query_len = without_left_out(b, query_len, lengths.seqused_k, sizes.batch, SKIPS)
    past = position_of_first(b, query_len, key_len, lengths.q_position, sizes.batch)
    return named("b q_start query_len past k_start key_len")(
        b, q_start, query_len, past, k_start, key_len
    )


@triton.jit
def sequence_info(b, lengths, sizes, scalars, OPTIONS: tl.constexpr):
    """What `sequence_at` returns of sequences b; the number of tiles of queries; and the number of
    units of each tile: at least one, and with FIXED_UNITS a multiple of that.
    """
    TOKENS: tl.constexpr = OPTIONS.TOKENS
    left = scalars.left
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    FIXED_UNITS: tl.constexpr = OPTIONS.FIXED_UNITS
    sequence = sequence_at(b, lengths, sizes, OPTIONS, OPTIONS.SKIPS)
    query_len, key_len = sequence.query_len, sequence.key_len
    lead = (sequence.past & (TOKENS - 1)) if OPTIONS.HAS_LAYOUT else 0
    tiles = tl.where(query_len > 0, tl.cdiv(query_len + lead, TOKENS), 0)
    reach = key_len
    if OPTIONS.HAS_LEFT:
        if lengths.q_position is None and OPTIONS.KEY_RANKS == 1:
            reach = tl.minimum(key_len, left + query_len)
        else:
            hidden = keys_before(sequence.past - left, scalars, OPTIONS)
            reach = key_len - tl.minimum(tl.maximum(hidden, 0), key_len)
    units = tl.maximum(tl.cdiv(reach, BLOCK_N), 1)
    if FIXED_UNITS > 0:
        # the first piece of a window may start before the window
        units = tl.cdiv(units, FIXED_UNITS) + (1 if OPTIONS.HAS_LEFT else 0)
        most = tl.maximum(tl.cdiv(key_len, BLOCK_N * FIXED_UNITS), 1)
        units = tl.minimum(units, most) * FIXED_UNITS
    return named("b q_start query_len past k_start key_len tiles units")(
        b, sequence.q_start, query_len, sequence.past, sequence.k_start, key_len, tiles, units
    )


@triton.jit
def _units_of(b, lengths, sizes, scalars, OPTIONS: tl.constexpr):
    """The units of all tiles of sequences b together; 0 for b past the last sequence."""
    sequence = sequence_info(b, lengths, sizes, scalars, OPTIONS)
    return tl.where(b < sizes.batch, sequence.tiles * sequence.units, 0)


@triton.jit
def find_work(program, programs, lengths, sizes, scalars, OPTIONS: tl.constexpr):
    """Units in a piece, the range of this program's units (first, last + 1), the sequence in which
    it starts, and that sequence's first unit. SEARCH_WIDTH sequences are read at a time; padding
    rows count as one more sequence at the end.
    """
    WIDTH: tl.constexpr = OPTIONS.SEARCH_WIDTH
    IS_ONE_LOOK: tl.constexpr = OPTIONS.IS_ONE_LOOK
    FIXED_UNITS: tl.constexpr = OPTIONS.FIXED_UNITS
    batch = sizes.batch
    b = tl.arange(0, WIDTH)
    work = _units_of(b, lengths, sizes, scalars, OPTIONS)
    padding = sequence_info(batch, lengths, sizes, scalars, OPTIONS)
    total = tl.sum(work, 0) + padding.tiles * padding.units
    if not IS_ONE_LOOK:
        for b0 in tl.range(WIDTH, batch, WIDTH):
            total += tl.sum(_units_of(b0 + b, lengths, sizes, scalars, OPTIONS), 0)

    piece = tl.full([], FIXED_UNITS, tl.int32)
    if FIXED_UNITS == 0:
        piece = tl.maximum(tl.cdiv(total, programs), tl.maximum(scalars.min_units, 1))
    begin = program * piece
    stop = tl.minimum(begin + piece, total)
    ended = tl.cumsum(work, 0) <= begin
    found = tl.sum(ended.to(tl.int32), 0)
    first = tl.sum(tl.where(ended, work, 0), 0)
    if not IS_ONE_LOOK:
        before = tl.sum(work, 0)
        for b0 in tl.range(WIDTH, batch, WIDTH):
            more = _units_of(b0 + b, lengths, sizes, scalars, OPTIONS)
            ended = before + tl.cumsum(more, 0) <= begin
            found += tl.sum(ended.to(tl.int32), 0)
            first += tl.sum(tl.where(ended, more, 0), 0)
            before += tl.sum(more, 0)
    return piece, begin, stop, tl.minimum(found, batch), first
