"""The kernels before and after the one that visits units of keys (`kernel.py`).

Before it, query rows of the entries of units are copied one behind the other in the order in which
units take them, for groups of so few heads that a token's rows are no box of a swizzled tile. After
it, the parts of tokens are added up in the order of the list.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.softmax import LOG2E, finite_or_zero, with_sink
from torch_paged_attn.backends.triton.common.unit_items import ITEM, ITEM_WORDS


@triton.jit(do_not_specialize=("first_row", "total_q", "batch", "entries"))
def _combine_units_kernel(
    pointers, first_row, total_q, batch, entries,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, which share a list of `entries`, at most K of them. `pointers` is a
    `UnitCombinePointers`. Parts are as `kernel.py` leaves them: of 32 columns, in the order
    (lane, eight, pair)."""
    row, group = tl.program_id(0), tl.program_id(1)
    head = group * HEADS + tl.arange(0, HEADS)
    first = (row * tl.num_programs(1) + group) * entries
    buckets_ptr = pointers.buckets + first
    part_lse_ptr = pointers.part_lse + tl.cast(first, tl.int64) * HEADS
    part_scale_ptr = pointers.part_scale + tl.cast(first, tl.int64) * HEADS
    parts_ptr = pointers.parts + tl.cast(first, tl.int64) * (HEADS * WIDTH)
    every = tl.arange(0, K)
    counts = tl.load(buckets_ptr + every, mask=every < entries, other=-1) >= 0
    every = every[:, None] * HEADS + tl.arange(0, HEADS)[None, :]
    all_lse = tl.load(part_lse_ptr + every, mask=counts[:, None], other=float("-inf"))
    m = tl.max(all_lse, 0)
    shift = finite_or_zero(m)
    total = tl.sum(tl.exp2(all_lse - shift[None, :]), 0)
    d = tl.arange(0, WIDTH)
    acc = tl.zeros([HEADS, WIDTH], tl.float32)
    h = tl.arange(0, HEADS)
    for e in tl.range(0, entries, loop_unroll_factor=4):
        is_part = tl.load(buckets_ptr + e) >= 0
        part_lse = tl.load(part_lse_ptr + e * HEADS + h, mask=is_part, other=float("-inf"))
        weight = tl.load(part_scale_ptr + e * HEADS + h, mask=is_part, other=0.0)
        weight *= tl.exp2(part_lse - shift)
        of_part = (e * HEADS + h)[:, None] * WIDTH + d[None, :]
        part = tl.load(parts_ptr + of_part, mask=is_part, other=0.0)
        acc += part.to(tl.float32) * weight[:, None]
    m *= 1.0 / LOG2E
    token = first_row + row
    if pointers.sinks is not None:
        # rows of padding belong to no sequence and get no sink
        is_token = token < tl.load(pointers.cu_seqlens_q + batch)
        sink = tl.load(pointers.sinks + head, mask=is_token, other=float("-inf"))
        m, total, shrink = with_sink(m, total, sink)
        acc *= shrink[:, None]
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), m + tl.log(divisor))
    tl.store(pointers.lse + head.to(tl.int64) * total_q + token, lse)
    out = acc * (1.0 / divisor)[:, None]
    out = tl.reshape(out, [HEADS, WIDTH // 32, 4, 4, 2])
    out = tl.reshape(tl.permute(out, [0, 1, 3, 2, 4]), [HEADS, WIDTH])
    to = pointers.out + (tl.cast(token, tl.int64) * NUM_HEADS + head)[:, None] * WIDTH + d[None, :]
    tl.store(to, out.to(pointers.out.dtype.element_ty))


@triton.jit(do_not_specialize=("row_pieces", "head_pieces", "groups", "entries"))
def _copy_unit_queries_kernel(
    pointers, row_pieces, head_pieces, groups, entries,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of ROWS entries, HEADS each. `pointers` is a `UnitQueryPointers`; rows and heads of
    queries are so many pieces of eight numbers apart."""
    num_items = tl.load(pointers.num_items)
    last_ptr = pointers.items + (num_items - 1).to(tl.int64) * ITEM_WORDS
    first = tl.load(last_ptr + ITEM.FIRST, mask=num_items > 0, other=0)
    total = first + tl.load(last_ptr + ITEM.COUNT, mask=num_items > 0, other=0)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = i < total
    row = tl.load(pointers.rows + i, mask=exists, other=0).to(tl.int64)
    entry = tl.load(pointers.entries + i, mask=exists, other=0)
    head = entry // entries % groups * HEADS
    d = tl.arange(0, WIDTH)[None, :]
    for h in tl.static_range(HEADS):
        source = row * row_pieces + (head + h).to(tl.int64) * head_pieces
        x = tl.load(pointers.q + source[:, None] * 8 + d, mask=exists[:, None], other=0.0)
        target = (i.to(tl.int64) * HEADS + h) * WIDTH
        tl.store(pointers.copied + target[:, None] + d, x, mask=exists[:, None])
