"""Query rows of the entries of units, copied one behind the other in the order in which units take
them, for groups of so few heads that a token's rows are no box of a swizzled tile."""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.unit_items import ITEM, ITEM_WORDS


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
