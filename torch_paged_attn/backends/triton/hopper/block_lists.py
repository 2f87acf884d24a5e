"""Which blocks of keys a tile of queries visits: the union of the lists of its layout rows.

A tile of the Hopper kernel may hold several rows of a layout, whose lists have most blocks in
common. A group of ROWS neighbouring rows becomes one list, sorted, that says of each block which of
the rows see it. Lists follow from the layout alone, wherever a batch's sequences lie; a group's
list goes where `col_indices` keeps the blocks of its rows, so that nothing is counted first.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.attention_call import BlockLayout
from torch_paged_attn.backends.triton.runtime.launch import allocate, launch

# an entry: the number of a piece of keys, and below it a bit for each row of the group
ROW_BITS = tl.constexpr(8)

# int32 words of a group's span: its first entry, how many there are
SPAN = tl.constexpr(2)

# pieces times rows that a program sorts at a time, blocks that it looks at at a time
SORTED = 256
LOOKED_AT = 64


# sizes that differ from layout to layout
VARYING = (
    "stride_crow_batch",
    "stride_crow_head",
    "stride_col_batch",
    "stride_col_head",
    "layout_rows",
    "nnz",
    "num_pieces",
)


@triton.jit(do_not_specialize=VARYING)
def _block_lists_kernel(
    entries_ptr,
    spans_ptr,
    crow_ptr,
    col_ptr,
    stride_crow_batch,
    stride_crow_head,
    stride_crow,
    stride_col_batch,
    stride_col_head,
    stride_col,
    layout_rows,
    nnz,
    num_pieces,
    ROWS: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PIECES: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SORTED: tl.constexpr,
    LOOKED_AT: tl.constexpr,
):
    """One program for a group of rows of a head of a batch entry. A block is PIECES pieces of KEYS
    keys, and a piece that a row of the group sees is an entry.
    """
    group, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    crow_ptr += b.to(tl.int64) * stride_crow_batch + head.to(tl.int64) * stride_crow_head
    col_ptr += b.to(tl.int64) * stride_col_batch + head.to(tl.int64) * stride_col_head
    layout_head = b * tl.num_programs(1) + head
    first_row = group * ROWS
    stop_row = tl.minimum(first_row + ROWS, layout_rows)
    # rows nobody checked must not lead outside the entries
    begin = tl.minimum(tl.maximum(tl.load(crow_ptr + first_row * stride_crow), 0), nnz)
    stop = tl.minimum(tl.load(crow_ptr + stop_row * stride_crow), nnz)
    room = (stop - begin) * PIECES
    first_entry = (layout_head * nnz + begin) * PIECES
    r = tl.arange(0, ROWS)
    row_stops = tl.load(crow_ptr + tl.minimum(first_row + 1 + r, stop_row) * stride_crow)
    if IS_CAUSAL:
        num_pieces = tl.minimum(num_pieces, tl.cdiv(stop_row * Q_BLOCK, KEYS))
    count = tl.full([], 0, tl.int32)
    for piece0 in tl.range(0, num_pieces, SORTED):
        # (SORTED, ROWS): how often a row lists a piece
        found = tl.zeros([SORTED * ROWS], tl.int32)
        for i0 in tl.range(begin, stop, LOOKED_AT):
            i = i0 + tl.arange(0, LOOKED_AT)
            col = tl.load(col_ptr + i.to(tl.int64) * stride_col, mask=i < stop, other=-1)
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
        entry = entries_ptr + first_entry + place
        tl.store(entry, (piece << ROW_BITS) | rows, mask=(listed > 0) & (place < room))
        count += tl.sum(listed, 0)
    span = spans_ptr + (layout_head * tl.num_programs(0) + group) * SPAN
    tl.store(span, first_entry)
    tl.store(span + 1, tl.maximum(tl.minimum(count, room), 0))


@dataclasses.dataclass(frozen=True)
class BlockLists:
    """`entries` of all groups of rows, and `spans`, (batch or 1, H, groups, 2): where each group's
    begin, and how many there are. A group covers `positions` queries, an entry `keys` keys.
    """

    entries: Tensor
    spans: Tensor
    positions: int
    keys: int


def number_of_entries(layout: BlockLayout, block_n: int) -> int:
    """How many entries the lists of a layout may have."""
    return layout.col_indices.numel() * max(layout.k_block_size // block_n, 1)


def build_block_lists(
    layout: BlockLayout, key_bound: int, *, is_causal: bool, tokens: int, block_n: int
) -> BlockLists:
    """The lists for tiles of `tokens` queries and `block_n` keys, of sequences of up to `key_bound`
    keys. Nothing is read on the host.
    """
    crow, col = layout.crow_indices, layout.col_indices
    batch, heads, bounds = (1, *crow.shape)[-3:]
    rows = max(tokens // layout.q_block_size, 1)
    positions = rows * layout.q_block_size
    pieces = max(layout.k_block_size // block_n, 1)
    keys = layout.k_block_size // pieces
    groups = min(-(-(bounds - 1) // rows), -(-key_bound // positions))
    entries = allocate((number_of_entries(layout, block_n),), torch.int32, col.device)
    spans = allocate((batch, heads, groups, SPAN.value), torch.int32, col.device)
    if spans.numel() > 0:
        launch(
            _block_lists_kernel,
            (groups, heads, batch),
            entries,
            spans,
            crow,
            col,
            *(0, *crow.stride())[-3:],
            *(0, *col.stride())[-3:],
            bounds - 1,
            col.shape[-1],
            -(-key_bound // keys),
            ROWS=rows,
            Q_BLOCK=layout.q_block_size,
            KEYS=keys,
            PIECES=pieces,
            IS_CAUSAL=is_causal,
            SORTED=SORTED // rows,
            LOOKED_AT=LOOKED_AT,
            num_warps=1,
        )
    return BlockLists(entries, spans, positions, keys)
