"""The backward's statistics of each row: `softmax_lse`, and

    D = rowsum(dout * out) - dlse

They are float32 `(num_heads, tiles, 2, STATISTICS_ROWS)`. Token t of sequence b is in tile
`cu_seqlens_q[b] // STATISTICS_ROWS + b + t // STATISTICS_ROWS` (numbered as in `seqlen_info.py`),
where [0] is its lse, in base two unless the plan is `natural`, and [1] its D. Rows that do not
exist or see no key have lse +inf and D 0, so that their probabilities are 0 without a branch. Every
element is written.

A sink acts as a key whose value is 0, so its gradient is that of a logit: -sum of P D over the rows
of its head. Each program writes its part of that sum, and the parts are added in order.

On Hopper further programs list the tiles of keys, which a kernel after this one takes in order; in
the portable backward they make the transposed lists of a block layout.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.common.dequant import as_stored, decode, stored_format
from torch_paged_attn.backends.triton.common.key_tiles import (
    ENTRY,
    KeyTiles,
    num_key_tiles,
    num_parts,
    place_key_tiles,
)
from torch_paged_attn.backends.triton.common.seqlen_info import find_tile, num_tiles, query_span
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.common.transposed_lists import (
    ListPointers,
    ListSizes,
    TransposedLists,
    transpose_column,
)
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch, gdc_wait
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.backward_call import BackwardCall

# rows of a tile of statistics
STATISTICS_ROWS = 64

# elements of a row that a program loads at a time
MOST_COLUMNS = 64


class StatisticsPointers(NamedTuple):
    """The kernel's inputs, and its two results."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    cu_seqlens_q: Tensor
    sinks: Tensor | None
    statistics: Tensor
    sink_parts: Tensor | None
    tile_list: Tensor | None


class StatisticsStrides(NamedTuple):
    """Strides in elements, except those that change from call to call."""

    dout_token: int
    dout_head: int
    out_token: int
    out_head: int
    dlse_token: int | None
    lse_token: int


class StatisticsOptions(NamedTuple):
    HEAD_DIM_V: int
    WIDTH: int  # columns that are read at a time
    FORMAT: str  # of dout and out
    IS_NATURAL: bool  # lse is in base e
    ROWS: int = STATISTICS_ROWS


@triton.jit
def statistics_of(statistics_ptr, head, first_tile, sizes):
    """A pointer to a sequence's statistics of a head, whose first tile is `first_tile`."""
    tiles = sizes.total_q // 64 + sizes.batch + 1
    return statistics_ptr + (head.to(tl.int64) * tiles + first_tile) * 128


@triton.jit
def load_statistics(sequence_ptr, token, exists):
    """lse and D of a sequence's tokens."""
    at = token // 64 * 128 + token % 64
    lse = tl.load(sequence_ptr + at, mask=exists, other=float("inf"))
    return lse, tl.load(sequence_ptr + 64 + at, mask=exists, other=0.0)


@triton.jit
def load_statistics_of_tile(
    sequence_ptr, first_token, TOKENS: tl.constexpr, IS_DELTA: tl.constexpr
):
    """lse, or D, of TOKENS consecutive tokens: at most 64, starting at a multiple of TOKENS."""
    at = first_token // 64 * 128 + first_token % 64 + (64 if IS_DELTA else 0)
    return tl.load(sequence_ptr + at + tl.arange(0, TOKENS))


@triton.jit
def _statistics_of_tile(
    number, head, pointers, strides, dlse_head, lse_head, total_q, batch, OPTIONS: tl.constexpr
):  # fmt: skip
    ROWS: tl.constexpr = OPTIONS.ROWS
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    FORMAT: tl.constexpr = OPTIONS.FORMAT
    head = head.to(tl.int64)
    b, place = find_tile(number, pointers.cu_seqlens_q, batch, ROWS, 1)
    start, stop = query_span(b, pointers.cu_seqlens_q, batch, total_q)
    r = tl.arange(0, ROWS)
    row = (start + place * ROWS + r).to(tl.int64)
    # padding rows, which count as the last sequence, are not read
    exists = (row >= 0) & (row < tl.minimum(stop, total_q)) & (b < batch)
    lse = tl.load(
        pointers.lse + head * lse_head + row * strides.lse_token, mask=exists, other=float("-inf")
    )
    has_seen = lse != float("-inf")
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    dout_rows = pointers.dout + row * strides.dout_token + head * strides.dout_head
    out_rows = pointers.out + row * strides.out_token + head * strides.out_head
    for d0 in tl.static_range(0, HEAD_DIM_V, WIDTH):
        dims = d0 + tl.arange(0, WIDTH)
        inside = (exists & has_seen)[:, None] & (dims < HEAD_DIM_V)[None, :]
        dout = tl.load(dout_rows[:, None] + dims[None, :], mask=inside, other=0)
        out = tl.load(out_rows[:, None] + dims[None, :], mask=inside, other=0)
        out = decode(out, FORMAT, tl.float32)
        # a row that sees only a sink has out 0, and its dout may be NaN
        total += tl.where(out == 0.0, 0.0, decode(dout, FORMAT, tl.float32) * out)
    delta = tl.sum(total, 1)
    if pointers.dlse is not None:
        dlse_rows = pointers.dlse + head * dlse_head + row * strides.dlse_token
        delta -= tl.load(dlse_rows, mask=exists, other=0.0)
    delta = tl.where(has_seen, delta, 0.0)
    if pointers.sinks is not None:
        # NaN if both are -inf, which has_seen excludes
        share = tl.exp2((tl.load(pointers.sinks + head) - lse) * LOG2E)
        part = tl.sum(tl.where(has_seen, share * delta, 0.0), 0)
        tl.store(pointers.sink_parts + head * tl.num_programs(0) + number, part)
    lse = tl.where(has_seen, lse if OPTIONS.IS_NATURAL else lse * LOG2E, float("inf"))
    tile = pointers.statistics + (head * tl.num_programs(0) + number) * (2 * ROWS)
    tl.store(tile + r, lse)
    tl.store(tile + ROWS + r, delta)


@triton.jit(
    do_not_specialize=(
        *("dlse_head", "lse_head", "total_q", "total_k", "batch", "parts"),
        *ListSizes._fields,
    )
)
def _statistics_kernel(
    pointers,
    lengths,
    layout,
    strides,
    layout_strides,
    dlse_head,
    lse_head,
    total_q,
    total_k,
    batch,
    parts,
    crow_batch,
    crow_head,
    col_batch,
    col_head,
    layout_rows,
    nnz,
    columns,
    layout_heads,
    lists,
    grid_rows,
    OPTIONS: tl.constexpr,
    KEY_TILES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A program computes a tile of a head; with KEY_TILES, programs of one more head, which start
    first, make the `parts` of the list of tiles of keys; with a layout, those of some more heads
    make the lists of its columns."""
    gdc_wait(IS_DEPENDENT)
    number, head = tl.program_id(0), tl.program_id(1)
    if KEY_TILES is not None:
        if head == 0:
            for part in tl.range(number, parts, tl.num_programs(0)):
                place_key_tiles(
                    part, pointers.tile_list, lengths, batch, total_q, total_k, KEY_TILES
                )
        else:
            _statistics_of_tile(
                number, head - 1, pointers, strides, dlse_head, lse_head, total_q, batch,
                OPTIONS,
            )  # fmt: skip
    elif layout is not None:
        sizes = ListSizes(
            crow_batch, crow_head, col_batch, col_head, layout_rows, nnz, columns, layout_heads,
            lists, grid_rows,
        )  # fmt: skip
        if head < grid_rows:
            programs = tl.num_programs(0)
            for i in tl.range(head * programs + number, lists, grid_rows * programs):
                transpose_column(i, layout, layout_strides, sizes)
        else:
            _statistics_of_tile(
                number, head - grid_rows, pointers, strides, dlse_head, lse_head, total_q, batch,
                OPTIONS,
            )  # fmt: skip
    else:
        _statistics_of_tile(
            number, head, pointers, strides, dlse_head, lse_head, total_q, batch,
                OPTIONS,
        )  # fmt: skip


def plan_statistics(
    call: BackwardCall,
    *,
    natural: bool = False,
    key_tiles: KeyTiles | None = None,
    lists: TransposedLists | None = None,
) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    """A function that computes the statistics of calls like this one, from dout, dlse, out,
    softmax_lse, sinks, cu_seqlens_q and, with key_tiles, cu_seqlens_k and seqused_k; with lists, it
    fills in `layout`, which `lists` makes. It returns the statistics, the parts of each sink's
    negative gradient, `(num_heads, tiles)`, and the list of the tiles of keys; None for what is not
    wanted.

    natural: whether lse is in base e
    key_tiles: the tiles of keys that are listed; None: none are
    lists: the lists of a layout's columns; not with key_tiles
    """
    forward, device = call.forward, call.dout.device
    target = target_of(device)
    tiles = num_tiles(forward.total_q, forward.batch, STATISTICS_ROWS, 1)
    has_parts = forward.sinks is not None and call.output_mask[4]
    shape = (forward.num_heads, tiles, 2, STATISTICS_ROWS)
    new_statistics = Allocation(shape, torch.float32, device)
    new_parts = Allocation(shape[:2], torch.float32, device)
    new_list, total_k, parts = None, forward.k.shape[0], 0
    if key_tiles is not None:
        listed = num_key_tiles(total_k, forward.batch, key_tiles.KEYS)
        new_list = Allocation((1 + listed, ENTRY.value), torch.int32, device)
        parts = num_parts(listed)
    dout, dlse = call.dout, call.dlse
    more = int(key_tiles is not None) if lists is None else lists.rows_of_grid(tiles)
    launch = Launch(
        _statistics_kernel,
        (tiles, forward.num_heads + more),
        **(ListSizes() if lists is None else lists.sizes._replace(grid_rows=more))._asdict(),
        layout_strides=None if lists is None else lists.strides,
        strides=StatisticsStrides(
            dout_token=dout.stride(0),
            dout_head=dout.stride(1),
            out_token=call.out.stride(0),
            out_head=call.out.stride(1),
            dlse_token=None if dlse is None else dlse.stride(1),
            lse_token=call.softmax_lse.stride(1),
        ),
        dlse_head=None if dlse is None else dlse.stride(0),
        lse_head=call.softmax_lse.stride(0),
        total_q=forward.total_q,
        total_k=total_k,
        batch=forward.batch,
        parts=parts,
        OPTIONS=StatisticsOptions(
            HEAD_DIM_V=forward.head_dim_v,
            WIDTH=min(MOST_COLUMNS, next_power_of_2(forward.head_dim_v)),
            FORMAT=stored_format(dout.dtype, target),
            IS_NATURAL=natural,
        ),
        KEY_TILES=key_tiles,
        **dependent_launch(target.overlaps_launches),
    )

    def run(
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        cu_seqlens_q: Tensor,
        *of_keys: Tensor | None,
        layout: ListPointers | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        statistics = new_statistics()
        sink_parts = new_parts() if has_parts else None
        tile_list = None if new_list is None else new_list()
        launch(
            StatisticsPointers(
                dout=as_stored(dout, target)[0],
                dlse=dlse,
                out=as_stored(out, target)[0],
                lse=lse,
                cu_seqlens_q=cu_seqlens_q,
                sinks=sinks if has_parts else None,
                statistics=statistics,
                sink_parts=sink_parts,
                tile_list=tile_list,
            ),
            None if tile_list is None else (cu_seqlens_q, *of_keys, None),
            layout,
        )
        return statistics, sink_parts, tile_list

    return run
