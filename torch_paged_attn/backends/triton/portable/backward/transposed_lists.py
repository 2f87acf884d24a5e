"""The transpose of a block layout, made on the device: for each column, the rows that list it.

It is a stable counting sort of the layout's entries by column, in four kernels: the row of each
entry, the number of entries of each column, where each column's list starts, and the lists. The
rows of a list are in increasing order, because the layout's entries are sorted by row. The host
reads nothing. A program reads all entries of its head to find those of its column.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.attention_call import BlockLayout
from torch_paged_attn.backends.triton.portable.common.key_positions import key_position
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# entries, or columns, that a program reads at a time
LOOKED_AT = tl.constexpr(1024)

# entries of a list that are compared at a time
COMPARED = tl.constexpr(128)


class ListPointers(NamedTuple):
    """The layout and its transpose: the row of each entry; for each column the number of its
    entries and the start of its list; and the lists. All by batch entry and head.
    """

    crow: Tensor
    col: Tensor
    entry_rows: Tensor
    counts: Tensor
    starts: Tensor
    rows: Tensor


@triton.jit
def _layout_of_program(b, head, pointers, crow_batch, crow_head, crow, layout_rows, nnz):
    """The range of a head's entries (first, last + 1), and a pointer to its crow_indices."""
    crow_ptr = pointers.crow + (b.to(tl.int64) * crow_batch + head.to(tl.int64) * crow_head)
    # unchecked bounds must not lead outside the tensor
    begin = tl.minimum(tl.maximum(tl.load(crow_ptr), 0), nnz)
    stop = tl.minimum(tl.load(crow_ptr + tl.cast(layout_rows, tl.int64) * crow), nnz)
    return begin, stop, crow_ptr


SIZES = ("crow_batch", "crow_head", "col_batch", "col_head", "layout_rows", "nnz", "columns")


@triton.jit(do_not_specialize=SIZES)
def _entry_rows_kernel(
    pointers, crow_batch, crow_head, col_batch, col_head, layout_rows, nnz, columns, crow, col
):
    """Write the row of each entry. A program has a row of one head of one batch entry."""
    row, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, crow_ptr = _layout_of_program(
        b, head, pointers, crow_batch, crow_head, crow, layout_rows, nnz
    )
    bound = crow_ptr + row.to(tl.int64) * crow
    begin, stop = tl.maximum(tl.load(bound), 0), tl.minimum(tl.load(bound + crow), nnz)
    rows = pointers.entry_rows + (b * tl.num_programs(1) + head).to(tl.int64) * nnz
    for i0 in tl.range(begin, stop, COMPARED):
        i = i0 + tl.arange(0, COMPARED)
        tl.store(rows + i, row, mask=i < stop)


@triton.jit(do_not_specialize=(*SIZES, "is_list"))
def _column_kernel(
    pointers, crow_batch, crow_head, col_batch, col_head, layout_rows, nnz, columns, crow, col,
    is_list,
):  # fmt: skip
    """Count the entries of a column (is_list 0), or write its list (1). A program has a column of
    one head of one batch entry.
    """
    column, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layout_head = (b * tl.num_programs(1) + head).to(tl.int64)
    begin, stop, _ = _layout_of_program(
        b, head, pointers, crow_batch, crow_head, crow, layout_rows, nnz
    )
    col_ptr = pointers.col + (b.to(tl.int64) * col_batch + head.to(tl.int64) * col_head)
    at_column = layout_head * columns + column
    writes = is_list != 0
    found = tl.load(pointers.starts + at_column, mask=writes, other=0)
    for i0 in tl.range(begin, stop, LOOKED_AT):
        i = i0 + tl.arange(0, LOOKED_AT)
        entry = tl.load(col_ptr + i.to(tl.int64) * col, mask=i < stop, other=-1)
        is_listed = entry == column
        listed = is_listed.to(tl.int32)
        if writes:
            place = found + tl.cumsum(listed, 0) - 1
            row = tl.load(pointers.entry_rows + layout_head * nnz + i, mask=is_listed, other=0)
            keep = is_listed & (place < nnz)
            tl.store(pointers.rows + layout_head * nnz + place, row, mask=keep)
        found += tl.sum(listed, 0)
    tl.store(pointers.counts + at_column, found, mask=not writes)


@triton.jit(do_not_specialize=SIZES)
def _starts_kernel(
    pointers, crow_batch, crow_head, col_batch, col_head, layout_rows, nnz, columns, crow, col
):
    """Write the start of each column's list: the sum of the counts of the columns before it. A
    program has one head of one batch entry.
    """
    head, b = tl.program_id(1), tl.program_id(2)
    at = (b * tl.num_programs(1) + head).to(tl.int64) * columns
    before = tl.full([], 0, tl.int32)
    for c0 in tl.range(0, columns, LOOKED_AT):
        c = c0 + tl.arange(0, LOOKED_AT)
        counts = tl.load(pointers.counts + at + c, mask=c < columns, other=0)
        ends = before + tl.cumsum(counts, 0)
        tl.store(pointers.starts + at + c, ends - counts, mask=c < columns)
        before += tl.sum(counts, 0)


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


def plan_transposed_lists(
    layout: BlockLayout, position_bound: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Plan the kernels that transpose a layout, for keys at positions below `position_bound`.

    The result is a function of `crow_indices` and `col_indices` that returns int32 tensors: the
    rows of all lists `(batch * heads, nnz)`, and for each column the start of its list and the
    number of its rows, `(batch * heads, columns)` each.
    """
    crow, col = layout.crow_indices, layout.col_indices
    batch, heads, bounds = (1, *crow.shape)[-3:]
    nnz, columns = col.shape[-1], -(-position_bound // layout.k_block_size)
    new_rows = Allocation((batch * heads, nnz), torch.int32, col.device)
    new_columns = Allocation((batch * heads, columns), torch.int32, col.device)
    crow_batch, crow_head, crow_step = (0, *crow.stride())[-3:]
    col_batch, col_head, col_step = (0, *col.stride())[-3:]
    numbers = dict(
        crow_batch=crow_batch,
        crow_head=crow_head,
        col_batch=col_batch,
        col_head=col_head,
        layout_rows=bounds - 1,
        nnz=nnz,
        columns=columns,
        crow=crow_step,
        col=col_step,
    )
    of_rows = Launch(_entry_rows_kernel, (bounds - 1, heads, batch), **numbers, num_warps=1)
    of_counts = Launch(_column_kernel, (columns, heads, batch), **numbers, is_list=0)
    of_starts = Launch(_starts_kernel, (1, heads, batch), **numbers)
    of_lists = Launch(_column_kernel, (columns, heads, batch), **numbers, is_list=1)
    is_empty = 0 in (batch, heads, bounds - 1, nnz, columns)

    def build(crow: Tensor, col: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if is_empty:
            return new_rows(), new_columns().zero_(), new_columns().zero_()
        entry_rows, rows = new_rows(), new_rows()
        counts, starts = new_columns(), new_columns()
        pointers = ListPointers(crow, col, entry_rows, counts, starts, rows)
        for launch in (of_rows, of_counts, of_starts, of_lists):
            launch(pointers)
        return rows, starts, counts

    return build
