"""Partial results of tiles that several programs share, and how they are merged.

A program writes at most two parts: one of a tile that an earlier program has begun, and one of a
tile that it does not finish. A part consists of rows of values and their lse. With a bias, whose
size may make the lse lose the digits of the row's sum, it has maximum and sum instead of the lse.
Parts are merged by the last of the programs that share the tile, or, if there are many and the
tile's config says so, by several of them, each some columns (`arrivals.py`). They are merged in the
order of the keys, and by as many at a time, whichever program does it, so that the bits do not
depend on that. With FIXED_UNITS the bits depend neither on the number of parts nor on which of them
are empty.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.arrivals import arrive
from torch_paged_attn.backends.triton.common.dequant import encode
from torch_paged_attn.backends.triton.common.softmax import (
    LOG2E,
    finite_or_zero,
    quotient,
    with_sink,
)
from torch_paged_attn.backends.triton.portable.common.named import named

# columns of a result that a program merges, where several programs merge many parts
SHARED_COLUMNS = tl.constexpr(8)


@triton.jit
def part_of(program, is_first, heads, head_program):
    """The number of a program's part. `is_first`: whether the tile begins in this program."""
    return (2 * program + is_first.to(tl.int32)).to(tl.int64) * heads + head_program


@triton.jit
def part_weights(parts_ptr, OPTIONS: tl.constexpr):
    """Pointers to the maxima (or lse) and to the sums of all parts, PART_ROWS numbers per part. In
    memory they follow the values.
    """
    programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
    maxima_ptr = parts_ptr + programs * (2 * OPTIONS.PART_ROWS * OPTIONS.HEAD_DIM_V)
    return maxima_ptr, maxima_ptr + programs * (2 * OPTIONS.PART_ROWS)


@triton.jit
def merge_if_there(
    tile, program, first_program, parts, heads, pointers, sizes, scalars, OPTIONS: tl.constexpr
):
    """Count this program's part of a tile that programs from `first_program` on share, and merge
    what it has to, now that all parts are there.
    """
    ROWS: tl.constexpr = OPTIONS.PART_ROWS
    WIDTH: tl.constexpr = triton.next_power_of_2(OPTIONS.HEAD_DIM_V)
    # if the bits must not depend on the number of parts, parts are added one by one
    IS_FIXED: tl.constexpr = OPTIONS.FIXED_UNITS > 0
    IS_SHARED: tl.constexpr = OPTIONS.IS_MERGED_BY_ALL and WIDTH > SHARED_COLUMNS
    BLOCK_D: tl.constexpr = min(WIDTH, max(OPTIONS.BLOCK_MERGED // ROWS, 16))
    BLOCK_S: tl.constexpr = 1 if IS_FIXED else max(OPTIONS.BLOCK_MERGED // (ROWS * BLOCK_D), 1)
    CHUNKS: tl.constexpr = WIDTH // SHARED_COLUMNS
    # all threads have written their values before the counter is incremented
    tl.debug_barrier()
    counter = pointers.counters + first_program * heads + tile.head_program
    number = program - first_program
    shared = named("first_program parts heads")(
        first_program=first_program, parts=parts, heads=heads
    )
    if IS_SHARED:
        # fewer parts are merged sooner than programs that wait for each other would begin
        waiting = tl.where(parts > CHUNKS, CHUNKS, 0)
        is_mine, are_shared = arrive(counter, number, parts, waiting, True)
        SHARED_S: tl.constexpr = max(OPTIONS.BLOCK_MERGED // (ROWS * SHARED_COLUMNS), 1)
        if is_mine & (waiting > 0):
            begin = tl.where(are_shared, number, 0)
            stop = tl.where(are_shared, number + 1, CHUNKS)
            for chunk in tl.range(begin, stop):
                _merge_columns(
                    chunk * SHARED_COLUMNS, tile, shared, pointers, sizes, scalars, OPTIONS,
                    SHARED_COLUMNS, SHARED_S,
                )  # fmt: skip
        is_mine = is_mine & (waiting == 0)
    else:
        # parts may be more than `arrive` can count
        is_mine = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
        tl.store(counter, 0, mask=is_mine)
    if is_mine:
        for d0 in tl.static_range(0, WIDTH, BLOCK_D):
            _merge_columns(d0, tile, shared, pointers, sizes, scalars, OPTIONS, BLOCK_D, BLOCK_S)


@triton.jit
def _merge_columns(
    d0, tile, shared, pointers, sizes, scalars, OPTIONS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge columns d0 to d0 + BLOCK_D - 1 of the parts of a tile, BLOCK_S parts at a time, and
    write the results; with column 0 softmax_lse, too.
    """
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    GROUP_SIZE: tl.constexpr = OPTIONS.GROUP_SIZE
    PACK: tl.constexpr = OPTIONS.PACK
    ROWS: tl.constexpr = OPTIONS.PART_ROWS
    OUT_FORMAT: tl.constexpr = OPTIONS.OUT_FORMAT
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + PACK - 1) // PACK
    IS_FIXED: tl.constexpr = OPTIONS.FIXED_UNITS > 0
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

    dims = d0 + tl.arange(0, BLOCK_D)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for s0 in tl.range(0, shared.parts, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        part = part_of(shared.first_program + s, s == 0, shared.heads, head_program)
        part_row = part[None, :] * ROWS + r[:, None]
        # other multiprocessors have written these: bypass this one's L1 cache
        is_part = exists[:, None] & (s < shared.parts)[None, :]
        part_m = tl.load(
            maxima_ptr + part_row, mask=is_part, other=float("-inf"), cache_modifier=".cg"
        )
        values = tl.load(
            pointers.parts + (part_row * HEAD_DIM_V)[:, :, None] + dims[None, None, :],
            mask=is_part[:, :, None] & (dims < HEAD_DIM_V)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # a part without keys has not written its values
        values = tl.where((part_m > float("-inf"))[:, :, None], values, 0.0)
        m_new = tl.maximum(m, tl.max(part_m, 1))
        shift = finite_or_zero(m_new)
        weight = tl.exp2((part_m - shift[:, None]) * LOG2E)
        if OPTIONS.BIAS == "float":
            weight *= tl.load(sums_ptr + part_row, mask=is_part, other=0.0, cache_modifier=".cg")
        shrink = tl.exp2((m - shift) * LOG2E)
        # the compiler might fuse another product with the sum in some elements
        acc = tl.fma(acc, shrink[:, None], tl.sum(values * weight[:, :, None], 1))
        total = total * shrink + tl.sum(weight, 1)
        m = m_new

    if pointers.sinks is not None:
        # padding rows belong to no sequence and get no sink
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
