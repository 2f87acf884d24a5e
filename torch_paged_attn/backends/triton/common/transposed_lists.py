"""The transpose of a block layout, made on the device: for each column, the rows that list it.

It is a stable counting sort of the layout's entries by column, which programs of the kernel of the
statistics do (`backward_preprocess.py`). A program has a column. It reads all entries of its head
twice: first it counts those of its column and of columns before it, which is where its list starts;
then it writes its list. The rows of a list are in increasing order, because the layout's entries
are sorted by row. The host reads nothing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.attention_call import BlockLayout
from torch_paged_attn.backends.triton.runtime.target import cdiv
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# entries, or columns, that a program reads at a time
LOOKED_AT = tl.constexpr(1024)

# entries of a list that are compared at a time
COMPARED = tl.constexpr(128)

# the most rows of a grid whose programs make lists
MOST_IN_GRID = 4096


class ListPointers(NamedTuple):
    """The layout and its transpose: for each column the number of its entries and the start of its
    list; and the lists. All by batch entry and head.
    """

    crow: Tensor
    col: Tensor
    counts: Tensor
    starts: Tensor
    rows: Tensor


@triton.jit
def _row_of(entry, exists, crow_ptr, crow, layout_rows):
    """The row of each entry: the last one that begins at or before it, found by halving."""
    row, stop = tl.zeros_like(entry), tl.zeros_like(entry) + layout_rows
    step = layout_rows
    while step > 0:
        middle = (row + stop) // 2
        bound_ptr = crow_ptr + middle.to(tl.int64) * crow
        bound = tl.load(bound_ptr, mask=exists & (row < middle), other=0)
        begins = bound <= entry
        row, stop = tl.where(begins, middle, row), tl.where(begins, stop, middle)
        step = step // 2
    return row


class ListSizes(NamedTuple):
    """What differs from layout to layout: strides, and numbers. None where there is no layout."""

    crow_batch: int | None = None
    crow_head: int | None = None
    col_batch: int | None = None
    col_head: int | None = None
    layout_rows: int | None = None
    nnz: int | None = None
    columns: int | None = None
    layout_heads: int | None = None
    lists: int | None = None  # of all heads and batch entries
    grid_rows: int | None = None  # rows of the grid whose programs make them


class ListStrides(NamedTuple):
    """The innermost strides, which are 1 in most layouts."""

    crow: int
    col: int


@triton.jit
def transpose_column(number, pointers, strides, sizes):
    """Make list `number` of a layout: that of a column of one head of one batch entry."""
    nnz, columns, layout_rows = sizes.nnz, sizes.columns, sizes.layout_rows
    column, layout_head = number % columns, (number // columns).to(tl.int64)
    head, b = layout_head % sizes.layout_heads, layout_head // sizes.layout_heads
    crow_ptr = pointers.crow + (b * sizes.crow_batch + head * sizes.crow_head)
    # unchecked bounds must not lead outside the tensor
    begin = tl.minimum(tl.maximum(tl.load(crow_ptr), 0), nnz)
    stop = tl.minimum(tl.load(crow_ptr + tl.cast(layout_rows, tl.int64) * strides.crow), nnz)
    col_ptr = pointers.col + (b * sizes.col_batch + head * sizes.col_head)

    own, before = tl.zeros([LOOKED_AT], tl.int32), tl.zeros([LOOKED_AT], tl.int32)
    for i0 in tl.range(begin, stop, LOOKED_AT):
        i = i0 + tl.arange(0, LOOKED_AT)
        entry = tl.load(col_ptr + i.to(tl.int64) * strides.col, mask=i < stop, other=-1)
        own += (entry == column).to(tl.int32)
        before += ((entry >= 0) & (entry < column)).to(tl.int32)
    start, count = tl.sum(before, 0), tl.sum(own, 0)
    tl.store(pointers.starts + layout_head * columns + column, start)
    tl.store(pointers.counts + layout_head * columns + column, count)

    list_ptr = pointers.rows + layout_head * nnz + start
    found = 0
    for i0 in tl.range(begin, stop, LOOKED_AT):
        i = i0 + tl.arange(0, LOOKED_AT)
        entry = tl.load(col_ptr + i.to(tl.int64) * strides.col, mask=i < stop, other=-1)
        is_own = entry == column
        listed = is_own.to(tl.int32)
        place = found + tl.cumsum(listed, 0) - 1
        tl.store(list_ptr + place, i, mask=is_own)
        found += tl.sum(listed, 0)
    # the list holds entries, which all threads of the program have written; now their rows
    tl.debug_barrier()
    for i0 in tl.range(0, count, COMPARED):
        i = i0 + tl.arange(0, COMPARED)
        entry = tl.load(list_ptr + i, mask=i < count, other=0)
        row = _row_of(entry, i < count, crow_ptr, strides.crow, layout_rows)
        tl.store(list_ptr + i, row, mask=i < count)


class TransposedLists:
    """The lists of layouts like this one, for keys at positions below `position_bound`."""

    def __init__(self, layout: BlockLayout, position_bound: int) -> None:
        crow, col = layout.crow_indices, layout.col_indices
        batch, heads, bounds = (1, *crow.shape)[-3:]
        nnz, columns = col.shape[-1], -(-position_bound // layout.k_block_size)
        self._new_rows = Allocation((batch * heads, nnz), torch.int32, col.device)
        self._new_columns = Allocation((batch * heads, columns), torch.int32, col.device)
        crow_batch, crow_head, crow_step = (0, *crow.stride())[-3:]
        col_batch, col_head, col_step = (0, *col.stride())[-3:]
        self._is_empty = 0 in (batch, heads, bounds - 1, nnz, columns)
        self.strides = ListStrides(crow_step, col_step)
        self.sizes = ListSizes(
            crow_batch=crow_batch,
            crow_head=crow_head,
            col_batch=col_batch,
            col_head=col_head,
            layout_rows=bounds - 1,
            nnz=nnz,
            columns=max(columns, 1),
            layout_heads=heads,
            lists=0 if self._is_empty else batch * heads * columns,
        )

    def rows_of_grid(self, programs: int) -> int:
        """Rows of so many programs that make the lists, each those that are as many apart."""
        return min(cdiv(self.sizes.lists or 0, programs), MOST_IN_GRID)

    def new(self, crow: Tensor, col: Tensor) -> ListPointers:
        """The layout, and int32 memory for its lists: `rows` `(batch * heads, nnz)`, and for each
        column the start of its list and the number of its rows, `(batch * heads, columns)` each.
        """
        counts, starts = self._new_columns(), self._new_columns()
        if self._is_empty:
            counts.zero_()
            starts.zero_()
        return ListPointers(crow, col, counts, starts, self._new_rows())
