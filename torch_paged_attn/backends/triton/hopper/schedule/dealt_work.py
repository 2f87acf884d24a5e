"""Keys of a batch of few queries dealt out in equal shares, on the device and without a list.

A unit is a tile of keys of one tile of queries, of a KV head. The units of all sequences are
numbered through, and a program takes the next `share` of them, whichever tiles they belong to
(stream-K, arXiv 2301.03598). Every program computes the same numbers from the lengths. A tile that
several programs share is cut in as many pieces (`pieces.py`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.common.seqlen_info import key_span, query_span

# sequences that are looked at at a time
COUNTED_AT_ONCE = gl.constexpr(256)

# shares are larger by up to one in so many, where no tile is cut then, or all in as many pieces
LEAST_EVEN = gl.constexpr(16)


class Sequence(NamedTuple):
    """A sequence, or several, as values of the kernel."""

    q_start: Any  # first row and number of queries
    query_len: Any
    k_start: Any  # first row of packed keys
    key_len: Any
    tiles: Any  # of queries, of a KV head
    first: Any  # the first tile of keys that they visit
    units: Any  # and how many: at least one


class Share(NamedTuple):
    """A program's units, as values of the kernel."""

    share: Any  # how many units each program has
    begin: Any
    stop: Any
    total: Any  # of all programs
    b: Any  # the sequence that it begins in
    base: Any  # the first unit of that


class Piece(NamedTuple):
    """Of a tile's units those of a program, as values of the kernel."""

    first: Any  # tile of keys
    count: Any
    number: Any  # which piece it is, of how many
    pieces: Any
    waiting: Any  # how many of them, the first ones, are the last that their programs have
    first_part: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def sequence_of(b, params, OPTIONS: gl.constexpr):
    """Sequence b of a paged batch. The rows past the last one are one more, without keys."""
    STEP: gl.constexpr = OPTIONS.ROW_GROUPS * OPTIONS.TOKENS
    pointers, sizes = params.pointers, params.sizes
    q_start, q_stop = query_span(b, pointers.cu_seqlens_q, sizes.batch, sizes.total_q)
    # rows nobody checked must not lead outside the tensors
    q_start, q_stop = gl.maximum(q_start, 0), gl.minimum(q_stop, sizes.total_q)
    query_len = gl.where(b <= sizes.batch, gl.maximum(q_stop - q_start, 0), 0)
    k_start, key_len = key_span(
        b, pointers.cu_seqlens_q, pointers.cu_seqlens_k, pointers.seqused_k, sizes.batch,
        sizes.lists_per_head, True,
    )  # fmt: skip
    key_len = gl.where(b < sizes.batch, key_len, 0)
    first = key_len * 0
    if OPTIONS.HAS_LEFT:
        first = gl.maximum(key_len - query_len - params.scalars.window_left, 0) // OPTIONS.BLOCK_N
    units = gl.maximum((key_len + OPTIONS.BLOCK_N - 1) // OPTIONS.BLOCK_N - first, 1)
    tiles = (query_len + STEP - 1) // STEP
    return Sequence(q_start, query_len, k_start, key_len, tiles, first, units)


@gluon.jit
def share_of(program, programs, params, OPTIONS: gl.constexpr):
    """The units of a program, as a warp."""
    by_lane: gl.constexpr = gl.BlockedLayout([COUNTED_AT_ONCE // 32], [32], [1], [0])
    heads = params.scalars.num_heads // OPTIONS.PACKED_HEADS
    batch = params.sizes.batch
    b = gl.arange(0, COUNTED_AT_ONCE, by_lane)
    total = b * 0
    tiles = b * 0
    longest = b * 0
    for b0 in range(0, batch + 1, COUNTED_AT_ONCE):
        found = sequence_of(b0 + b, params, OPTIONS)
        total += found.tiles * found.units
        tiles += found.tiles
        longest = gl.maximum(longest, gl.where(found.tiles > 0, found.units, 0))
    total, tiles = gl.sum(total, 0) * heads, gl.sum(tiles, 0) * heads
    longest = gl.max(longest, 0)
    share = gl.maximum((total + programs - 1) // programs, OPTIONS.LEAST_SHARE)
    if tiles * longest == total:
        # all are as long
        even = (tiles + programs - 1) // programs * longest
        if tiles <= programs:
            pieces = gl.maximum(programs // gl.maximum(tiles, 1), 1)
            even = gl.maximum((longest + pieces - 1) // pieces, OPTIONS.LEAST_SHARE)
        if even * LEAST_EVEN <= share * (LEAST_EVEN + 1):
            share = gl.maximum(even, share)
    begin = program * share
    stop = gl.minimum(begin + share, total)

    first = b * 0
    ended_before = b * 0
    before = gl.to_tensor(0)
    for b0 in range(0, batch + 1, COUNTED_AT_ONCE):
        found = sequence_of(b0 + b, params, OPTIONS)
        work = found.tiles * found.units * heads
        ended = before + gl.associative_scan(work, 0, _add) <= begin
        ended_before += ended.to(gl.int32)
        first += gl.where(ended, work, 0)
        before += gl.sum(work, 0)
    return Share(share, begin, stop, total, gl.sum(ended_before, 0), gl.sum(first, 0))


@gluon.jit
def tiles_of(sequence, base, dealt, heads, OPTIONS: gl.constexpr):
    """First and last but one of a sequence's tiles, of all heads, in a share. What is no longer
    than the least share is not cut, but belongs where it begins."""
    units = sequence.units
    before = gl.maximum(dealt.begin - base, 0)
    first = (before + gl.where(units <= OPTIONS.LEAST_SHARE, units - 1, 0)) // units
    last = gl.minimum(sequence.tiles * heads, (dealt.stop - base + units - 1) // units)
    return first, last


@gluon.jit
def piece_of(number, sequence, base, program, dealt, OPTIONS: gl.constexpr):
    """Of tile `number` of a sequence, whose first unit is `base`, the piece of this program."""
    start = base + number * sequence.units
    stop = start + sequence.units
    is_whole = sequence.units <= OPTIONS.LEAST_SHARE
    first = gl.maximum(start, dealt.begin)
    count = gl.where(is_whole, stop, gl.minimum(stop, dealt.stop)) - first
    first_program = start // dealt.share
    last_program = gl.where(is_whole, program, (stop - 1) // dealt.share)
    pieces = last_program - first_program + 1
    goes_on = stop < gl.minimum((last_program + 1) * dealt.share, dealt.total)
    # what a program leaves of the tile that it ends in, and of the one that it begins in
    return Piece(
        sequence.first + first - start, count, program - first_program, pieces,
        pieces - goes_on.to(gl.int32), 2 * first_program + 1,
    )  # fmt: skip
