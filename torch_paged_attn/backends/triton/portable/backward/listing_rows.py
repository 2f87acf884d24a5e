"""Which queries see a tile of keys under a block layout: those of the rows that list its column, in
the lists of `common/transposed_lists.py`.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.transposed_lists import COMPARED
from torch_paged_attn.backends.triton.portable.common.key_positions import key_position


@triton.jit
def listing_rows(keys, queries, head, pointers, sizes, scalars, OPTIONS: tl.constexpr):
    """The list of the column of a tile of keys, and the range of its entries whose rows contain
    queries that may see the tile.
    """
    nnz = tl.cast(sizes.nnz, tl.int64)
    last = key_position(sizes.max_keys - 1, scalars, OPTIONS)
    columns = tl.cast(last // OPTIONS.K_BLOCK + 1, tl.int64)
    layout_head = head // OPTIONS.LAYOUT_GROUP
    if OPTIONS.LAYOUT_PER_SEQUENCE:
        layout_head += keys.b * OPTIONS.LAYOUT_HEADS
    layout_head = layout_head.to(tl.int64)
    is_seen = (keys.b < sizes.batch) & (queries.start < queries.stop)
    column = key_position(keys.low, scalars, OPTIONS) // OPTIONS.K_BLOCK
    at = layout_head * columns + column
    start = tl.load(pointers.listing_starts + at, mask=is_seen, other=0)
    count = tl.load(pointers.listing_counts + at, mask=is_seen, other=0)
    rows_ptr = pointers.listing_rows + (layout_head * nnz + start)
    count = tl.minimum(count, sizes.nnz - start)
    first_row = tl.maximum(queries.past + queries.start, 0) // OPTIONS.Q_BLOCK
    stop_row = tl.cdiv(tl.maximum(queries.past + queries.stop, 0), OPTIONS.Q_BLOCK)
    first_entry, stop_entry = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for i0 in tl.range(0, count, COMPARED):
        i = i0 + tl.arange(0, COMPARED)
        row = tl.load(rows_ptr + i, mask=i < count, other=2147483647)
        first_entry += tl.sum((row < first_row).to(tl.int32), 0)
        stop_entry += tl.sum((row < stop_row).to(tl.int32), 0)
    return rows_ptr, first_entry, stop_entry
