"""Which blocks of keys a tile of queries visits: the union of the lists of its layout rows.

A tile of the Hopper kernel may hold several rows of a layout, which have most blocks in common. A
list is for ROWS neighbouring rows: its entries are sorted, and each says which of the rows see
a block, or a piece of one. Lists depend on the layout alone, not on a batch's sequences. The
entries of a list have the room of its rows' blocks in `col_indices`, in the same order, so that no
entries have to be counted first.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.attention_call import BlockLayout
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# an entry: the number of a piece of keys, and below it a bit for each row of the list
ROW_BITS = tl.constexpr(8)

# int32 words of a list's span: its first entry, how many there are
SPAN = tl.constexpr(2)

# how many pieces times rows a program sorts at a time, and how many blocks it loads at a time
SORTED = 256
LOOKED_AT = tl.constexpr(64)


class ListPointers(NamedTuple):
    """The memory that the kernel writes, and the layout that it reads."""

    entries: Tensor
    spans: Tensor
    crow: Tensor
    col: Tensor


class ListStrides(NamedTuple):
    """The innermost strides, which are 1 in most layouts."""

    crow: int
    col: int


class ListSizes(NamedTuple):
    """What differs from layout to layout."""

    stride_crow_batch: int
    stride_crow_head: int
    stride_col_batch: int
    stride_col_head: int
    layout_rows: int
    nnz: int
    num_pieces: int


class ListOptions(NamedTuple):
    ROWS: int  # of a layout, in a list
    Q_BLOCK_SIZE: int
    KEYS_PER_ENTRY: int
    PIECES: int  # entries of a block
    IS_CAUSAL: bool
    SORTED: int


@triton.jit(do_not_specialize=ListSizes._fields)
def _block_lists_kernel(
    pointers, strides,
    stride_crow_batch, stride_crow_head, stride_col_batch, stride_col_head,
    layout_rows, nnz, num_pieces,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """One program for a list of a head of a batch entry. A block is PIECES pieces of
    KEYS_PER_ENTRY keys, and a piece that a row of the list sees is an entry.
    """
    ROWS: tl.constexpr = OPTIONS.ROWS
    Q_BLOCK: tl.constexpr = OPTIONS.Q_BLOCK_SIZE
    KEYS: tl.constexpr = OPTIONS.KEYS_PER_ENTRY
    PIECES: tl.constexpr = OPTIONS.PIECES
    IS_CAUSAL: tl.constexpr = OPTIONS.IS_CAUSAL
    SORTED: tl.constexpr = OPTIONS.SORTED
    number, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    crow_ptr = pointers.crow + b.to(tl.int64) * stride_crow_batch
    crow_ptr += head.to(tl.int64) * stride_crow_head
    col_ptr = pointers.col + b.to(tl.int64) * stride_col_batch
    col_ptr += head.to(tl.int64) * stride_col_head
    layout_head = b * tl.num_programs(1) + head
    first_row = number * ROWS
    stop_row = tl.minimum(first_row + ROWS, layout_rows)
    # rows nobody checked must not lead outside the entries
    begin = tl.minimum(tl.maximum(tl.load(crow_ptr + first_row * strides.crow), 0), nnz)
    stop = tl.minimum(tl.load(crow_ptr + stop_row * strides.crow), nnz)
    room = (stop - begin) * PIECES
    first_entry = (layout_head * nnz + begin) * PIECES
    r = tl.arange(0, ROWS)
    row_stops = tl.load(crow_ptr + tl.minimum(first_row + 1 + r, stop_row) * strides.crow)
    if IS_CAUSAL:
        num_pieces = tl.minimum(num_pieces, tl.cdiv(stop_row * Q_BLOCK, KEYS))
    count = tl.full([], 0, tl.int32)
    for piece0 in tl.range(0, num_pieces, SORTED):
        # (SORTED, ROWS): how often a row lists a piece
        found = tl.zeros([SORTED * ROWS], tl.int32)
        for i0 in tl.range(begin, stop, LOOKED_AT):
            i = i0 + tl.arange(0, LOOKED_AT)
            col = tl.load(col_ptr + i.to(tl.int64) * strides.col, mask=i < stop, other=-1)
            row = tl.sum((i[:, None] >= row_stops[None, :]).to(tl.int32), 1)
            for part in tl.static_range(PIECES):
                place = col * PIECES + part - piece0
                inside = (col >= 0) & (col < num_pieces) & (place >= 0) & (place < SORTED)
                inside = inside & (row < ROWS)
                bin = tl.where(inside, place * ROWS + row, 0)
                found += tl.histogram(bin, SORTED * ROWS, mask=inside)
        piece = piece0 + tl.arange(0, SORTED)
        seen = (tl.reshape(found, [SORTED, ROWS]) > 0) & (piece < num_pieces)[:, None]
        if IS_CAUSAL:
            seen = seen & ((piece * KEYS)[:, None] < ((first_row + r + 1) * Q_BLOCK)[None, :])
        rows = tl.sum(seen.to(tl.int32) << r[None, :], 1)
        listed = (rows != 0).to(tl.int32)
        place = count + tl.cumsum(listed, 0) - 1
        entry = pointers.entries + first_entry + place
        tl.store(entry, (piece << ROW_BITS) | rows, mask=(listed > 0) & (place < room))
        count += tl.sum(listed, 0)
    span = pointers.spans + (layout_head * tl.num_programs(0) + number) * SPAN
    tl.store(span, first_entry)
    tl.store(span + 1, tl.maximum(tl.minimum(count, room), 0))


def shape_of_lists(
    q_block_size: int, k_block_size: int, tokens: int, block_n: int
) -> tuple[int, int]:
    """Queries that a list covers, and keys that an entry stands for, with tiles of `tokens` queries
    and `block_n` keys.
    """
    queries_per_list = max(tokens // q_block_size, 1) * q_block_size
    return queries_per_list, k_block_size // max(k_block_size // block_n, 1)


def number_of_entries(layout: BlockLayout, keys_per_entry: int) -> int:
    """How many entries the lists of a layout may have."""
    return layout.col_indices.numel() * max(layout.k_block_size // keys_per_entry, 1)


def number_of_lists(layout: BlockLayout, queries_per_list: int, key_bound: int) -> int:
    """How many lists a head of a layout has."""
    layout_rows = layout.crow_indices.shape[-1] - 1
    rows = queries_per_list // layout.q_block_size
    return min(-(-layout_rows // rows), -(-key_bound // queries_per_list))


def plan_block_lists(
    layout: BlockLayout,
    queries_per_list: int,
    keys_per_entry: int,
    key_bound: int,
    is_causal: bool,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A function that builds the lists of layouts like this one, for sequences of up to `key_bound`
    keys. Nothing is read on the host.

    It takes `crow_indices` and `col_indices`, and returns `entries` of all lists, and `spans`,
    (batch or 1, H, lists of a head, 2): where each list begins, and how many entries it has.
    """
    crow, col = layout.crow_indices, layout.col_indices
    batch, heads, bounds = (1, *crow.shape)[-3:]
    rows = queries_per_list // layout.q_block_size
    lists = number_of_lists(layout, queries_per_list, key_bound)
    entries = number_of_entries(layout, keys_per_entry)
    new_entries = Allocation((entries,), torch.int32, col.device)
    new_spans = Allocation((batch, heads, lists, SPAN.value), torch.int32, col.device)
    crow_strides, col_strides = (0, *crow.stride())[-3:], (0, *col.stride())[-3:]
    launch = Launch(
        _block_lists_kernel,
        (lists, heads, batch),
        strides=ListStrides(crow_strides[-1], col_strides[-1]),
        **ListSizes(
            stride_crow_batch=crow_strides[0],
            stride_crow_head=crow_strides[1],
            stride_col_batch=col_strides[0],
            stride_col_head=col_strides[1],
            layout_rows=bounds - 1,
            nnz=col.shape[-1],
            num_pieces=-(-key_bound // keys_per_entry),
        )._asdict(),
        OPTIONS=ListOptions(
            ROWS=rows,
            Q_BLOCK_SIZE=layout.q_block_size,
            KEYS_PER_ENTRY=keys_per_entry,
            PIECES=layout.k_block_size // keys_per_entry,
            IS_CAUSAL=is_causal,
            SORTED=SORTED // rows,
        ),
        num_warps=1,
    )

    def build(crow: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
        entries, spans = new_entries(), new_spans()
        if batch * heads * lists > 0:
            launch(ListPointers(entries, spans, crow, col))
        return entries, spans

    return build
