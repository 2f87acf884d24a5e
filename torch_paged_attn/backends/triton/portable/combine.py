"""Partial results of shared tiles, and their merging by whichever program comes last.

A program leaves at most two parts: of a tile that an earlier program began, and of one that it
leaves unfinished itself. A part is rows of values and their lse; where a bias may be so large that
the lse would swallow the row's sum, maximum and sum instead. Programs that share a tile count their
arrivals; the last one merges the parts in the order of the keys, so that the bits do not depend on
who that is, and sets the counter back to zero for the next launch. With FIXED_UNITS the bits depend
neither on how many parts there are nor on which of them have keys.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.dequant import encode
from torch_paged_attn.backends.triton.softmax import (
    LOG2E,
    finite_or_zero,
    quotient,
    with_sink,
)


@triton.jit
def part_of(program, is_first, heads, head_program):
    """The number of a program's part of a tile: `is_first` where the tile begins in the program."""
    return (2 * program + is_first.to(tl.int32)).to(tl.int64) * heads + head_program


@triton.jit
def part_weights(parts_ptr, OPTIONS: tl.constexpr):
    """Where the lse or the maxima of all parts are, behind their values: PART_ROWS numbers for
    each. The sums are behind those.
    """
    programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
    maxima_ptr = parts_ptr + programs * (2 * OPTIONS.PART_ROWS * OPTIONS.HEAD_DIM_V)
    return maxima_ptr, maxima_ptr + programs * (2 * OPTIONS.PART_ROWS)


@triton.jit
def is_last_arrival(counter, parts):
    """Announce this program's part; True in the last of `parts` programs, which sees all parts."""
    # every thread has written before one of them counts
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
    tl.store(counter, 0, mask=is_last)
    return is_last


@triton.jit
def merge_parts(tile, first_program, parts, heads, pointers, sizes, scalars, OPTIONS: tl.constexpr):
    """Write the rows of one tile from its parts, BLOCK_MERGED elements of them at a time."""
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    GROUP_SIZE: tl.constexpr = OPTIONS.GROUP_SIZE
    PACK: tl.constexpr = OPTIONS.PACK
    ROWS: tl.constexpr = OPTIONS.PART_ROWS
    BLOCK_MERGED: tl.constexpr = OPTIONS.BLOCK_MERGED
    OUT_FORMAT: tl.constexpr = OPTIONS.OUT_FORMAT
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + PACK - 1) // PACK
    WIDTH: tl.constexpr = triton.next_power_of_2(HEAD_DIM_V)
    BLOCK_D: tl.constexpr = min(WIDTH, max(BLOCK_MERGED // ROWS, 16))
    # where bits must not depend on how many parts there are, each is a term by itself
    IS_FIXED: tl.constexpr = OPTIONS.FIXED_UNITS > 0
    BLOCK_S: tl.constexpr = 1 if IS_FIXED else max(BLOCK_MERGED // (ROWS * BLOCK_D), 1)
    head_program = tile.head_program
    r = tl.arange(0, ROWS)
    token = tile.first_token + r // PACK
    in_group = head_program % HEAD_TILES * PACK + r % PACK
    head = head_program // HEAD_TILES * GROUP_SIZE + tl.minimum(in_group, GROUP_SIZE - 1)
    row = tile.q_start + token
    exists = (r < OPTIONS.TOKENS * PACK) & (token >= 0) & (token < tile.query_len)
    exists = exists & (in_group < GROUP_SIZE) & (row >= 0) & (row < sizes.total_q)
    row = row.to(tl.int64)
    maxima_ptr, sums_ptr = part_weights(pointers.parts, OPTIONS)

    for d0 in tl.static_range(0, WIDTH, BLOCK_D):
        dims = d0 + tl.arange(0, BLOCK_D)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for s0 in tl.range(0, parts, BLOCK_S):
            s = s0 + tl.arange(0, BLOCK_S)
            part = part_of(first_program + s, s == 0, heads, head_program)
            part_row = part[None, :] * ROWS + r[:, None]
            # written by other multiprocessors: not to be found in this one's cache
            is_part = exists[:, None] & (s < parts)[None, :]
            part_m = tl.load(
                maxima_ptr + part_row, mask=is_part, other=float("-inf"), cache_modifier=".cg"
            )
            values = tl.load(
                pointers.parts + (part_row * HEAD_DIM_V)[:, :, None] + dims[None, None, :],
                mask=is_part[:, :, None] & (dims < HEAD_DIM_V)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            # a part without keys left no values: whatever is there does not count
            values = tl.where((part_m > float("-inf"))[:, :, None], values, 0.0)
            m_new = tl.maximum(m, tl.max(part_m, 1))
            shift = finite_or_zero(m_new)
            weight = tl.exp2((part_m - shift[:, None]) * LOG2E)
            if OPTIONS.BIAS == "float":
                weight *= tl.load(
                    sums_ptr + part_row, mask=is_part, other=0.0, cache_modifier=".cg"
                )
            shrink = tl.exp2((m - shift) * LOG2E)
            # left to the compiler, some elements would have the one product fused, some the other
            acc = tl.fma(acc, shrink[:, None], tl.sum(values * weight[:, :, None], 1))
            total = total * shrink + tl.sum(weight, 1)
            m = m_new

        if pointers.sinks is not None:
            # padding rows belong to no sequence and have no sink
            sink = tl.load(
                pointers.sinks + head, mask=exists & (tile.b < sizes.batch), other=float("-inf")
            )
            m, total, shrink = with_sink(m, total, sink)
            acc = acc * shrink[:, None]
        divisor = tl.where(total == 0.0, 1.0, total)
        if d0 == 0:
            lse = tl.where(total == 0.0, float("-inf"), m + tl.log(divisor))
            tl.store(pointers.lse + head.to(tl.int64) * sizes.total_q + row, lse, mask=exists)
        if pointers.out_scale is not None and not IS_FIXED:
            divisor = divisor * tl.load(pointers.out_scale)
        out = acc / divisor[:, None]
        if IS_FIXED:
            out = quotient(acc, divisor, OPTIONS.IS_PRECISE)
        if pointers.out_scale is not None and IS_FIXED:
            out = out / tl.load(pointers.out_scale)
        tl.store(
            pointers.out + ((row * scalars.num_heads + head) * HEAD_DIM_V)[:, None] + dims[None, :],
            encode(out, pointers.out.dtype.element_ty, OUT_FORMAT),
            mask=exists[:, None] & (dims < HEAD_DIM_V)[None, :],
        )
